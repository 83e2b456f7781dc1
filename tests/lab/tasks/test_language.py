"""The tasks of language models: windows of bytes, bits per byte, associative recall, and runs that are stopped."""

import math
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

from sinkformers.lab.artefacts.causal_lm import ARMS, CAUSAL_LM, OPINIONS, RECALL
from sinkformers.lab.data import Texts, TextSet, load_recall
from sinkformers.lab.tasks.language import RecallTask, TextTask
from sinkformers.lab.workbench.training import Hooks, Training

TINY = replace(OPINIONS, steps=3, length=12, dim=8, heads=2, hidden=16, tested=40)


@pytest.fixture(autouse=True)
def fresh_accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def texts(seed=0, **settings):
    labels = torch.zeros(2, dtype=torch.int64)
    both = TextSet(Texts(["ab<br />c" * 9, "é" * 30], labels), Texts(["xyz" * 30], labels[:1]), ("a", "b"), "x")
    return TextTask(TINY.with_settings(settings), seed, both)


class Fixed(nn.Module):
    """Predicts each token after the first with the same probabilities."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, tokens):
        return self.logits.expand(*tokens.shape, -1)


def test_texts_are_one_stream_of_bytes():
    made = texts()
    assert sorted(bytes(made.stream["train"].tolist()).split(b"\n\n")) == sorted([b"ab\nc" * 9, "é".encode() * 30])
    last = made.numbers("train") - 1
    windows = made.sequences("train", torch.tensor([0, last]))
    assert windows.shape == (2, 13)
    assert torch.equal(windows[1], made.stream["train"][-13:].long())
    assert made.facts["data"] == {"name": "x", "train": 98 - 12, "test": 40}


def test_batches_depend_on_seed_and_epoch():
    made = texts()
    assert len(made.batches(1)) == 3
    assert torch.equal(torch.stack(list(made.batches(1))), torch.stack(list(texts().batches(1))))
    assert not torch.equal(made.batches(1)[0], made.batches(2)[0])
    assert not torch.equal(made.batches(1)[0], texts(seed=1).batches(1)[0])


def test_bits_per_byte():
    """Uniform bytes cost 8 bits; a model that knows that the text has three letters costs log₂ 3."""
    made, accelerator = texts(), Accelerator(cpu=True)
    assert made.evaluate(Fixed(torch.zeros(256)), accelerator)["bits_per_byte"] == pytest.approx(8)
    letters = torch.full((256,), -torch.inf)
    letters[list(b"xyz")] = 0.0
    assert made.evaluate(Fixed(letters), accelerator)["bits_per_byte"] == pytest.approx(math.log2(3))
    loss, sums = made.losses(Fixed(torch.zeros(256)), made.batches(1)[0])
    assert made.weight(made.batches(1)[0]) == 16 * 12
    assert loss.item() / (16 * 12) == pytest.approx(math.log(256))
    assert sums["bits_per_byte"].item() / (16 * 12) == pytest.approx(8)


def test_recalled_values_followed_the_same_key_before():
    data = load_recall(5)
    assert data.train.shape == (32_768, 20)
    assert data.test.shape == (1_024, 20)
    for row in data.train[:50].tolist():
        known = dict(zip(row[:10:2], row[1:10:2], strict=True))
        assert len(known) == 5
        assert all(key < 32 <= value < 64 for key, value in known.items())
        assert sorted(row[10::2]) == sorted(known)
        assert row[11::2] == [known[key] for key in row[10::2]]
    assert data.predicted.nonzero().flatten().tolist() == [11, 13, 15, 17, 19]
    with pytest.raises(ValueError, match=r"load_recall: pairs must be from 1 to 32, the number of keys; got 33"):
        load_recall(33)


class LooksUp(nn.Module):
    """Answers with the token that followed the last token when it was seen before."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, tokens):
        n = tokens.shape[1]
        logits = torch.zeros(*tokens.shape, 64)
        for place in range(n):
            for before in range(place):
                same = tokens[:, before] == tokens[:, place]
                logits[same, place, tokens[same, before + 1]] = 1.0
        return logits + self.weight


def test_accuracy_of_recall():
    config = replace(RECALL, length=19, pairs=5, tested=32)
    made, accelerator = RecallTask(config, 0, load_recall(5)), Accelerator(cpu=True)
    assert made.evaluate(LooksUp(), accelerator) == {"accuracy": 1.0}
    assert made.evaluate(Fixed(torch.zeros(64)), accelerator) == {"accuracy": 0.0}  # token 0 is a key
    assert made.weight(made.batches(1)[0]) == 64 * 5


def train(folder, stop_after=None, **settings):
    taken = []

    def step(*_):
        taken.append(_)
        if stop_after is not None and len(taken) > stop_after:
            raise KeyError

    folder.mkdir(exist_ok=True)
    task = texts(**settings)
    hooks = Hooks(step, lambda _record, _seconds: None)
    return Training(task, {"seed": 0, **task.facts}, folder, Accelerator(cpu=True), hooks).run(0.0)


@pytest.mark.parametrize("settings", [{"tau": "learned", "n_iters": 3}, {"causal": "prefix", "n_iters": 3}], ids=str)
def test_a_stopped_run_continues_to_the_same_bits(tmp_path, settings):
    whole = train(tmp_path / "whole", **settings)
    with pytest.raises(KeyError):
        train(tmp_path / "stopped", stop_after=4, **settings)
    resumed = train(tmp_path / "stopped", **settings)
    assert resumed.resumed == 1
    assert resumed.epochs == whole.epochs
    for (name, expected), found in zip(
        whole.model.state_dict().items(), resumed.model.state_dict().values(), strict=True
    ):
        assert torch.equal(expected, found), name


def test_every_arm_has_a_rotary_softmax_arm_with_its_other_settings():
    """Or learned positions, in which case the same arms are there with rotary ones."""
    settings = [dict(arm.settings) for arm in ARMS]
    for each in settings:
        rotary = {**each, "positions": "rotary"}
        assert rotary in settings
        assert {name: value for name, value in {**rotary, "n_iters": 1}.items() if name not in ("tau", "causal")} in (
            settings
        )
    assert len({arm.name for arm in ARMS}) == len(ARMS)
    assert "not in the paper" in CAUSAL_LM.paper
