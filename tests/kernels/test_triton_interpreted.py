"""The Triton kernels against float64, in Triton's interpreter: output and every gradient; see tests/triton_case.py."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="the triton extra is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("test_triton_numerics.py runs this file with TRITON_INTERPRET set", allow_module_level=True)

import triton.language as tl

from sinkformers import sinkhorn
from sinkformers.attention.call import AttentionCall
from sinkformers.kernels.triton import attention, attention_forward, head, sizes, tiny_backward, tiny_forward
from sinkformers.kernels.triton.dropout import dropout
from tests import oracle
from tests.triton_case import SEED, Case, Largest, bfloat16_as_hardware_has_it, compare, dropped

pytestmark = pytest.mark.triton


@pytest.fixture(autouse=True)
def bfloat16(monkeypatch):
    bfloat16_as_hardware_has_it(monkeypatch)


@pytest.fixture(params=["passes", "head", "blocks"])
def form(request, monkeypatch):
    """Passes over tiles, a head in one program, or that with a block of rows at a time: the same results from each."""
    monkeypatch.setattr(Case, "form", request.param)
    return request.param


@pytest.fixture
def taken(monkeypatch):
    """Which ways through the steps a head in one program has taken."""
    names = []
    for name in ("steps_in_logarithms", "gradient_by_scaling", "gradient_in_logarithms"):
        way = getattr(head, name)
        monkeypatch.setattr(head, name, lambda *a, way=way, name=name: names.append(name) or way(*a))
    return names


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("n_iters", [1, 2, 3, 4, 7])
def test_any_number_of_steps(n_iters):
    Case(2, n_iters=n_iters).check()


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("n_iters", [1, 2, 5, 6])
def test_sharp_scores(n_iters):
    Case(2, std=30.0, n_iters=n_iters).check()


@pytest.mark.parametrize("n_iters", [4, 5])
def test_a_sunk_column(n_iters):
    """All queries prefer one key, and a small tau leaves the others low: a column step has weights where the last have
    none, and no ratio between the two could be held. A head without a favourite takes the ratios, in the same call."""
    bias = torch.zeros(2, 1, 43)
    bias[0, 0, 7] = 400
    seen = []
    original = attention._change
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_change", lambda *a: seen.append(original(*a)) or seen[0])
        # The favourite's adjoint is the difference of two sums over all queries that agree: autograd cancels their
        # terms one by one, the kernels after 37 additions of numbers up to 5.
        Case(2, n_iters=n_iters, bias=bias, tau=torch.tensor([0.3, 1.0])).check(reach=16)
    assert seen[0].shape == (2, n_iters)
    assert seen[0][0].max() > 88
    assert seen[0][1].max() < 40


@pytest.mark.parametrize("n_iters", [4, 5])
def test_a_head_with_a_sunk_column(n_iters, taken, monkeypatch):
    """In one program too: the head with a favourite is computed in logarithms, and the other one is not."""
    monkeypatch.setattr(Case, "form", "head")
    bias = torch.zeros(2, 1, 43)
    bias[0, 0, 7] = 400
    Case(2, n_iters=n_iters, bias=bias, tau=torch.tensor([0.3, 1.0])).check(reach=16)
    assert sorted(taken) == ["gradient_by_scaling", "gradient_in_logarithms", "steps_in_logarithms"]


@pytest.mark.parametrize("limit", [40.0, -1.0])
def test_both_ways_of_a_head_agree(limit, taken, monkeypatch):
    """Logarithms where scalings would do: the longer way has no error of its own, in one launch and in two."""
    monkeypatch.setattr(Case, "form", "head")
    monkeypatch.setattr(head, "NEAR", tl.constexpr(limit))
    for n, n_iters in ((37, 5), (71, 4)):
        Case(1, n=n, n_iters=n_iters, p=0.2, l2=True, tau=torch.tensor([0.7])).check()
    assert set(taken) == {"gradient_by_scaling"} if limit > 0 else {"steps_in_logarithms", "gradient_in_logarithms"}


@pytest.mark.parametrize("scores", ["plain", "sharp", "with a sunk column", "in a window"])
def test_two_steps_in_a_pass(scores, monkeypatch):
    """Columns that have next to nothing in a block of rows, or nothing, as in a window, are added up as logarithms."""
    monkeypatch.setattr(Case, "form", "pairs")
    case = Case(2, n=67, d=5, e=3, n_iters=4, std=30.0 if scores == "sharp" else 1.0)
    if scores == "plain":
        case.tau, case.l2, case.p, case.seed = torch.tensor([0.3, 1.0]), True, 0.2, torch.tensor(SEED)
    elif scores == "with a sunk column":
        case.bias = torch.zeros(2, 1, 43)
        case.bias[0, 0, 7] = 400
    elif scores == "in a window":
        i, j = torch.arange(67)[:, None], torch.arange(43)
        case.entries = (((i - j).abs() < 5) & (i % 7 != 3) & (j % 11 != 5))[None]
        case.k[:, ~case.entries[0].any(0)] = torch.nan
    case.check(reach=16 if case.bias is not None else 4)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 31), (29, 1), (128, 64), (5, 251)])
def test_what_the_table_offers(n, m):
    """Sequences of one token and full tiles included; backward in passes reads what a head in one program saved."""
    case = Case(1, n=n, m=m, d=3, e=5, n_iters=4, tau=torch.tensor([0.7]))
    head, *others = sizes.candidates(case.call)
    assert head.head is not None
    assert [other.head for other in others] == [None, None]
    for plan in (head, head._replace(head_gradient=None), *others[:1]):
        case.plan = lambda plan=plan: plan
        # With one key all gradients of queries are zero: what is added up counts.
        largest = (case.d_out @ case.v.mT).abs().max().item()
        case.check(sizes={"q": largest, "k": n * largest, "tau": m * largest})


def test_a_preferred_plan_serves_its_kind_of_call():
    call, other = Case(2, n=64, m=64).call, Case(2, n=65, m=64).call
    default, plan = sizes.choose(call), sizes.candidates(call)[-1]
    assert plan != default
    sizes.prefer(call, plan)
    assert sizes.choose(call) == plan
    assert sizes.choose(other) != plan
    sizes.prefer(call, None)
    assert sizes.choose(call) == default


@pytest.mark.parametrize("std", [1.0, 30.0, 300.0])
def test_sharp_scores_need_no_exponential_a_step(std):
    case = Case(2, d=5, e=3, std=std, n_iters=9)
    _, f, excess = attention_forward(case.call, 0.0, case.plan())
    assert attention._change(attention.prepare(case.call, 0.0), f, excess).max() < 40


@pytest.mark.usefixtures("form")
def test_a_hub():
    """The matrix whose potentials drift with every step, which scalings could not hold for long."""
    bias = torch.full((1, 41, 41), -1000.0)
    bias[:, 0] = bias[:, :, :20] = 0
    Case(1, n=41, m=41, std=0.1, n_iters=9, bias=bias).check()


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize(
    ("n", "m", "d", "e"), [(1, 5, 3, 2), (5, 1, 2, 3), (71, 3, 40, 5), (2, 67, 5, 41), (3, 2, 131, 7)]
)
def test_awkward_sizes(n, m, d, e):
    Case(2, n=n, m=m, d=d, e=e, n_iters=4).check()


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (2, 1, 3)])
def test_leading_axes(lead):
    Case(*lead, n=7, m=11, d=5, e=3, p=0.2).check()


@pytest.mark.usefixtures("form")
def test_any_strides():
    """Heads beside features, features apart, a value and an incoming gradient that repeat: nothing is copied first."""
    case = Case(2, 3, n=7, m=11, d=5, e=3)
    case.q = torch.randn(2, 7, 3, 5).transpose(1, 2)
    case.k = torch.randn(3, 5, 11, 2).permute(3, 0, 2, 1)
    case.v = torch.randn(11, 3).expand(2, 3, 11, 3)
    case.d_out = torch.randn(()).expand(2, 3, 7, 3)
    case.bias = torch.randn(11, 7, 3, 1).permute(3, 2, 1, 0)
    case.entries = (torch.rand(2, 1, 11, 1) > 0.3).transpose(-1, -2)
    case.tau = torch.rand(3, 2).mT
    case.check()


@pytest.mark.usefixtures("form")
def test_padding_leaves_no_trace():
    """NaN in padded tokens and in their outputs' gradients changes no bit; the gradients there are exact zeros."""
    real_q, real_k = torch.arange(37) < torch.tensor([[29], [37]]), torch.arange(43) < torch.tensor([[43], [31]])
    results = []
    for filling in (0.0, torch.nan, torch.inf):
        torch.manual_seed(1)
        case = Case(2, n_iters=4, queries=real_q, keys=real_k, l2=True)
        for x, real in ((case.q, real_q), (case.d_out, real_q), (case.k, real_k), (case.v, real_k)):
            x.masked_fill_(~real[..., None], filling)
        results.append(case.run() if results else case.check())
    for result in results:
        for a, b, real in zip(result[:4], results[0], (real_q, real_q, real_k, real_k), strict=False):
            assert a.equal(b)
            assert a[~real].eq(0).all()


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("which", ["queries", "keys"])
def test_one_token_mask_alone(which):
    size = {"queries": 37, "keys": 43}[which]
    case = Case(2, 2, d=5, e=3, **{which: torch.rand(2, 1, size) > 0.4})
    case.keys = case.keys if case.keys is None else case.keys.clone().index_fill_(0, torch.tensor([1]), False)
    out, *_ = case.check()
    assert which == "queries" or out[1].eq(0).all()


