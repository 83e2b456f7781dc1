"""Measures and projections for the tests of flows, in float64."""

import torch

from sinkformers.flows import Measure, Projections


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weighted(n, d, seed=0):
    weights = torch.rand(n, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64) + 0.1
    return Measure(normal(n, d, seed=seed), weights / weights.sum())


def general(k, d, seed=0):
    """Return projections without any symmetry."""
    return Projections(normal(k, d, seed=seed) / 2, normal(k, d, seed=seed + 1) / 2, normal(d, d, seed=seed + 2))


def tied(k, d, seed=0):
    """Return projections that satisfy Assumption 1: W_Q = W_K, W_V = −W_QᵀW_K."""
    return Projections.tied(normal(k, d, seed=seed) / 2)


def indefinite(d):
    """Return projections with W_QᵀW_K symmetric with eigenvalues of both signs, and W_V = −W_QᵀW_K."""
    signs = torch.ones(d, dtype=torch.float64)
    signs[-1] = -0.5
    return Projections.tied(torch.eye(d, dtype=torch.float64), torch.diag(signs))


def order(sizes, errors):
    """Return the slope of log error on log size, by least squares."""
    x, y = (torch.tensor(values, dtype=torch.float64).log() for values in (sizes, errors))
    x = x - x.mean()
    return float((x @ y) / (x @ x))
