"""`tune` times the backends, lets `auto` take the winner, and remembers it in a file."""

import json
import math
import os

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import sinkformers
from sinkformers import sinkhorn_attention, tune
from sinkformers.attention import attend
from sinkformers.attention.backends import Torch
from sinkformers.attention.causal import SinkhornCache
from sinkformers.attention.causal import operator as causal_operator
from sinkformers.attention.limit import operator as limit_operator
from sinkformers.core import environment

FEW = {"seconds": 0.01}


class Slow(Torch):
    """Torch's computation, with a choice: one that sleeps, one that does not, one that is wrong."""

    name = "toy"

    def __init__(self):
        self.preferred = {}
        self.used = []

    def choices(self, _call):
        return ("sleepy", "awake", "wrong")

    def prefer(self, call, choice):
        self.preferred[call.query.shape] = choice

    def forward(self, call):
        choice = self.preferred.get(call.query.shape)
        self.used.append(choice)
        if choice == "sleepy":
            torch.randn(1000, 1000) @ torch.randn(1000, 1000)
        result = super().forward(call)
        return result._replace(out=result.out * 2) if choice == "wrong" else result


@pytest.fixture(autouse=True)
def forgets(monkeypatch):
    for table in (attend.BACKENDS, causal_operator.BACKENDS, limit_operator.BACKENDS):
        monkeypatch.setattr(table, "winners", {})


@pytest.fixture
def toy(monkeypatch):
    toy = Slow()
    monkeypatch.setattr(attend.BACKENDS, "by_name", {"torch": attend.BACKENDS["torch"], toy.name: toy})
    return toy


def tokens(n=5, m=7, **options):
    return [torch.randn(2, 3, size, 8, **options) for size in (n, m, m)]


@pytest.mark.parametrize(
    "options",
    [
        {"n_iters": 5},
        {"n_iters": 4, "tau": 0.5, "cost": "l2", "dropout_p": 0.2},
        {"n_iters": math.inf},
        {"causal": "streaming"},
        {"key_mask": torch.arange(7) < 5, "query_mask": torch.arange(5) < 4},
        {"attn_mask": torch.randn(3, 5, 7).requires_grad_()},
        {"backward": False},
    ],
    ids=lambda options: "-".join(options),
)
def test_the_winner_is_what_auto_takes(options):
    inputs, state = tokens(), torch.get_rng_state()
    found = tune(*inputs, **FEW, **options)
    assert torch.get_rng_state().equal(state)
    assert all(x.grad is None and not x.requires_grad for x in inputs)
    timed = {each.backend: each.seconds for each in found.candidates if each.seconds}
    assert "torch" in timed
    assert found.backend == min(timed, key=lambda name: timed[name].together)
    options.pop("backward", None)
    assert sinkformers.backend_for(*inputs, **options) == found.backend
    for line in (found.shape, found.device, *(each.backend for each in found.candidates)):
        assert line in repr(found)


def test_the_winner_holds_for_its_shape_alone():
    """Torch wins by decree; another shape, dtype or setting is served as before."""
    usual = sinkformers.backend_for(*tokens())
    native = attend.BACKENDS.by_name.pop("native", None)
    try:
        assert tune(*tokens(), **FEW).backend == "torch"
    finally:
        if native is not None:
            attend.BACKENDS.by_name = {"native": native, **attend.BACKENDS.by_name}
    assert sinkformers.backend_for(*tokens()) == "torch"
    others = [(tokens(n=6), {}), (tokens(dtype=torch.float64), {}), (tokens(), {"n_iters": 5})]
    for inputs, options in [*others, (tokens(), {"key_mask": torch.arange(7) < 5}), (tokens(), {"dropout_p": 0.1})]:
        assert sinkformers.backend_for(*inputs, **options) == usual


def test_a_winner_is_no_obstacle_to_calls_whose_sizes_are_symbols():
    assert tune(*tokens(), **FEW).backend
    traced = make_fx(lambda *inputs: sinkhorn_attention(*inputs, n_iters=3), tracing_mode="symbolic")(*tokens())
    others = tokens(n=9, m=4)
    assert_close(traced(*others), sinkhorn_attention(*others, n_iters=3))