@pytest.mark.usefixtures("form")
def test_a_window_with_dead_lines():
    """No product of rows and columns; some lines have nothing left, and NaN stands there."""
    i, j = torch.arange(37)[:, None], torch.arange(43)
    entries = ((i - j).abs() < 5) & (i % 7 != 3) & (j % 11 != 5)
    case = Case(2, n_iters=5, entries=entries[None], tau=torch.tensor([0.3, 1.0]))
    for x, dead in ((case.q, ~entries.any(1)), (case.d_out, ~entries.any(1)), (case.k, ~entries.any(0))):
        x[:, dead] = torch.nan
    case.v[:, ~entries.any(0)] = torch.inf
    results = case.check()
    assert all(x.isfinite().all() for x in results if x is not None)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, torch.finfo(torch.float32).min / 2, -torch.inf])
def test_the_lowest_bias_is_a_mask(lowest):
    hidden = torch.rand(1, 1, 1, 43) < 0.3
    bias = torch.randn(1, 1, 1, 43).masked_fill(hidden, lowest)
    *_, d_bias, _ = Case(1, 2, d=5, e=3, bias=bias).check()
    assert d_bias[hidden].eq(0).all()
    assert d_bias[~hidden].ne(0).all()


@pytest.mark.usefixtures("form")
def test_every_mask_at_once():
    case = Case(2, 2, n=11, m=13, d=5, e=3, n_iters=5, l2=True, p=0.3)
    case.bias = torch.randn(1, 2, 11, 13).masked_fill(torch.rand(1, 2, 11, 13) < 0.2, -torch.inf)
    case.entries = torch.rand(2, 1, 11, 13) > 0.2
    case.queries, case.keys = torch.rand(1, 2, 11) > 0.2, torch.rand(2, 1, 13) > 0.2
    case.tau = torch.tensor([[0.0, 0.4], [0.9, 1.0]])
    case.check()


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("n_iters", [3, 4])
def test_relaxed_columns(n_iters):
    Case(3, d=5, e=3, n_iters=n_iters, tau=torch.tensor([0.0, 0.5, 1.0])).check()


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("n_iters", [1, 4])
def test_l2_cost(n_iters):
    Case(2, l2=True, n_iters=n_iters).check()


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("n_iters", [1, 2, 3])
def test_dropout(n_iters):
    Case(2, d=5, e=3, p=0.3, n_iters=n_iters).check()


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("seed", [0, 7, 2**40 + 3, -5])
def test_the_whole_seed_counts(seed):
    """Uniform weights read out through an identity: the mask itself."""
    q, k, v = torch.zeros(2, 5, 16), torch.zeros(2, 7, 16), torch.eye(7).expand(2, 7, 7)
    masks = (None, None, None, None, None, torch.tensor(seed), None)
    call = AttentionCall(q, k, v, *masks, 3, 1.0, False, 0.4, False)
    out, *_ = attention_forward(call, 0.0, sizes.candidates(call)[0 if Case.form == "head" else -1])
    torch.testing.assert_close(out * 7, dropped((2, 5, 7), seed, 0.4).float())


