"""The studies' bookkeeping on toy cells, and their readers on small files made here."""

import gzip
import io
import json
import tarfile

import pytest
import torch

import adapt_minilm
import adapt_vit
import sinkformers
import study

ARMS = {"SoftMax": study.ARMS["SoftMax"], "last layer, at once": study.ARMS["at once"]}


def toy_cell(arm, seed):
    cell = {"accuracy": [0.5, 0.6 + seed / 10]}
    return {**cell, "unadapted": {"0.5": 0.55}} if arm == "SoftMax" else cell


def forbidden(arm, seed):
    raise AssertionError("trained again")


def test_cells_are_trained_once_and_reported(tmp_path):
    study.run(tmp_path, ARMS, toy_cell, seeds=3, workers=1)
    assert len(list((tmp_path / "cells").glob("*.json"))) == 6
    study.run(tmp_path, ARMS, forbidden, seeds=3, workers=1)
    table = study.report(tmp_path, ARMS)
    assert "| SoftMax | 70.0% | 60.0%, 70.0%, 80.0% |" in table
    assert "| SoftMax, then tau 0.5, un-adapted | 55.0% |" in table
    assert (tmp_path / "accuracy.png").stat().st_size > 1000


def test_only_missing_cells_are_trained(tmp_path):
    study.run(tmp_path, ARMS, toy_cell, seeds=1, workers=1)
    lost = tmp_path / "cells" / "SoftMax-0.json"
    lost.unlink()
    study.run(tmp_path, ARMS, toy_cell, seeds=1, workers=1)
    assert json.loads(lost.read_text())["seed"] == 0


def test_a_report_of_nothing_says_so(tmp_path):
    with pytest.raises(SystemExit, match="no finished cell"):
        study.report(tmp_path, ARMS)


@pytest.mark.parametrize("arm", adapt_vit.ARMS)
def test_every_arm_ends_at_its_settings(arm):
    settings, schedule = adapt_vit.ARMS[arm]
    model = sinkformers.to_sinkformer(adapt_vit.ViT(), **settings)
    for step in range(8):
        schedule(model, step, 8)
    layer = model.encoder.layers[adapt_vit.DEPTH - 1].self_attn
    ends = {"SoftMax": (1, 1.0), "tau learned": (3, "learned"), "tau 0.5": (3, 0.5)}
    assert (layer.sinkhorn.n_iters, layer.sinkhorn.tau) == ends.get(arm, (3, 1.0))
    assert model(torch.randn(2, 16, 49)).shape == (2, 10)


def test_idx_files_are_read(tmp_path):
    pixels = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4)
    head = bytes([0, 0, 8, 3]) + b"".join(size.to_bytes(4, "big") for size in pixels.shape)
    (tmp_path / "plain").write_bytes(head + bytes(pixels.flatten().tolist()))
    with gzip.open(tmp_path / "packed.gz", "wb") as file:
        file.write(head + bytes(pixels.flatten().tolist()))
    for name in ("plain", "packed"):
        assert torch.equal(adapt_vit.read_idx(tmp_path, name), pixels)
    whole = (tmp_path / "packed.gz").read_bytes()
    for name, part in (("cut.gz", whole[:-9]), ("short", (tmp_path / "plain").read_bytes()[:-1]), ("empty", b"")):
        (tmp_path / name).write_bytes(part)
        with pytest.raises(SystemExit, match="is no whole idx file"):
            adapt_vit.read_idx(tmp_path, name.removesuffix(".gz"))
    with pytest.raises(SystemExit, match=r"neither absent\.gz nor absent"):
        adapt_vit.read_idx(tmp_path, "absent")


def test_imdb_is_read_from_its_archive(tmp_path):
    archive = tmp_path / "aclImdb.tar.xz"
    with tarfile.open(archive, "w:xz") as tar:
        for name in (
            "aclImdb/train/pos/0_9.txt",
            "aclImdb/train/neg/1_2.txt",
            "aclImdb/test/pos/0_8.txt",
            "aclImdb/README",
        ):
            member, text = tarfile.TarInfo(name), name.encode()
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))
    found = adapt_minilm.read_imdb(archive)
    assert found["train"] == [("aclImdb/train/pos/0_9.txt", 1), ("aclImdb/train/neg/1_2.txt", 0)]
    assert found["test"] == [("aclImdb/test/pos/0_8.txt", 1)]
    archive.write_bytes(archive.read_bytes()[:-60])
    with pytest.raises(SystemExit, match="damaged or cut short"):
        adapt_minilm.read_imdb(archive)
    with pytest.raises(SystemExit, match="is missing"):
        adapt_minilm.read_imdb(tmp_path / "absent.tar.xz")
