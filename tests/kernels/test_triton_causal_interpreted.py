"""Causal attention by the Triton kernels against the loop over queries in float64; see tests/triton_case.py."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="the triton extra is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("test_triton_numerics.py runs this file with TRITON_INTERPRET set", allow_module_level=True)

import triton.language as tl

from sinkformers import SinkhornCache, sinkhorn_attention
from sinkformers.attention.causal.call import CausalAttentionCall
from sinkformers.attention.causal.operator import BACKENDS, attend_causal
from sinkformers.core.causal_reference import streaming_reference
from sinkformers.core.definition import Definition
from sinkformers.kernels.triton import block_rows, causal_backward, causal_forward
from sinkformers.kernels.triton.causal import tiles
from tests.triton_case import Case, Largest, bfloat16_as_hardware_has_it

pytestmark = pytest.mark.triton


@pytest.fixture(autouse=True)
def bfloat16(monkeypatch):
    bfloat16_as_hardware_has_it(monkeypatch)


def by_the_loop(scores, *, n_iters, mask, tau):
    tau = tau if torch.is_tensor(tau) else None
    return streaming_reference(scores.masked_fill(~mask, -torch.inf), tau, Definition(n_iters))


class CausalCase(Case):
    """Inputs of one causal call; with `triangle` query i sees the keys up to i + m − n. A block has 32 rows."""

    exact_weights = plain_weights = staticmethod(by_the_loop)

    def __init__(self, *lead, n=37, d=5, e=3, triangle=True, received=None, expected=None, **options):
        super().__init__(*lead, **{"m": n, **options, "n": n, "d": d, "e": e})
        self.triangle, self.received, self.expected = triangle, received, expected

    @property
    def call(self):
        tokens = (self.q, self.k, self.v, self.bias, self.entries, self.queries, self.keys, self.tau, self.seed, None)
        sums, settings = (self.received, self.expected), (self.n_iters, self.scale, self.l2, self.p)
        rows = block_rows(self.q.element_size(), self.q.shape[-1], self.v.shape[-1])
        return CausalAttentionCall(*tokens, *sums, *settings, self.triangle, True, rows)

    def attend(self):
        out, *_, starts = causal_forward(self.call, self.masked_bias)
        saved = {"d_out": self.d_out, "out": out, "starts": starts, "needs_bias": self.bias is not None}
        return out, *causal_backward(self.call, self.masked_bias, **saved)

    def participants(self):
        alive = super().participants()
        return alive.tril(self.m - self.n) if self.triangle else alive


@pytest.mark.parametrize("n_iters", [1, 3, 5, 7])
def test_any_number_of_steps(n_iters):
    CausalCase(1, n_iters=n_iters).check()


def test_three_blocks():
    """What a block has received and is pulled with comes from more than its neighbour."""
    CausalCase(1, n=71, d=17, e=23, tau=torch.tensor([0.7])).check()


@pytest.mark.parametrize(("n", "m"), [(37, 5), (67, 41), (3, 43)])
def test_every_key_in_sight(n, m):
    """The cross-attention of a decoder: queries come in order, and all see all keys."""
    CausalCase(1, n=n, m=m, triangle=False, n_iters=5).check()


@pytest.mark.parametrize(("n", "d", "e"), [(1, 3, 2), (2, 40, 5), (5, 131, 7), (33, 2, 17)])
def test_awkward_sizes(n, d, e):
    CausalCase(1, n=n, d=d, e=e).check()


@pytest.mark.parametrize("lead", [(), (3, 1, 2)])
def test_leading_axes(lead):
    CausalCase(*lead, n=7, p=0.2).check()


@pytest.mark.parametrize("n_iters", [3, 5])
def test_relaxed_columns(n_iters):
    CausalCase(3, n=11, n_iters=n_iters, tau=torch.tensor([0.0, 0.5, 1.0])).check()


@pytest.mark.parametrize("std", [10.0, 100.0])
def test_sharp_scores(std):
    """Four heads: the error of one number such as the gradient of tau, in the yardstick too, is a matter of luck."""
    CausalCase(4, n=34, std=std, tau=torch.tensor([0.9, 0.8, 0.7, 0.6])).check()


def test_sums_that_no_exponential_holds():
    """All queries prefer one key by e⁴⁰⁰, and then another: sums leap, and small tau leaves columns low."""
    bias = torch.zeros(2, 37, 41)
    bias[:, :17, 7] = bias[:, 17:, 5] = 400
    case = CausalCase(2, m=41, triangle=False, n_iters=5, bias=bias, tau=torch.tensor([0.3, 1.0]))
    # In each of 37 rows numbers that add up to zero, such as dP − rowsum(dO∘O), meet logarithms of 400.
    case.check(sizes={"tau": 37 * 400})


def test_both_forms_of_the_scans_agree(monkeypatch):
    """Logarithms row by row where exponentials would do: the longer way has no error of its own."""
    monkeypatch.setattr(tiles, "FAR", tl.constexpr(-80.0))
    taken = []
    for name in ("add_up_logarithms", "spread_row_by_row"):
        form = getattr(tiles, name)
        monkeypatch.setattr(tiles, name, lambda *a, form=form, name=name: taken.append(name) or form(*a))
    CausalCase(1, n_iters=5, tau=torch.tensor([0.7])).check()
    assert {*taken} == {"add_up_logarithms", "spread_row_by_row"}


def test_padding_leaves_no_trace():
    """NaN in padded tokens on either side changes no bit, rows that see no key are zero, as are their gradients."""
    real = (torch.arange(37) >= torch.tensor([[5], [0]])) & (torch.arange(37) < torch.tensor([[37], [31]]))
    results = []
    for filling in (0.0, torch.nan):
        torch.manual_seed(1)
        case = CausalCase(2, keys=real)
        dead = (torch.arange(37) < torch.tensor([[5], [0]]), ~real)
        for x, hidden in ((case.q, dead[0]), (case.d_out, dead[0]), (case.k, dead[1]), (case.v, dead[1])):
            x.masked_fill_(hidden[..., None], filling)
        results.append(case.run() if results else case.check())
    for a, b, hidden in zip(results[1][:4], results[0], (dead[0], dead[0], dead[1], dead[1]), strict=False):
        assert a.equal(b)
        assert a[hidden].eq(0).all()


def test_packed_documents_in_a_window():
    """Entries that are no triangle: documents side by side, each query with the last five keys of its own."""
    i, j = torch.arange(37)[:, None], torch.arange(37)
    entries = (i // 13 == j // 13) & (i >= j) & (i - j < 5) & (j % 11 != 5)
    case = CausalCase(2, triangle=False, entries=entries[None], n_iters=5, queries=(torch.arange(37) != 20)[None])
    case.q[:, 20] = torch.nan
    case.check()


def test_every_option_at_once():
    case = CausalCase(2, 2, n=11, m=13, n_iters=5, l2=True, p=0.3)
    case.bias = torch.randn(1, 2, 11, 13).masked_fill(torch.rand(1, 2, 11, 13) < 0.2, -torch.inf)
    case.entries = torch.rand(2, 1, 11, 13) > 0.2
    case.queries, case.keys = torch.rand(1, 2, 11) > 0.2, torch.rand(2, 1, 13) > 0.2
    case.tau = torch.tensor([[0.0, 0.4], [0.9, 1.0]])
    case.check()


def test_any_strides():
    case = CausalCase(2, 3, n=7)
    case.q = torch.randn(2, 7, 3, 5).transpose(1, 2)
    case.k = torch.randn(3, 5, 7, 2).permute(3, 0, 2, 1)
    case.v = torch.randn(7, 3).expand(2, 3, 7, 3)
    case.d_out = torch.randn(()).expand(2, 3, 7, 3)
    case.tau = torch.rand(3, 2).mT
    case.check()


@pytest.mark.parametrize(("dtype", "n_iters", "std"), [(torch.float16, 3, 4.0), (torch.bfloat16, 5, 1.0)])
def test_half_precision_errs_at_most_twice_as_much_as_eager_softmax(dtype, n_iters, std):
    """Blocks of half precision have 64 rows."""
    CausalCase(1, n=71, d=16, e=24, std=std, dtype=dtype, n_iters=n_iters, tau=torch.tensor([0.8])).check_half()


def test_no_row_depends_on_a_later_token():
    """Other tokens from row 35 on change no bit before it, and rows before it send them no gradient."""
    results = []
    for seed in (1, 2):
        torch.manual_seed(0)
        case = CausalCase(1, n=41, n_iters=5, tau=torch.tensor([0.6]))
        torch.manual_seed(seed)
        for x in (case.q, case.k, case.v):
            x[:, 35:] = torch.randn_like(x[:, 35:])
        case.d_out[:, 35:] = 0
        results.append(case.run())
    (mine, *_), (other, *_) = results
    assert mine[:, :35].equal(other[:, :35])
    assert mine[:, 35:].ne(other[:, 35:]).all()
    for grad in results[0][1:4]:
        assert grad[:, 35:].eq(0).all()


def test_a_cache_continues():
    """Chunks of any size give what one pass gives, in the reference."""
    q, k, v = (torch.randn(1, 2, 41, 5, dtype=torch.float64) for _ in range(3))
    whole = sinkhorn_attention(q, k, v, is_causal=True, n_iters=5, backend="reference")
    cache, parts = SinkhornCache(), []
    for start, stop in ((0, 1), (1, 35), (35, 41)):
        chunk = (x[:, :, start:stop].float() for x in (q, k, v))
        parts.append(sinkhorn_attention(*chunk, is_causal=True, n_iters=5, cache=cache[0], backend="triton"))
    assert (torch.cat(parts, -2) - whole).abs().max() < 41 * torch.finfo(torch.float32).eps * v.abs().max()


def test_the_gradient_after_a_cache():
    """Sums of earlier queries are constants: the loop over all queries, with the first 30 rows of scores detached."""
    first = CausalCase(1, n=30, n_iters=5)
    _, received, expected, _ = causal_forward(first.call, 0.0)
    case = CausalCase(1, n=11, m=41, n_iters=5, received=torch.nn.functional.pad(received, (0, 11), value=-1e37))
    case.expected = torch.nn.functional.pad(expected, (0, 11))
    case.k[:, :30] = first.k

    def continued(scores, *, n_iters, tau, **_):
        before = (first.scale * first.q @ first.k.mT).to(scores).detach()
        rows = torch.cat([torch.nn.functional.pad(before, (0, 11)), scores], -2)
        return by_the_loop(rows, n_iters=n_iters, mask=torch.ones(41, 41).tril().bool(), tau=tau)[..., 30:, :]

    case.exact_weights = case.plain_weights = continued
    case.check()


def test_what_is_saved():
    """One vector per block and column step, and the shapes that the operator describes; no n×m matrix on the way."""
    case = CausalCase(1, n=97, entries=torch.rand(1, 97, 97) > 0.3, p=0.1)
    with Largest() as largest:
        case.run()
    assert largest.size == 5 * 97 < 97 * 97 / 8  # two numbers per row step and row, and the rows' maxima
    result = BACKENDS["triton"].forward(case.call)
    assert result.starts.shape == (1, 4, 1, 97)
    for mine, described in zip(result, attend_causal._fake(case.call, "triton"), strict=True):
        assert (mine.shape, mine.dtype) == (described.shape, described.dtype)


def test_what_it_declines():
    for reason, width, dtype in (("float64", 5, torch.float64), ("257", 257, torch.float32)):
        x = torch.randn(1, 2, width, dtype=dtype)
        with pytest.raises(NotImplementedError, match=reason):
            sinkhorn_attention(x, x, x, is_causal=True, n_iters=3, backend="triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_by_name(dtype):
    """From the public function: centred tokens of the L2 cost, dropout by the seed, and repeated keys of groups."""
    q, k, v = (torch.randn(1, heads, 7, 5).to(dtype) for heads in (4, 2, 2))
    outputs = []
    for backend in ("triton", "torch"):
        torch.manual_seed(3)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        options = {"is_causal": True, "n_iters": 3, "cost": "l2", "dropout_p": 0.3, "enable_gqa": True}
        out = sinkhorn_attention(*leaves, backend=backend, **options)
        assert out.dtype == dtype
        outputs.append((out, *torch.autograd.grad(out.sum(), leaves)))
    for mine, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=4 * torch.finfo(dtype).eps, atol=16 * torch.finfo(dtype).eps)
