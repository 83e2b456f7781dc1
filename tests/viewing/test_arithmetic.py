"""The page normalises scores as the library does."""

import math

import pytest
import torch
from torch.testing import assert_close

from sinkformers import causal_sinkhorn, marginal_error, sinkhorn, sinkhorn_limit
from tests.viewing import javascript

# Each step adds and divides n or m numbers in float64; a few hundred roundings of weights of order 1, and as many of
# potentials of the size of the scores.
ROUNDING = 1e-12
ANSWER = """
import { sinkhorn } from "./sinkhorn.js";
import { streaming } from "./streaming.js";
const number = (x) => (x === null ? -Infinity : x);
const answer = (cases) => cases.map(({ scores, n, m, nIters, tau, order }) => {
  const normalise = order ? streaming : sinkhorn;
  const found = normalise(Float64Array.from(scores, number), n, m, nIters ?? Infinity, tau);
  return { weights: [...found.weights], steps: found.steps, converged: found.converged };
});
"""


def case(scores, n_iters, tau=1.0, order=False):
    n, m = scores.shape
    values = [None if value == -math.inf else value for value in scores.flatten().tolist()]
    count = None if n_iters == math.inf else n_iters
    return {"scores": values, "n": n, "m": m, "nIters": count, "tau": tau, "order": order}


def weights(cases):
    found = javascript.run(ANSWER, cases)
    return [
        torch.tensor(each["weights"], dtype=torch.float64).view(given["n"], given["m"])
        for given, each in zip(cases, found, strict=True)
    ]


def masked(n, m):
    """Return scores of which single entries, a row and a column are masked."""
    scores = 2 * torch.randn(n, m, dtype=torch.float64)
    scores[torch.rand(n, m) < 0.2] = -math.inf
    scores[:, 1] = scores[2] = -math.inf
    scores[torch.arange(n) != 2, 3] = 1.0  # no other row is empty
    return scores


def hub():
    """Return scores whose scalings leave the range of doubles: one row and half of the columns lie far above."""
    scores = torch.full((14, 14), -1000.0, dtype=torch.float64)
    scores[0] = scores[:, :7] = 0.0
    return scores


SCORES = {
    "square": lambda: 3 * torch.randn(13, 13, dtype=torch.float64),
    "wide": lambda: torch.randn(5, 17, dtype=torch.float64),
    "tall": lambda: torch.randn(17, 5, dtype=torch.float64),
    "masked": lambda: masked(11, 11),
    "masked rectangle": lambda: masked(7, 13),
    "large": lambda: 300 * torch.randn(7, 7, dtype=torch.float64),
    "hub": hub,
    "single": lambda: torch.zeros(1, 1, dtype=torch.float64),
}


@pytest.mark.parametrize("name", SCORES)
def test_weights_are_those_of_the_library(name):
    scores = SCORES[name]()
    settings = [(n_iters, tau) for n_iters in (1, 2, 3, 4, 5, 21) for tau in (0.0, 0.3, 1.0)]
    found = weights([case(scores, *each) for each in settings])
    size = max(1.0, float(scores[scores > -math.inf].abs().max()))
    for (n_iters, tau), each in zip(settings, found, strict=True):
        expected = sinkhorn(scores, n_iters=n_iters, tau=tau, backend="reference")
        assert_close(each, expected, atol=ROUNDING * size, rtol=0)


@pytest.mark.parametrize("name", ["square", "wide", "tall", "masked rectangle"])
@pytest.mark.parametrize("tau", [0.0, 0.3, 1.0])
def test_the_limit_is_that_of_the_library(name, tau):
    scores = SCORES[name]()
    (found,) = weights([case(scores, math.inf, tau)])
    expected = sinkhorn_limit(scores, tau=tau, tol=1e-9) if tau else scores.nan_to_num(neginf=-1e300).softmax(-1)
    if tau == 0:
        expected = expected.masked_fill(scores == -math.inf, 0.0)
    # The logarithms of column sums agree to 1e-5; what is left of the way is a few times that, by the contraction.
    assert_close(found, expected, atol=1e-4, rtol=0)
    if tau == 1:
        rows, columns = marginal_error(found, scores > -math.inf)
        assert rows < ROUNDING
        assert columns < 4e-5  # relative to a share of at most 3.4


def test_the_limit_says_whether_it_was_reached():
    permutation = torch.eye(3, dtype=torch.float64).roll(1, 0).mul(40)
    triangle = torch.zeros(3, 3, dtype=torch.float64).masked_fill(torch.ones(3, 3).triu(1).bool(), -math.inf)
    found = javascript.run(ANSWER, [case(permutation, math.inf), case(triangle, math.inf)])
    assert [each["converged"] for each in found] == [True, False]
    assert all(each["steps"] % 2 == 1 for each in found)


@pytest.mark.parametrize("mask", ["triangle", "window", "padding", "rectangle"])
def test_rows_in_order_are_those_of_the_library(mask):
    n, m = (7, 13) if mask == "rectangle" else (11, 11)
    scores = 2 * torch.randn(n, m, dtype=torch.float64)
    valid = torch.ones(n, m, dtype=torch.bool)
    if mask != "rectangle":
        valid = valid.tril()
    if mask == "window":
        valid = valid.triu(-3)
    if mask == "padding":
        valid[:, :2] = valid[:2] = False
    given = scores.masked_fill(~valid, -math.inf)
    settings = [(n_iters, tau) for n_iters in (1, 3, 5, 9) for tau in (0.0, 0.4, 1.0)]
    found = weights([case(given, *each, order=True) for each in settings])
    for (n_iters, tau), each in zip(settings, found, strict=True):
        expected = causal_sinkhorn(scores, n_iters=n_iters, tau=tau, mask=valid)
        assert_close(each, expected, atol=ROUNDING, rtol=0)


def test_even_and_endless_settings_become_those_of_rows_in_order():
    answer = """
    import { streamingIterations } from "./streaming.js";
    const answer = (counts) => [...counts, Infinity].map(streamingIterations);
    """
    assert javascript.run(answer, [1, 2, 3, 4, 30, 31]) == [1, 1, 3, 3, 29, 31, 31]
