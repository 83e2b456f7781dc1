"""The limit with equal queries, keys and values: closed forms, the Jacobian, and Lipschitz bounds."""

import math

import pytest
import torch
from torch.testing import assert_close

from sinkformers.modules.limit_attention import limit_attention
from sinkformers.modules.lipschitz import limit_bound, softmax_bound
from tests import oracle
from tests.rounding import rounding


def rand(*size):
    return torch.randn(*size, dtype=torch.float64)


def attention(q, n_iters):
    """L2 attention of q (n, d) with itself, in plain torch, for derivatives of any order."""
    scores = -0.5 * (q[:, None] - q).square().sum(-1)
    if n_iters == math.inf:
        f = torch.zeros(len(q), dtype=q.dtype)
        for _ in range(55):
            f = 0.5 * (f - torch.logsumexp(scores + f, 1))
        return torch.exp(scores + f[:, None] + f) @ q
    return oracle.weights(scores, n_iters) @ q


def jacobian(function, x, **options):
    return torch.autograd.functional.jacobian(function, x, vectorize=True, **options).reshape(x.numel(), x.numel())


def expanding_tokens(n, d, n_iters, steps, width=1.5):
    """Return tokens (n, d) at which the Jacobian of attention has a large norm, found by gradient ascent."""
    q = (width * rand(n, d)).requires_grad_()
    optimiser = torch.optim.Adam([q], lr=0.1)
    for _ in range(steps):
        matrix = jacobian(lambda q: attention(q, n_iters), q, create_graph=True)
        left, _, right = torch.linalg.svd(matrix.detach())
        optimiser.zero_grad()
        (-left[:, 0] @ matrix @ right[0]).backward()
        optimiser.step()
    return q.detach()


@pytest.mark.parametrize("cost", ["dot", "l2"])
def test_both_costs_have_this_limit(cost):
    tokens = rand(2, 3, 7, 5)
    expected = oracle.attention(tokens, tokens, tokens, 301, cost=cost, scale=0.3)
    assert_close(limit_attention(tokens, None, 0.3), expected, **rounding(4096))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sharpness", [1e-3, 1.0, 10.0, 30.0, 1e3])
def test_the_sum_of_the_tokens_is_kept_however_sharp_the_scores_are(sharpness, dtype):
    """Alternating steps would need millions of steps for some of these; at 1e3 the weights are the identity."""
    tokens = rand(11, 13, 3).to(dtype)
    out = limit_attention(tokens, None, sharpness)
    # Every column sum is off by the rounding of n terms whose exponents carry eps·|score|, counted as in the oracle.
    reach = sharpness * min(tokens.square().sum(-1).max().item(), 40 / sharpness)
    tolerance = 13 * tokens.abs().max().item() * torch.finfo(dtype).eps * (13**0.5 + 2 + 2 * reach)
    assert_close(out.sum(-2), tokens.sum(-2), atol=tolerance, rtol=0)
    if sharpness == 1e3:
        assert_close(out, tokens, atol=tolerance, rtol=0)


def test_gradient():
    tokens, scale = rand(2, 5, 3).requires_grad_(), torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True] * 5, [True, False, True, True, False]])
    assert torch.autograd.gradcheck(lambda q, s: limit_attention(q, mask, s), (tokens, scale))
    out = limit_attention(tokens, mask, scale)
    (grad,) = torch.autograd.grad(out.square().sum(), tokens, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("scale", [0.1, 1.0, 7.0])
def test_the_jacobian_is_symmetric_and_positive(scale):
    """It is the Hessian of a convex function of the tokens."""
    for tokens in (rand(7, 3), expanding_tokens(5, 2, math.inf, 15)):
        matrix = jacobian(lambda q: limit_attention(q, None, scale), tokens)
        tolerance = rounding(448)  # entries of order 1 after some 50 steps on 7 tokens
        assert_close(matrix, matrix.T, **tolerance)
        assert torch.linalg.eigvalsh(matrix).min() > -tolerance["atol"]


@pytest.mark.parametrize(("n_iters", "bound"), [(1, softmax_bound), (math.inf, limit_bound)])
@pytest.mark.parametrize(("n", "d"), [(2, 1), (5, 2), (7, 3)])
def test_the_norm_of_the_jacobian_does_not_exceed_its_bound(n_iters, bound, n, d):
    tokens = expanding_tokens(n, d, n_iters, 30)
    norm = torch.linalg.matrix_norm(jacobian(lambda q: attention(q, n_iters), tokens), 2).item()
    limit = bound(torch.tensor(float(n), dtype=torch.float64)).item()
    assert norm <= limit
    assert norm > 1.5  # the search did find something, and the bound is of the right size
    assert limit < 5 * norm


@pytest.mark.parametrize("n", [2, 3, 11, 101, 4001, 10**9])
def test_the_bounds_match_their_derivation(n):
    """Recomputed: M·exp(M + 1) = n − 1 by bisection, the means by the best of many c."""
    low, high = 0.0, math.log(n)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if middle * math.exp(middle + 1) < n - 1 else (low, middle)
    c = torch.linspace(0, 20, 200_001, dtype=torch.float64)
    column, row = ((c * total + (n - 1) * torch.exp(-c - 1)).min().item() for total in (n**0.5, 1.0))
    count = torch.tensor(float(n), dtype=torch.float64)
    softmax, limit = softmax_bound(count).item(), limit_bound(count).item()
    # The minimum over a grid of c with spacing h = 1e-4 errs by h²/8 relative.
    assert softmax == pytest.approx(n**0.25 + 2 * low + 2 * math.sqrt(low * column), rel=1e-8)
    assert limit == pytest.approx(1 + 4 * row, rel=1e-8)
    # M is the largest mean of t over a row: here with all others equally far away, which the derivation shows best.
    t = torch.linspace(0, 30, 300_001, dtype=torch.float64)
    mean = (n - 1) * t * torch.exp(-t) / (1 + (n - 1) * torch.exp(-t))
    assert mean.max().item() == pytest.approx(low, rel=1e-6)
    assert softmax <= math.sqrt(n) * (4 * low + 1)  # Kim, Papamakarios and Mnih (2021)


def test_the_bounds_of_one_token_are_one():
    one = torch.ones((), dtype=torch.float64)
    assert softmax_bound(one) == limit_bound(one) == 1


@pytest.mark.parametrize("n", [17, 101, 401])
def test_softmax_columns_sum_to_the_root_of_n_at_most(n):
    """The first term of the bound uses this. One token among orthogonal ones comes within a factor of 3."""
    distance = math.sqrt(math.log(n))  # exp(−½·distance²) = 1/√n
    tokens = distance * torch.eye(n, n - 1, dtype=torch.float64)
    columns = (-0.5 * torch.cdist(tokens, tokens).square()).softmax(-1).sum(0)
    assert math.sqrt(n) / 3 < columns.max() <= math.sqrt(n)
