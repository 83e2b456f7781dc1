"""`causal_sinkhorn` against loops written from the formulas: both definitions, their loops and their parallel forms."""

import math

import pytest
import torch
from torch.testing import assert_close

from sinkformers import causal_sinkhorn, sinkhorn
from sinkformers.core.causal_reference import prefix_reference, streaming_reference
from sinkformers.core.definition import Definition
from tests import causal_oracle as oracle
from tests.causal_cases import MASKS, N_ITERS, SQUARE, N

CASES = [("streaming", name) for name in MASKS] + [("prefix", name) for name in SQUARE]


def near(got, exact, scores, mask, n_iters):
    assert_close(got.double(), exact, atol=oracle.tolerance(scores, mask, n_iters), rtol=0)


def reference(scores, mask, tau, n_iters, definition):
    tau = None if tau is None else tau.expand(scores.shape[:-2])
    if definition == "streaming":
        return streaming_reference(scores.masked_fill(~mask, -math.inf), tau, Definition(n_iters))
    return prefix_reference(scores, mask.expand(scores.shape), tau, Definition(n_iters))


@pytest.mark.parametrize("n_iters", N_ITERS)
@pytest.mark.parametrize(("definition", "name"), CASES)
def test_the_loop_and_the_parallel_form_are_the_formulas(definition, name, n_iters):
    mask = MASKS[name]
    scores, tau = 2 * torch.randn(2, *mask.shape, dtype=torch.float64), torch.tensor([0.3, 1.0], dtype=torch.float64)
    exact = oracle.weights(scores, n_iters, tau, mask, definition)
    near(reference(scores, mask, tau, n_iters, definition), exact, scores, mask, n_iters)
    near(
        causal_sinkhorn(scores, n_iters=n_iters, tau=tau, mask=mask, definition=definition),
        exact,
        scores,
        mask,
        n_iters,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("definition", oracle.DEFINITIONS)
def test_without_a_mask_it_is_the_lower_triangle(definition, dtype):
    scores = torch.randn(3, 2, N, N, dtype=dtype)
    exact = oracle.weights(scores, 3, definition=definition)
    near(causal_sinkhorn(scores, definition=definition), exact, scores, MASKS["triangle"], 3)


@pytest.mark.parametrize("definition", oracle.DEFINITIONS)
def test_masks_differ_by_matrix_and_broadcast(definition):
    masks = torch.stack([MASKS[name] for name in ("triangle", "window", "padded left")])
    scores = torch.randn(2, 3, N, N, dtype=torch.float64)
    exact = oracle.weights(scores, 5, 0.7, masks, definition)
    near(causal_sinkhorn(scores, n_iters=5, tau=0.7, mask=masks, definition=definition), exact, scores, masks, 5)


@pytest.mark.parametrize("n_iters", N_ITERS)
@pytest.mark.parametrize(("definition", "name"), CASES)
def test_rows_sum_to_one_and_masked_entries_are_zeros(definition, name, n_iters):
    mask = MASKS[name]
    weights = causal_sinkhorn(5 * torch.randn(3, *mask.shape), n_iters=n_iters, mask=mask, definition=definition)
    sums = mask.any(-1).float().expand(weights.shape[:-1])
    assert_close(weights.sum(-1), sums, atol=mask.shape[-1] * 1.2e-7, rtol=0)
    assert (weights >= 0).all()
    assert not weights.masked_select(~mask).any()


@pytest.mark.parametrize("n_iters", N_ITERS)
@pytest.mark.parametrize(("definition", "name"), CASES)
def test_uniform_attention_is_a_fixed_point(definition, name, n_iters):
    """Scores that are equal along each row give equal weights, whatever the mask."""
    mask = MASKS[name]
    scores = torch.randn(mask.shape[0], 1, dtype=torch.float64).expand(mask.shape)
    weights = causal_sinkhorn(scores, n_iters=n_iters, mask=mask, definition=definition)
    uniform = mask.double() / mask.sum(-1, keepdim=True).clamp_min(1)
    assert_close(weights, uniform, atol=oracle.tolerance(scores, mask, n_iters), rtol=0)


@pytest.mark.parametrize("tau", [1.0, 0.0])
@pytest.mark.parametrize(("definition", "name"), CASES)
def test_one_step_or_no_relaxation_is_softmax(definition, name, tau):
    mask = MASKS[name]
    scores = torch.randn(2, *mask.shape, dtype=torch.float64)
    weights = causal_sinkhorn(scores, n_iters=5 if tau == 0 else 1, tau=tau, mask=mask, definition=definition)
    softmax = scores.masked_fill(~mask, -math.inf).softmax(-1).nan_to_num(0.0)
    near(weights, softmax, scores, mask, 5)


def test_cross_attention_aims_at_equal_shares():
    """The first query of cross-attention has no history, and its column step makes it uniform; T_i = (i+1)/m later."""
    scores = torch.randn(4, N, 7, dtype=torch.float64)
    every = torch.ones(N, 7, dtype=torch.bool)
    weights = causal_sinkhorn(scores, mask=every)
    assert_close(weights[:, 0], torch.full((4, 7), 1 / 7, dtype=torch.float64), atol=1e-14, rtol=0)
    received, target = scores.softmax(-1).cumsum(-2), torch.arange(1, N + 1, dtype=torch.float64)[:, None] / 7
    near(weights, (scores + (target / received).log()).softmax(-1), scores, every, 3)


def test_a_target_is_what_uniform_attention_has_given():
    """For the plain triangle key j has been given 1/(j+1) + … + 1/(i+1) by query i; in one pair of steps."""
    scores = torch.randn(N, N, dtype=torch.float64)
    attention = scores.masked_fill(MASKS["triangle"].logical_not(), -math.inf).softmax(-1)
    target = torch.tensor([[sum(1 / (k + 1) for k in range(j, i + 1)) for j in range(N)] for i in range(N)])
    ratio = (target.double() / attention.cumsum(0)).masked_fill(~MASKS["triangle"], 0.0)
    expected = attention * ratio / (attention * ratio).sum(-1, keepdim=True)
    assert_close(causal_sinkhorn(scores), expected, atol=1e-6, rtol=0)  # the target is in float32


def test_the_last_row_of_a_prefix_is_that_of_plain_sinkhorn():
    scores = torch.randn(N, N, dtype=torch.float64)
    rows = causal_sinkhorn(scores, n_iters=5, tau=0.6, definition="prefix")
    for i in range(N):
        alone = sinkhorn(scores[: i + 1, : i + 1], n_iters=5, tau=0.6)[-1]
        assert_close(rows[i, : i + 1], alone, atol=oracle.tolerance(scores, MASKS["triangle"], 5), rtol=0)


def test_no_key_is_liked_by_all():
    """A key that every query prefers keeps a small multiple of its share, where SoftMax gives it nearly all."""
    scores = torch.randn(64, 64, dtype=torch.float64)
    scores[:, 0] += 6
    share = torch.ones(64, 64, dtype=torch.float64).tril().div(torch.arange(1, 65)[:, None]).sum(0)[0]
    columns = {n: (causal_sinkhorn(scores, n_iters=n).sum(0)[0] / share).item() for n in (1, 3)}
    assert columns[1] > 5 > 2 * 1.5 > columns[3]
