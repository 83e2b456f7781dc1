"""The doctor: what it prints, what it ends with, and the record it writes."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch

from sinkformers.attention import attend
from sinkformers.attention.backends import Torch
from sinkformers.core import normalize
from sinkformers.core.backends import Torch as NormalizeTorch
from sinkformers.doctor import agreement, benchmark, command, main

CPU = torch.device("cpu")


class Wrong(Torch):
    """Torch's computation under the name of the torch backend, with what a test does to it."""

    def __init__(self, change):
        self.change = change

    def forward(self, call):
        return self.change(super().forward(call))


@pytest.fixture
def few(monkeypatch):
    """Two problems, two dtypes, two backends."""
    problems = [problem for problem in agreement.PROBLEMS if problem.name in ("attention", "sinkhorn")]
    monkeypatch.setattr(agreement, "PROBLEMS", problems)
    monkeypatch.setattr(agreement, "DTYPES", (torch.float32, torch.bfloat16))
    monkeypatch.setattr(agreement, "NAMES", ("triton", "torch"))


def install(monkeypatch, change):
    table = attend.BACKENDS
    monkeypatch.setattr(table, "by_name", {**table.by_name, "torch": Wrong(change)})


def test_all_that_is_here_agrees():
    """Every backend that serves, in every dtype; each problem has one that does, and `auto` takes one of them."""
    found = list(agreement.compare_all(CPU))
    assert len(found) == 4 * 4 * 4
    assert not [finding for finding in found if finding.disagrees]
    for problem in agreement.PROBLEMS:
        for dtype in agreement.DTYPES:
            here = [each for each in found if (each.problem, each.dtype) == (problem.name, dtype)]
            assert any(each.backend == "torch" and not each.cannot for each in here)
            assert sum(each.automatic and not each.cannot for each in here) == 1
    exact = [each for each in found if each.backend == "reference" and each.dtype == torch.float64 and not each.cannot]
    assert max(max(each.output, each.gradients) for each in exact) == 0.0


def test_the_limit_is_reached_by_the_exact_answer():
    """What the limit is compared with has converged: twice as many steps change nothing."""
    problem = next(each for each in agreement.PROBLEMS if each.n_iters == math.inf)
    longer = agreement._outcome(problem, problem.inputs(), "reference", 2 * agreement.CONVERGED + 1)
    for name, exact in agreement._exact(problem, torch.float64).items():
        assert (longer[name] - exact).abs().max() <= 1e-12 * exact.abs().max()


@pytest.mark.usefixtures("few")
def test_the_output_says_what_is_here(capsys):
    assert main(["--device", "cpu"]) == 0
    said = capsys.readouterr().out
    for part in (
        f"torch {torch.__version__}",
        "compiled CPU kernels: ",
        "threads: ",
        "workspace: 64 MiB",
        "device cpu",
    ):
        assert part in said
    assert "triton" in said
    assert "cannot serve: " in said
    assert said.rstrip().endswith("All 4 results agree with float64 to rounding.")
    assert "/" + "home" not in said


def gradient_of_value_off(monkeypatch, factor):
    class Off(Torch):
        def backward(self, call, result, d_output, needed):
            grads = super().backward(call, result, d_output, needed)
            return {**grads, "value": grads["value"] * factor}

    monkeypatch.setattr(attend.BACKENDS, "by_name", {**attend.BACKENDS.by_name, "torch": Off()})


def raising(_):
    raise RuntimeError("misaligned address\nand more")


def nan(result):
    result.out.view(-1)[7] = torch.nan
    return result


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda result: result._replace(out=result.out * 1.1), "(output)"),
        (nan, "deviates by nan (output)"),
        (raising, "RuntimeError: misaligned address"),
        (1.1, "(gradients)"),
        (math.nan, "and nan (gradients)"),
    ],
    ids=["output", "NaN", "raises", "gradient", "NaN in a gradient"],
)
@pytest.mark.usefixtures("few")
def test_a_backend_that_is_wrong_ends_it_with_1(monkeypatch, capsys, change, message, tmp_path):
    if isinstance(change, float):
        gradient_of_value_off(monkeypatch, change)
    else:
        install(monkeypatch, change)
    file = tmp_path / "record.jsonl"
    assert main(["--json", str(file)]) == 1
    said = capsys.readouterr().out
    assert "2 of 4 results DISAGREE" in said
    assert f"attention, torch, torch.float32, cpu: {message}" in said or message in said.split("DISAGREE")[1]
    assert "sinkhorn, torch, torch.float32" not in said.split("DISAGREE")[1]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    states = {line["status"] for line in lines if line["row"] == "torch" and line["shape"].startswith("attention")}
    assert states == {"failed" if change is raising else "refused"}