def test_a_choice_is_timed_and_kept(toy):
    """The right choice that is fast; the one that is wrong is not timed, and says so."""
    found = tune(*tokens(), n_iters=5, seconds=0.2)
    by_choice = {each.choice: each for each in found.candidates if each.backend == "toy"}
    assert by_choice["sleepy"].seconds.together > by_choice["awake"].seconds.together
    assert by_choice["wrong"].seconds is None
    assert by_choice["wrong"].reason.startswith("it disagrees: ")
    if found.backend == "toy":
        assert toy.preferred[tokens()[0].shape] == found.choice == "awake"
    attend.BACKENDS.by_name.pop("torch")
    attend.BACKENDS.winners.clear()
    found = tune(*tokens(), n_iters=5, seconds=0.1)
    assert (found.backend, found.choice) == ("toy", "awake")
    toy.used.clear()
    sinkhorn_attention(*tokens(), n_iters=5)
    assert toy.used == ["awake"]


def test_a_backend_that_raises_is_listed(monkeypatch):
    class Raises(Torch):
        name = "raises"

        def forward(self, _call):
            raise torch.OutOfMemoryError("no room for 8 GB\nat all")

    monkeypatch.setattr(attend.BACKENDS, "by_name", {"raises": Raises(), "torch": attend.BACKENDS["torch"]})
    found = tune(*tokens(), **FEW)
    assert found.backend == "torch"
    assert found.candidates[0].reason == "it raised OutOfMemoryError: no room for 8 GB"
    monkeypatch.setattr(attend.BACKENDS, "by_name", {"raises": Raises()})
    with pytest.raises(RuntimeError, match=r"no backend could be timed\. raises: it raised OutOfMemoryError"):
        tune(*tokens(n=3), **FEW)


def test_sharp_scores_are_no_disagreement():
    """With larger scores rounding explains more."""
    inputs = [30 * x for x in tokens(64, 64)]
    found = tune(*inputs, **FEW, n_iters=5)
    assert not [each for each in found.candidates if "disagrees" in each.reason]


def test_the_generators_of_accelerators_are_left_alone(monkeypatch):
    monkeypatch.setattr(torch, "manual_seed", lambda _: pytest.fail("it seeds all devices"))
    tune(*tokens(), **FEW, dropout_p=0.5)


def test_inference_tensors_can_be_tuned():
    with torch.inference_mode():
        assert tune(*tokens(), **FEW).backend in ("native", "torch")


def test_the_file_spares_the_time(tmp_path, monkeypatch):
    file = tmp_path / "new" / "tuning.json"
    first = tune(*tokens(), n_iters=5, **FEW, file=file)
    second = tune(*tokens(n=6), n_iters=5, **FEW, file=str(file))
    assert not first.from_file
    assert len(json.loads(file.read_text())["entries"]) == 2
    assert os.listdir(file.parent) == ["tuning.json"]
    attend.BACKENDS.winners.clear()
    again = tune(*tokens(), n_iters=5, **FEW, file=file)
    assert again == first._replace(from_file=True)
    assert "from the file" in repr(again)
    assert list(attend.BACKENDS.winners.values()) == [first.backend]
    monkeypatch.setattr(environment, "versions", lambda: {"torch": "another"})
    monkeypatch.setattr("sinkformers.core.tuning_file.versions", lambda: {"torch": "another"})
    assert not tune(*tokens(), n_iters=5, **FEW, file=file).from_file
    assert len(json.loads(file.read_text())["entries"]) == 3
    assert not second.from_file


def test_a_winner_that_cannot_serve_any_more_is_measured_again(tmp_path):
    file = tmp_path / "tuning.json"
    tune(*tokens(), **FEW, file=file)
    data = json.loads(file.read_text())
    for name, choice in (("gone", ""), ("triton", ""), ("torch", "64 × 64")):
        candidates = [data["entries"][0]["candidates"][-1] | {"backend": name, "choice": choice}]
        data["entries"][0] |= {"backend": name, "choice": choice, "candidates": candidates}
        file.write_text(json.dumps(data))
        assert not tune(*tokens(), **FEW, file=file).from_file


