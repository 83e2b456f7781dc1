"""The compiled kernels: every instruction set, any number of threads, little memory, good manners in the process."""

import os
import re
import subprocess
import sys
import textwrap
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from sinkformers import sinkhorn, sinkhorn_attention
from sinkformers.kernels import native
from sinkformers.kernels.native import binding
from tests import oracle
from tests.saved import saved_bytes

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_stored_kernel(monkeypatch):
    """No memory for a stored kernel: every pass recomputes its blocks."""
    monkeypatch.setattr(binding, "_workspace", 1)


def tokens(*lead, n=53, m=61, d=19, e=23, dtype=torch.float64):
    return [torch.randn(*lead, *shape, dtype=dtype, requires_grad=True) for shape in ((n, d), (m, d), (m, e))]


def outputs(attend, inputs):
    out = attend(*inputs)
    return [out, *torch.autograd.grad(out, inputs, d_out_of(out))]


def d_out_of(out):
    """The same gradient for every output of a shape."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)


def bounds(query, key, value, n_iters, d_out):
    """What rounding may do to the output and to the gradients of query, key and value: sums of rounded weights."""
    scale = query.shape[-1] ** -0.5
    scores = (query @ key.mT * scale).detach()
    weight, grad = oracle.tolerances(scores, n_iters, d_out @ value.mT.detach())
    largest = [x.detach().abs().sum(-2).max().item() for x in (value, key, query, d_out)]
    return weight * largest[0], grad * scale * largest[1], grad * scale * largest[2], weight * largest[3]


CASES = {
    "plain": {},
    "even": {"n_iters": 4},
    "once": {"n_iters": 1},
    "many": {"n_iters": 21},
    "l2": {"cost": "l2", "n_iters": 5},
    "padding": {"query_mask": torch.arange(53) % 7 > 1, "key_mask": torch.arange(61) % 5 > 1},
    "window": {"attn_mask": (torch.arange(53)[:, None] - torch.arange(61)).abs() < 9, "n_iters": 5},
    "dropout": {"dropout_p": 0.3, "n_iters": 5},
    "relaxed": {"tau": 0.4, "n_iters": 7},
}


@pytest.mark.parametrize("heads", [1, 2, 3, 5])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("two_threads")
def test_teams_agree_with_the_definition(case, heads):
    check(case, heads)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("two_threads", "no_stored_kernel")
def test_recomputed_blocks_agree_with_the_definition(case, heads):
    check(case, heads)


def check(case, heads):
    inputs = tokens(1, heads)
    bias = torch.randn(heads, 53, 61, dtype=torch.float64, requires_grad=True)
    options = dict(CASES[case])
    if "attn_mask" not in options:
        inputs.append(bias)
    both = []
    for backend in ("native", "reference"):
        torch.manual_seed(9)
        both.append(outputs(lambda *x: sinkhorn_attention(*x, backend=backend, **options), inputs))  # noqa: B023
    for got, expected in zip(*both, strict=True):
        assert_close(got, expected, atol=1e-11, rtol=0)


@pytest.mark.parametrize("name", ["baseline", "avx2", "avx512"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_instruction_set(name, dtype):
    best = native.instruction_set()
    if native.use_instruction_set(name) != name:
        pytest.skip(f"this processor has no {name}")
    try:
        for sizes in ((64, 64, 16, 16), (7, 131, 3, 130), (131, 7, 70, 5), (1, 1, 1, 1), (97, 33, 16, 64)):
            n, m, d, e = sizes
            inputs = tokens(2, n=n, m=m, d=d, e=e, dtype=dtype)
            exact = [x.detach().double().requires_grad_() for x in inputs]
            got = outputs(lambda *x: sinkhorn_attention(*x, n_iters=5, backend="native"), inputs)
            expected = outputs(lambda *x: oracle.attention(*x, 5), exact)
            for a, b, bound in zip(got, expected, bounds(*inputs, 5, d_out_of(got[0])), strict=True):
                assert_close(a.double(), b, atol=bound, rtol=0)
            scores = torch.randn(5, n, m, dtype=dtype, requires_grad=True)
            for size in (slice(None), slice(0, 5)):
                part = scores[:, size, size]
                got = outputs(lambda c: sinkhorn(c, n_iters=6, backend="native"), [part])
                expected = outputs(lambda c: oracle.batch_weights(c, 6), [part.double()])
                for a, b, bound in zip(got, expected, oracle.tolerances(part, 6, d_out_of(got[0])), strict=True):
                    assert_close(a.double(), b.double(), atol=bound, rtol=0)
    finally:
        assert native.use_instruction_set(best) == best


@pytest.mark.parametrize("shape", [(65, 4, 4), (3, 5, 7), (1, 16, 16), (40, 1, 9), (17, 2, 3)])
@pytest.mark.parametrize("n_iters", [2, 3, 20])
@pytest.mark.parametrize("tau", [1.0, 0.5])
def test_tiny_matrices(shape, n_iters, tau):
    scores = torch.randn(shape, dtype=torch.float64)
    scores[0, 0] = -torch.inf
    scores[-1, :, -1] = -torch.inf
    scores.requires_grad_()
    weight = torch.tensor(tau, dtype=torch.float64, requires_grad=True)
    results = [
        outputs(lambda c, t: sinkhorn(c, n_iters=n_iters, tau=t, backend=backend), [scores, weight])  # noqa: B023
        for backend in ("native", "reference")
    ]
    for a, b in zip(*results, strict=True):
        assert_close(a, b, atol=1e-12, rtol=0)


@pytest.mark.parametrize("shape", [(32, 32, 32), (37, 17, 40), (33, 1, 33), (40, 64, 5), (2, 17, 19, 18)])
@pytest.mark.parametrize("n_iters", [1, 2, 3, 20])
@pytest.mark.parametrize("tau", [1.0, 0.5])
@pytest.mark.parametrize("threads", [(1, 1), (1, 2), (2, 1)])
def test_small_matrices_in_lanes(shape, n_iters, tau, threads):
    """Many matrices are computed in the lanes of vectors, few by teams; each reads the state of the other."""
    scores = torch.randn(shape, dtype=torch.float64)
    scores[0, 0] = -torch.inf
    scores[-1, ..., -1] = -torch.inf
    scores[-1, ..., 0] = torch.where(torch.rand(shape[1:-1]) < 0.3, -torch.inf, scores[-1, ..., 0])
    inputs = [scores.requires_grad_(), torch.full(shape[:-2], tau, dtype=torch.float64, requires_grad=True)]
    d_weights = torch.randn(shape, dtype=torch.float64)

    def run(backend):
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(threads[0])
            weights = sinkhorn(inputs[0], n_iters=n_iters, tau=inputs[1], backend=backend)
            torch.set_num_threads(threads[1])
            return [weights, *torch.autograd.grad(weights, inputs, d_weights, materialize_grads=True)]
        finally:
            torch.set_num_threads(before)

    for got, expected in zip(run("native"), run("reference"), strict=True):
        assert_close(got, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["baseline", "avx2", "avx512"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [(17, 23), (64, 33), (1, 64), (47, 1)])
def test_small_matrices_in_lanes_of_every_instruction_set(name, dtype, sizes):
    """Numbers of matrices that leave some of the last lanes empty, and one too few for all lanes."""
    best = native.instruction_set()
    if native.use_instruction_set(name) != name:
        pytest.skip(f"this processor has no {name}")
    lanes = {"baseline": 16, "avx2": 32, "avx512": 64}[name] * 8 // torch.finfo(dtype).bits
    try:
        for count in (lanes - 1, lanes, 2 * lanes + 1, 3 * lanes - 1):
            scores = torch.randn(count, *sizes, dtype=dtype, requires_grad=True)
            got = outputs(lambda c: sinkhorn(c, n_iters=6, backend="native"), [scores])
            expected = outputs(lambda c: oracle.batch_weights(c, 6), [scores.detach().double().requires_grad_()])
            for a, b, bound in zip(got, expected, oracle.tolerances(scores, 6, d_out_of(got[0])), strict=True):
                assert_close(a.double(), b, atol=bound, rtol=0)
    finally:
        assert native.use_instruction_set(best) == best


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_unsafe_matrix_in_a_lane_spoils_no_other(dtype):
    scores = torch.randn(64, 20, 24, dtype=dtype)
    alone = scores.clone()
    scores[3] *= 400 if dtype == torch.float32 else 4000
    scores[5, 2, 2] = torch.nan
    weights = sinkhorn(scores, n_iters=5, backend="native")
    others = [at for at in range(64) if at not in (3, 5)]
    assert torch.equal(weights[others], sinkhorn(alone, n_iters=5, backend="native")[others])
    expected = sinkhorn(scores[3], n_iters=5, backend="reference")
    assert_close(weights[3], expected, atol=1e-3 if dtype == torch.float32 else 1e-9, rtol=0)
    assert weights[5].isnan().any()


def test_tiny_matrices_save_nothing_but_the_scores():
    scores = torch.randn(1000, 4, 4, requires_grad=True)
    assert saved_bytes(lambda: sinkhorn(scores, n_iters=20)) <= scores.nbytes + 1000


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.usefixtures("two_threads")
def test_the_same_bits_every_time(heads):
    inputs = tokens(1, heads, dtype=torch.float32)
    runs = [outputs(lambda *x: sinkhorn_attention(*x, n_iters=5, backend="native"), inputs) for _ in range(5)]
    for run in runs[1:]:
        assert all(a.equal(b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.usefixtures("two_threads")
def test_several_callers_at_once():
    inputs = [tokens(2, 3, dtype=torch.float32) for _ in range(4)]
    expected = [outputs(lambda *x: sinkhorn_attention(*x, n_iters=5, backend="native"), each) for each in inputs]
    got = [None] * 4

    def work(place):
        for _ in range(20):
            got[place] = outputs(lambda *x: sinkhorn_attention(*x, n_iters=5, backend="native"), inputs[place])

    callers = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for a, b in zip(got, expected, strict=True):
        assert all(x.equal(y) for x, y in zip(a, b, strict=True))


def test_after_a_fork():
    """A child has none of its parent's threads; it works alone instead of waiting for them."""
    code = """
        import os, torch, sinkformers
        torch.set_num_threads(2)
        q = torch.randn(1, 4, 64, 16)
        expected = sinkformers.sinkhorn_attention(q, q, q, n_iters=5, backend="native")
        child = os.fork()
        if child == 0:
            out = sinkformers.sinkhorn_attention(q, q, q, n_iters=5, backend="native")
            os._exit(0 if (out - expected).abs().max() < 1e-6 else 1)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], timeout=60, env={**os.environ, "OMP_NUM_THREADS": "2"}
    )
    assert done.returncode == 0


def test_the_floating_point_mode_is_left_alone():
    tiny = torch.tensor([1e-40])
    q, k, v = tokens(dtype=torch.float32)
    sinkhorn_attention(q, k, v, n_iters=5, backend="native")
    assert (tiny * 1.0).item() != 0


@pytest.mark.usefixtures("two_threads")
def test_the_workspace_is_given_back():
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    q = torch.randn(1, 1, 2048, 64)
    sinkhorn_attention(q, q, q, n_iters=3, backend="native")
    before = resident()
    native.release_workspace()
    assert before - resident() > 15 * 2**20
    native.release_workspace()


@pytest.mark.parametrize("shape", [(1, 900, 900), (2, 300, 500)])
@pytest.mark.usefixtures("two_threads")
def test_the_operator_shares_a_matrix_between_threads(shape):
    scores = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    results = [outputs(lambda c: sinkhorn(c, n_iters=5, backend=b), [scores]) for b in ("native", "torch")]  # noqa: B023
    for a, b in zip(*results, strict=True):
        assert_close(a, b, atol=1e-12, rtol=0)


def test_sharp_scores_cost_no_denormals():
    """Weights of sharp scores are zeros or normal numbers, never in between."""
    scores = 30 * torch.randn(4, 64, 64)
    weights = sinkhorn(scores, n_iters=1, backend="native")
    assert ((weights == 0) | (weights >= torch.finfo(torch.float32).tiny / 64)).all()


def test_dropout_is_the_same_on_every_backend():
    q, k, _ = tokens(2, 3, dtype=torch.float32)
    value = torch.eye(61).expand(2, 3, 61, 61)
    drawn = []
    for backend in ("native", "torch", "reference"):
        torch.manual_seed(7)
        drawn.append(sinkhorn_attention(q, k, value, dropout_p=0.3, n_iters=3, backend=backend) == 0)
    assert drawn[0].equal(drawn[1])
    assert drawn[0].equal(drawn[2])
    assert 0.27 < drawn[0].double().mean() < 0.33


def test_a_missing_library_says_why(monkeypatch):
    monkeypatch.setattr(binding, "_MISSING", "it was not built")
    scores = torch.randn(3, 5, 7)
    with pytest.warns(RuntimeWarning, match="it was not built"):
        assert_close(sinkhorn(scores), sinkhorn(scores, backend="torch"))
    with pytest.raises(NotImplementedError, match='backend="native" cannot serve this call: it was not built'):
        sinkhorn(scores, backend="native")
    with pytest.raises(NotImplementedError, match='backend="native" cannot serve this call: it was not built'):
        sinkhorn_attention(scores, scores, scores, backend="native")


def test_kernels_without_openmp_say_that_they_use_one_thread(monkeypatch):
    assert native.one_thread() is None
    monkeypatch.setattr(binding._loaded(), "library", SimpleNamespace(sinkformers_threaded=lambda: 0))
    assert native.one_thread() == "they were built without OpenMP, which Apple's compiler lacks, and use one thread"


@pytest.mark.parametrize(
    ("platform", "reason"), [("win32", "there are none for Windows"), ("linux", "C\\+\\+ compiler")]
)
def test_where_there_are_no_kernels_the_reason_fits_the_system(monkeypatch, tmp_path, platform, reason):
    monkeypatch.setattr(native, "__path__", [str(tmp_path)])
    monkeypatch.setattr(sys, "platform", platform)
    assert re.search(reason, str(binding._load()))