@pytest.mark.usefixtures("form")
def test_dropping_everything():
    case = Case(2, n=5, m=7, d=3, e=3)
    case.p, case.seed = 1.0, torch.tensor(3)
    results = case.run()
    assert dropout(case.seed, 1.0).scale == 0  # for the one hash in 2³² that the threshold lets through
    assert all(x.eq(0).all() for x in results if x is not None)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("n_iters", "std", "l2"), [(1, 1.0, False), (3, 4.0, False), (4, 1.0, True), (3, 30.0, False)])
def test_half_precision_errs_at_most_twice_as_much_as_eager_softmax(dtype, n_iters, std, l2):
    case = Case(2, n=71, m=67, d=16, e=24, std=std, dtype=dtype, n_iters=n_iters, l2=l2, tau=torch.tensor([0.8, 1.0]))
    case.check_half()


@pytest.mark.usefixtures("form")
def test_iterations_run_in_float32():
    """Half-precision tokens, but row sums right to float32: read out as the sum of weights over values of one."""
    case = Case(1, n=71, m=67, d=16, e=16, std=8.0, dtype=torch.bfloat16, n_iters=5)
    _, f, excess = attention_forward(case.call, 0.0, case.plan())
    assert f.dtype == excess.dtype == torch.float32
    assert f.shape == (1, 4, 71)
    assert excess.shape == (1, 2, 67)
    scores = case.scale * case.q.double() @ case.k.double().mT
    f = f[:, -1] - f[:, 0]  # the last potentials are those of the scores less the rows' maxima
    sums = (scores + f[..., None].double() - excess[:, -1, None, :].double()).exp().sum(-1)
    assert (sums - 1).abs().max() < 1e-5