def test_a_winner_without_times_is_measured_again(tmp_path):
    """One that was never timed, such as the slow reference, and a file without candidates, which has no table."""
    file = tmp_path / "tuning.json"
    tune(*tokens(), **FEW, file=file)
    data = json.loads(file.read_text())
    for change in ({"backend": "reference"}, {"candidates": []}):
        file.write_text(json.dumps(data | {"entries": [data["entries"][0] | change]}))
        found = tune(*tokens(), **FEW, file=file)
        assert not found.from_file
        assert found.backend in repr(found)


DAMAGE = {
    "cut off": lambda text: text[: len(text) // 2],
    "empty": lambda _: "",
    "not JSON": lambda _: "backend: native",
    "other JSON": lambda _: '{"name": "a package"}',
    "a list": lambda _: "[1, 2]",
    "other format": lambda text: text.replace("tuning 1", "tuning 2"),
    "entry without times": lambda text: text.replace('"seconds"', '"minutes"'),
    "times of another type": lambda text: text.replace('"choice": ""', '"choice": 3'),
    "entries of another type": lambda _: '{"format": "sinkformers tuning 1", "entries": [7]}',
    "bytes": lambda _: b"\xff\xfe\x00",
    "deep": lambda _: "[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_a_warning(damage, tmp_path):
    """What is in it stays there: it may be somebody else's."""
    file = tmp_path / "tuning.json"
    tune(*tokens(), **FEW, file=file)
    broken = DAMAGE[damage](file.read_text())
    file.write_bytes(broken if isinstance(broken, bytes) else broken.encode())
    before = file.read_bytes()
    with pytest.warns(RuntimeWarning, match=r"tuning.json cannot be read as a file of tune .* Delete it") as caught:
        assert not tune(*tokens(), **FEW, file=file).from_file
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert file.read_bytes() == before


def test_a_write_that_fails_leaves_the_file_whole(tmp_path, monkeypatch):
    file = tmp_path / "tuning.json"
    tune(*tokens(), **FEW, file=file)
    before = file.read_bytes()

    def fail(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk is full"):
        tune(*tokens(n=6), **FEW, file=file)
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == ["tuning.json"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"n_iters": 1}, ValueError, 'always served by "sdpa"'),
        ({"causal": "prefix", "is_causal": True, "key": 5}, ValueError, 'always served by "torch"'),
        ({"backend": "torch"}, TypeError, "backend is not an argument of tune"),
        ({"cache": SinkhornCache()[0]}, TypeError, "cache is not an argument of tune"),
        ({"seconds": 0}, ValueError, "seconds must be a positive number; got 0"),
        ({"n_iters": 0}, ValueError, "n_iters must be a whole number"),
        ({"n_iter": 3}, TypeError, "n_iter"),
    ],
)
def test_what_cannot_be_tuned(options, error, message):
    query, key, value = tokens(m=options.pop("key", 7))
    with pytest.raises(error, match=message):
        tune(query, key, value, **options)


def test_nothing_is_timed_on_tokens_without_numbers():
    with pytest.raises(ValueError, match=r"tokens with numbers, .* got Tensor on meta\. Call tune before"):
        tune(*tokens(device="meta"), **FEW)


def test_nothing_to_tune_without_tokens():
    with pytest.raises(ValueError, match="tokens that are not empty"):
        tune(*tokens(n=0), **FEW)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_compiled_regions_choose_as_before(toy):
    """Eager calls were timed; there torch's operations are fused instead."""
    attend.BACKENDS.winners = {("any",): "toy"}
    torch._dynamo.reset()
    inputs = tokens()
    compiled = torch.compile(sinkhorn_attention, fullgraph=True, backend="aot_eager")
    assert compiled(*inputs).allclose(sinkhorn_attention(*inputs, backend="torch"), atol=1e-5)
    assert toy.used == []
