"""Checkpoints are written atomically, and damaged ones are refused."""

import errno
import resource
import subprocess
import sys

import pytest
import torch

from sinkformers.lab.artefacts.artefact import ExperimentError
from sinkformers.lab.workbench import checkpoint


def tensors():
    return {"a": torch.arange(7.0), "b": torch.tensor(3), "c": torch.zeros(0, 5), "d": torch.randn(3, 2).T.bfloat16()}


def test_what_was_written_is_read(tmp_path):
    written = tensors()
    checkpoint.write(tmp_path / "x", written, {"epoch": 3, "records": [{"loss": 0.1}]})
    found, state = checkpoint.read(tmp_path / "x")
    assert found.keys() == written.keys()
    assert all(torch.equal(found[name], written[name]) for name in written)
    assert state == {"epoch": 3, "records": [{"loss": 0.1}]}
    assert [file.name for file in tmp_path.iterdir()] == ["x"]


def test_a_changed_bit_is_noticed(tmp_path):
    checkpoint.write(tmp_path / "x", tensors(), {})
    content = bytearray((tmp_path / "x").read_bytes())
    content[-20] ^= 1
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ExperimentError, match=r"is damaged \(its checksum does not match\). Delete it to train"):
        checkpoint.read(tmp_path / "x")


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file_is_refused(tmp_path, keep):
    checkpoint.write(tmp_path / "x", tensors(), {})
    content = (tmp_path / "x").read_bytes()
    (tmp_path / "x").write_bytes(content[:keep])
    with pytest.raises(ExperimentError, match=r"is damaged .* nothing else was touched"):
        checkpoint.read(tmp_path / "x")


def test_a_pickle_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "owned"), "w"))

    torch.save(Evil(), tmp_path / "x")
    with pytest.raises(ExperimentError, match="is damaged"):
        checkpoint.read(tmp_path / "x")
    assert not (tmp_path / "owned").exists()


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path):
    checkpoint.write(tmp_path / "x", {"a": torch.ones(3)}, {})
    before = (tmp_path / "x").read_bytes()
    script = f"""
import pathlib, resource, torch
from sinkformers.lab.workbench import checkpoint
from sinkformers.lab.artefacts.artefact import ExperimentError
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, {resource.RLIM_INFINITY}))
try:
    checkpoint.write(pathlib.Path({str(tmp_path / "x")!r}), {{"a": torch.ones(100_000)}}, {{}})
except ExperimentError as error:
    print(error)
"""
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert "File too large. What was saved before is untouched" in said, errno.EFBIG
    assert (tmp_path / "x").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["x"]


def test_an_optimiser_resumes_exactly():
    def steps(optimiser, parameter, n):
        for _ in range(n):
            (parameter**2).sum().backward()
            optimiser.step()
            optimiser.zero_grad()

    def fresh():
        parameter = torch.nn.Parameter(torch.arange(5.0))
        return parameter, torch.optim.Adam([parameter], lr=0.1, fused=True)

    whole, optimiser = fresh()
    steps(optimiser, whole, 7)
    first, optimiser = fresh()
    steps(optimiser, first, 3)
    kept = checkpoint.optimiser_tensors(optimiser)
    second, optimiser = fresh()
    second.data.copy_(first.data)
    checkpoint.restore_optimiser(optimiser, kept)
    steps(optimiser, second, 4)
    assert torch.equal(second, whole)
