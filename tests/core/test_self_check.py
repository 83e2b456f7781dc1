"""`auto` takes a backend that asks for a check only after it agreed with torch on this device."""

import threading
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import sinkformers
from sinkformers import SinkhornCache, sinkhorn, sinkhorn_attention
from sinkformers.attention import attend
from sinkformers.attention.backends import Torch
from sinkformers.attention.causal import operator as causal_operator
from sinkformers.attention.causal.backends import Torch as CausalTorch
from sinkformers.attention.limit import operator as limit_operator
from sinkformers.attention.limit.backends import Torch as LimitTorch
from sinkformers.core import backend as backend_module
from sinkformers.core import normalize, self_check
from sinkformers.core.backends import Torch as NormalizeTorch
from sinkformers.core.self_check import SelfChecks


def toy_of(torch_backend):
    """A class of backends that compute as torch does, and ask for a check."""

    class Toy(torch_backend):
        name = "toy"

        def __init__(self, change=lambda _, result: result, change_back=lambda _, grads: grads):
            self.change, self.change_back, self.sizes = change, change_back, []

        def kind(self, call):
            return call[0].dtype, call[0].shape[-1]

        def traced(self, _call):
            return None  # compiled graphs hold the operator

        def forward(self, call):
            self.sizes.append(tuple(call[0].shape))
            return self.change(call, super().forward(call))

        def backward(self, call, result, d_output, needed):
            return self.change_back(call, super().backward(call, result, d_output, needed))

    return Toy


Toy = toy_of(Torch)


@pytest.fixture
def install(monkeypatch):
    """Put a backend in front of a table, which has seen no check yet."""
    monkeypatch.setattr(backend_module, "_WARNED", set())

    def put(toy, table=attend.BACKENDS):
        others = {name: other for name, other in table.by_name.items() if name != toy.name}
        monkeypatch.setattr(table, "by_name", {toy.name: toy, **others})
        monkeypatch.setattr(table, "checks", SelfChecks())
        return toy

    return put


def tokens(dtype=torch.float32, width=8, **options):
    return [torch.randn(2, 3, n, width, dtype=dtype, **options) for n in (5, 7, 7)]


