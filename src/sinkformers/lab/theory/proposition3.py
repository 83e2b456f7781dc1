"""Proposition 3: T¹ is no Wasserstein gradient.

The paper's argument is that `k⁰(x, x')/∫k⁰(x, ·)dμ`, which would be a second variation, is not symmetric. A first
variation is defined up to a constant that may depend on μ, so the second is defined up to terms of one point each: they
are removed by double centring before symmetry is measured. Two other tests need no centring: symmetry of the Jacobian
of all particles, which would be a Hessian, and the work along a closed loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sinkformers import sinkhorn, sinkhorn_limit
from sinkformers.lab.theory.sweep import Sweep, sweep

Velocity = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Proposition3:
    signs: Sweep
    second_variation: Sweep


def run(*, n: int, dim: int = 2, loop: int = 32, seed: int = 0) -> Proposition3:
    """Test whether T⁰, T¹ and T^∞ are gradients: `n` particles, `W_QᵀW_K = 1 = −W_V`, `loop` points on the loop."""
    generator = torch.Generator().manual_seed(seed)
    x, u, v = (torch.randn(n, dim, generator=generator, dtype=torch.float64) for _ in range(3))
    maps: dict[str, Velocity] = {
        "T⁰": lambda points: -(points @ points.mT).exp() @ points / n,
        "T¹": lambda points: -sinkhorn(points @ points.mT, n_iters=1) @ points,
        "T^∞": lambda points: -sinkhorn_limit(points @ points.mT, tol=1e-13, max_iters=100_001) @ points,
    }
    rows = [(name, _jacobian_asymmetry(move, x), _work(move, x / 2, u / 4, v / 4, loop)) for name, move in maps.items()]
    signs = sweep(
        f"{n} particles: is the map a gradient?",
        "‖J − Jᵀ‖/‖J‖ (Frobenius); |∮T·dx| / ∮|T||dx|",
        ("map", "Jacobian's asymmetry", "work around a loop"),
        rows,
    )
    return Proposition3(signs, _second_variation(x))


def _jacobian_asymmetry(move: Velocity, x: Tensor) -> float:
    jacobian = torch.autograd.functional.jacobian(lambda flat: move(flat.reshape(x.shape)).reshape(-1), x.reshape(-1))
    assert isinstance(jacobian, Tensor)
    return ((jacobian - jacobian.mT).norm() / jacobian.norm()).item()


def _work(move: Velocity, x: Tensor, u: Tensor, v: Tensor, count: int) -> float:
    """Return the work around x + u cos θ + v sin θ, by the trapezoidal rule, which is spectrally accurate here."""
    work = length = 0.0
    for k in range(count):
        angle = 2 * math.pi * k / count
        force = move(x + u * math.cos(angle) + v * math.sin(angle))
        path = v * math.cos(angle) - u * math.sin(angle)
        work += float((force * path).sum())
        length += float(force.norm() * path.norm())
    return abs(work) / length


def _second_variation(x: Tensor) -> Sweep:
    kernel = (x @ x.mT).exp()
    would_be = kernel / kernel.mean(-1, keepdim=True)
    centred = would_be - would_be.mean(0) - would_be.mean(1, keepdim=True) + would_be.mean()
    rows = [(name, ((m - m.mT).norm() / m.norm()).item()) for name, m in (("as it is", would_be), ("centred", centred))]
    return sweep(
        "k⁰(x, x')/∫k⁰(x, ·)dμ at the particles, which a gradient would make symmetric up to terms of one point",
        "‖S − Sᵀ‖/‖S‖ (Frobenius)",
        ("matrix", "asymmetry"),
        rows,
    )