def test_no_matrix_is_made():
    case = Case(1, n=131, m=137, d=5, e=3, n_iters=5, entries=torch.rand(1, 131, 137) > 0.3, p=0.1)
    with Largest() as largest:
        case.run()
    assert largest.size == 5 * 137 < 131 * 137 / 8


TINY = {
    "4×4, many": (261, 4, 4, 20, 1.0, False, False),
    "once": (5, 4, 4, 1, 1.0, False, False),
    "even, masked, relaxed": (7, 3, 5, 2, 1.0, True, True),
    "sharp": (3, 61, 64, 5, 30.0, True, True),
    "one row": (3, 1, 5, 3, 1.0, True, False),
    "long": (2, 5, 3, 41, 3.0, False, True),
}


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiny_matrices(name, dtype):
    count, n, m, n_iters, std, masked, relaxed = TINY[name]
    scores = (std * torch.randn(count, m, n)).mT.to(dtype)
    if masked:
        scores = scores.masked_fill(torch.rand(scores.shape) < 0.3, -torch.inf)
        scores[0, :, 0] = scores[-1, 0] = -torch.inf
    tau = torch.rand(count) if relaxed else None
    d_weights = torch.randn(m, count, n).permute(1, 2, 0).to(dtype)
    hidden = d_weights.masked_fill(scores == -torch.inf, torch.nan)
    got = (tiny_forward(scores, tau, n_iters), *tiny_backward(hidden, scores, tau, n_iters))

    def evaluate(weights_of, dtype):
        leaves = [scores.to(dtype).requires_grad_(), None if tau is None else tau.to(dtype).requires_grad_()]
        weights = weights_of(leaves[0], n_iters=n_iters, tau=1.0 if tau is None else leaves[1])
        wanted = leaves if tau is not None else leaves[:1]
        grads = torch.autograd.grad(weights, wanted, d_weights.to(dtype), allow_unused=True, materialize_grads=True)
        return weights, *grads, *([None] if tau is None else [])

    exact = evaluate(oracle.batch_weights, torch.float64)
    yardstick = evaluate(lambda *a, **k: sinkhorn(*a, backend="reference", **k), torch.float32)
    compare(got, exact, yardstick, 4)
    assert got[0].dtype == got[1].dtype == dtype
    assert got[1][scores == -torch.inf].eq(0).all()
    assert got[0][scores == -torch.inf].eq(0).all()


def test_a_tiny_hub():
    scores = torch.full((2, 8, 8), -1000.0)
    scores[:, 0] = scores[:, :, :4] = 0
    exact = oracle.batch_weights(scores, 51)
    assert (tiny_forward(scores, None, 51).double() - exact).abs().max() < 1e-5
    grad, _ = tiny_backward(torch.randn(2, 8, 8), scores, None, 51)
    assert grad.isfinite().all()