@pytest.mark.usefixtures("few")
def test_failed_self_checks_are_among_the_output(monkeypatch, capsys):
    class Toy(NormalizeTorch):
        name = "toy"

        def kind(self, call):
            return call.scores.dtype

        def forward(self, _call):
            raise RuntimeError("no such kernel")

    monkeypatch.setattr(normalize.BACKENDS, "by_name", {"toy": Toy(), **normalize.BACKENDS.by_name})
    monkeypatch.setattr("sinkformers.core.backend._WARNED", set())
    assert main([]) == 0
    assert 'warning: sinkformers: backend="toy" failed its self-check' in capsys.readouterr().out


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(benchmark, "SECONDS", 0.02)
    monkeypatch.setattr(benchmark, "cases", lambda _: [(benchmark.Shape(2, 16), torch.float32)])


@pytest.mark.usefixtures("few", "quick")
def test_times_stand_beside_those_of_sdpa(capsys):
    assert main(["--bench"]) == 0
    said = capsys.readouterr().out
    assert "2 × 16, float32" in said
    for row in ("sdpa", "softmax", "torch, n_iters 3", "torch, n_iters 21"):
        assert f"  {row}" in said
    assert said.count("× SDPA") >= 3


@pytest.mark.usefixtures("few", "quick")
def test_out_of_memory_is_a_line(monkeypatch, capsys):
    def full(_):
        raise torch.OutOfMemoryError("tried to allocate 20 GB")

    install(monkeypatch, full)
    monkeypatch.setattr(command, "compare_all", lambda _: iter(()))
    assert main(["--bench"]) == 0
    assert "torch, n_iters 21       it raised OutOfMemoryError" in capsys.readouterr().out


def test_sizes_are_those_of_the_device():
    on_gpu = benchmark.cases(torch.device("cuda", 0))
    assert {dtype for _, dtype in on_gpu} == {torch.bfloat16, torch.float32}
    # Two matrices of scores in float32 and their gradients fit into 8 GB.
    assert max(4 * 4 * shape.heads * shape.n**2 for shape, _ in on_gpu) < 8e9


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--json", "missing/record.jsonl"], 2, "there is no folder missing; create it"),
        (["--json", "."], 2, "is a folder; name a file in it"),
        (["--device", "cuda:7"], 2, "there is no cuda:7 here, only cpu"),
        (["--device", "nonsense"], 2, "there is no nonsense here, only cpu"),
    ],
)
def test_what_cannot_be_done(arguments, code, message, capsys, tmp_path, monkeypatch):
    """Before anything is computed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "compare_all", lambda _: pytest.fail("it computes"))
    assert main(arguments) == code
    assert message in capsys.readouterr().err


def test_the_module_runs_without_the_command_line_extra(tmp_path):
    """torch alone: none of the libraries of the extras is imported, and the file is written."""
    code = """
import sys
for name in ("typer", "rich", "numpy.testing", "matplotlib", "jinja2", "transformers", "sklearn"):
    sys.modules[name] = None
from sinkformers.doctor import agreement
agreement.PROBLEMS, agreement.DTYPES, agreement.NAMES = agreement.PROBLEMS[-1:], agreement.DTYPES[:1], ("torch",)
import runpy
sys.argv = ["doctor", "--json", "record.jsonl"]
runpy.run_module("sinkformers.doctor", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env={**os.environ}, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "All 1 results agree" in done.stdout
    (line,) = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    assert line["deviation"] < 1e-14
    assert str(tmp_path) not in json.dumps(line)