def served_by(inputs, **options):
    """The name of the backend, and the warnings on the way."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return sinkformers.backend_for(*inputs, **options), [str(each.message) for each in caught]


def raising(error):
    def change(*_):
        raise error

    return change


def times(field, factor):
    return lambda _, grads: {**grads, field: grads[field] * factor}


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_backend_that_is_right_is_taken(install, dtype):
    toy = install(Toy())
    inputs = [x.requires_grad_() for x in tokens(dtype)]
    out = sinkhorn_attention(*inputs)
    out.square().sum().backward()
    assert toy.sizes[-1] == (2, 3, 5, 8)
    assert served_by(inputs) == ("toy", [])


def nan_once(_, result):
    out = result.out.clone()
    out.view(-1)[3] = torch.nan
    return result._replace(out=out)


WRONG = {
    "an output": (lambda _, result: result._replace(out=result.out * 1.1), times("key", 1.0), "deviates by"),
    "a NaN": (nan_once, times("key", 1.0), "out deviates by nan"),
    "raised forward": (
        raising(RuntimeError("no shared memory\nleft")),
        times("key", 1.0),
        "it raised RuntimeError: no",
    ),
    "raised without a word": (raising(AssertionError()), times("key", 1.0), "it raised AssertionError"),
    "raised backward": (lambda _, result: result, raising(ImportError("no compiler")), "ImportError: no compiler"),
    "no gradient": (lambda _, result: result, lambda _, grads: {**grads, "key": None}, "AssertionError: key"),
    **{
        f"gradient of {name}": (
            lambda _, result: result,
            times(name, factor),
            f"the gradient of {name} deviates by",
        )
        for name, factor in (("query", 0.9), ("key", 1.1), ("value", -1.0), ("bias", 1.1), ("tau", 1.1))
    },
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", WRONG)
def test_a_backend_that_is_wrong_is_not(install, case, dtype):
    """One warning names the device, the versions and the deviation; the next backend serves."""
    change, change_back, finding = WRONG[case]
    install(Toy(change, change_back))
    bias, tau = torch.randn(3, 5, 7, dtype=dtype), torch.tensor([0.3, 0.5, 1.0])
    name, said = served_by(tokens(dtype), attn_mask=bias, tau=tau)
    assert name != "toy"
    assert len(said) == 1
    for part in ('backend="toy"', finding, "CPU (", f"torch {torch.__version__}", f"{sinkformers.__version__}"):
        assert part in said[0]
    assert served_by(tokens(dtype), attn_mask=bias, tau=tau) == (name, [])


def test_a_name_means_what_it_says(install):
    """Who names a backend gets it, checked or not."""
    toy = install(Toy(lambda _, result: result._replace(out=result.out + 1)))
    inputs = tokens()
    assert served_by(inputs)[0] != "toy"
    seen = len(toy.sizes)
    expected = sinkhorn_attention(*inputs, backend="torch") + 1
    assert sinkhorn_attention(*inputs, backend="toy").equal(expected)
    assert len(toy.sizes) == seen + 1


def test_every_kind_is_checked_once(install):
    toy = install(Toy())
    for _ in range(3):
        for dtype, width in ((torch.float32, 8), (torch.float32, 4), (torch.float16, 8)):
            assert served_by(tokens(dtype, width))[0] == "toy"
    assert len(toy.sizes) == 3


def test_one_kind_that_is_wrong_leaves_the_others(install):
    def change(call, result):
        return result._replace(out=result.out * (1.5 if call.query.shape[-1] == 4 else 1.0))

    install(Toy(change))
    assert served_by(tokens(width=8)) == ("toy", [])
    name, said = served_by(tokens(width=4))
    assert name != "toy"
    assert len(said) == 1


def test_threads_check_once(install):
    """All that come at the same moment wait for one verdict."""
    start, inside, found = threading.Barrier(8), threading.Semaphore(1), []

    def change(_, result):
        assert inside.acquire(blocking=False), "two checks at a time"
        threading.Event().wait(0.05)
        inside.release()
        return result

    toy, inputs = install(Toy(change)), tokens()

    def ask():
        start.wait()
        found.append(sinkformers.backend_for(*inputs))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["toy"] * 8
    assert len(toy.sizes) == 1


def test_a_check_does_not_check(install):
    """A backend that itself leaves a call to `auto` gets torch or native there, and no second check."""
    inner = []

    def change(_, result):
        inner.append(sinkformers.backend_for(*tokens(width=3)))
        return result

    toy = install(Toy(change))
    assert served_by(tokens())[0] == "toy"
    assert inner == [served_by(tokens(), backend="auto")[0].replace("toy", inner[0])]
    assert inner[0] != "toy"
    assert len(toy.sizes) == 1
    assert served_by(tokens(width=3))[0] == "toy"


class Counting(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def under_vmap(inputs):
    torch.vmap(lambda *x: sinkhorn_attention(*x))(*inputs)


def under_grad(inputs):
    torch.func.grad(lambda q: sinkhorn_attention(q, *inputs[1:]).sum())(inputs[0])


def under_a_mode(inputs):
    with Counting():
        sinkhorn_attention(*inputs)


def compiled(inputs):
    torch._dynamo.reset()
    torch.compile(sinkhorn_attention, fullgraph=True, backend="aot_eager")(*inputs)


PLACES = [under_vmap, under_grad, under_a_mode, compiled]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("place", PLACES)
def test_there_is_no_check_where_operations_are_intercepted(install, place):
    """There a known verdict holds, or another backend serves without a warning."""
    toy, inputs = install(Toy()), tokens()
    place(inputs)
    assert toy.sizes == []
    assert attend.BACKENDS.checks.verdicts == {}
    assert served_by(inputs)[0] == "toy"
    toy.sizes.clear()
    place(inputs)
    assert len(toy.sizes) >= 1


def test_there_is_no_check_while_a_graph_is_captured(install, monkeypatch):
    toy, inputs = install(Toy()), tokens()
    with monkeypatch.context() as patch:
        patch.setattr(self_check, "captured", lambda _: True)
        assert served_by(inputs)[0] != "toy"
    assert toy.sizes == []
    assert served_by(inputs)[0] == "toy"
    monkeypatch.setattr(self_check, "captured", lambda _: True)
    assert served_by(inputs)[0] == "toy"


def test_capture_is_asked_of_the_device(monkeypatch):
    from sinkformers.core import modes

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert modes.captured(torch.device("cuda", 1))
    assert not modes.captured(torch.device("cpu"))


def test_no_memory_is_no_verdict(install):
    trouble = [torch.OutOfMemoryError("the device is full")]

    def change(_, result):
        if trouble:
            raise trouble.pop()
        return result

    install(Toy(change))
    assert served_by(tokens())[0] != "toy"
    assert served_by(tokens()) == ("toy", [])


def test_an_interrupt_passes(install):
    trouble = [KeyboardInterrupt()]

    def change(_, result):
        if trouble:
            raise trouble.pop()
        return result

    install(Toy(change))
    with pytest.raises(KeyboardInterrupt):
        sinkformers.backend_for(*tokens())
    assert served_by(tokens()) == ("toy", [])


def test_nothing_of_the_users_is_touched(install):
    """Random numbers, gradients, autocast, default dtype and device: neither do they change, nor do they matter."""
    seen = []

    def change(_, result):
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return result

    inputs = tokens(requires_grad=True)
    for surroundings in (
        torch.autocast("cpu", torch.bfloat16),
        torch.device("meta"),
        torch.inference_mode(),
        torch.no_grad(),
        torch.enable_grad(),
    ):
        install(Toy(change))
        state = torch.get_rng_state()
        with surroundings:
            before = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_device()
            assert served_by(inputs) == ("toy", [])
            assert before == (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_device())
        assert torch.get_rng_state().equal(state)
        assert all(x.grad is None for x in inputs)
    assert seen == [(False, False)] * 5
    torch.set_default_dtype(torch.float64)
    try:
        install(Toy())
        assert served_by(inputs) == ("toy", [])
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def out_times(factor):
    return lambda _, result: result._make((result[0] * factor, *result[1:]))


@pytest.mark.parametrize(
    ("torch_backend", "table", "call"),
    [
        (CausalTorch, causal_operator.BACKENDS, lambda: sinkhorn_attention(*[tokens()[1]] * 3, is_causal=True)),
        (LimitTorch, limit_operator.BACKENDS, lambda: sinkhorn_attention(*tokens(), n_iters=torch.inf)),
        (NormalizeTorch, normalize.BACKENDS, lambda: sinkhorn(torch.randn(2, 5, 7))),
    ],
    ids=["causal", "limit", "operator"],
)
def test_the_other_operators_follow_the_same_rules(install, torch_backend, table, call):
    toy = install(toy_of(torch_backend)(), table)
    call()
    assert len(toy.sizes) == 2  # the check, and the call
    wrong = install(toy_of(torch_backend)(out_times(1.1)), table)
    with pytest.warns(RuntimeWarning, match='backend="toy" failed its self-check on CPU') as caught:
        call()
    assert len(caught) == 1
    assert len(wrong.sizes) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"key_mask": torch.tensor([[True] * 5 + [False] * 2]), "cache": "new"},
        {"attn_mask": torch.rand(5, 7) < 0.8, "cache": "cross"},
        {"attn_mask": torch.randn(3, 5, 7), "causal": "streaming", "tau": 0.5},
        {"causal": "streaming", "dropout_p": 0.2, "cost": "l2", "n_iters": 9},
    ],
    ids=["padding", "cross", "bias", "dropout"],
)
def test_causal_calls_of_every_kind(install, options, dtype):
    """Columns that nobody sees have received nothing, which each dtype writes with its own lowest number."""
    toy, options = install(toy_of(CausalTorch)(), causal_operator.BACKENDS), dict(options)
    query, key, value = tokens(dtype)
    if options.get("cache") == "new":
        query, options["cache"] = torch.cat([query, query[:, :, :2]], 2), SinkhornCache()[0]
    elif options.get("cache") == "cross":
        options["cache"] = SinkhornCache().cross(0)
    options.setdefault("causal", "streaming")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            if "key_mask" in options and options["cache"].key is not None:
                options["key_mask"] = torch.ones(1, 14, dtype=torch.bool)
            sinkhorn_attention(query, key, value, **options)
    assert [str(each.message) for each in caught] == []
    assert len(toy.sizes) == 3


def test_a_kind_without_a_small_call_is_not_trusted(install):
    class Large(Toy):
        def kind(self, call):
            return call.query.shape[-2] > 2000

    toy = install(Large())
    query = torch.randn(1, 1, 2001, 8)
    name, said = served_by([query, query, query])
    assert name != "toy"
    assert "NoSample: no small call is served by the same code" in said[0]
    assert toy.sizes == []
