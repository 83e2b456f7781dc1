"""The limits of T̄^∞ and T̄¹ as ε → 0: the paper's Theorem 1 and Proposition 4, as derived here and as printed there.

Both limits have the form `D (∇ρ/ρ)(Bx)`:

| | D | B | the paper's D |
| --- | --- | --- | --- |
| Sinkhorn, T̄^∞ | ½ W_V (W_QᵀW_K)⁻¹ | 1 | W_V (W_QᵀW_K)⁻¹ |
| SoftMax, T̄¹, cost "l2" | W_V W_K⁻¹W_K⁻ᵀ | W_K⁻¹W_Q | W_V W_K⁻¹W_K⁻¹ |

docs/math derives them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sinkformers.flows import checks
from sinkformers.flows.projections import Projections

# The coefficient c of ∂_t ρ = c Δρ if W_V = −W_QᵀW_K.
HEAT_COEFFICIENT = 0.5
PAPER_HEAT_COEFFICIENT = 1.0


class ScoreVelocity(NamedTuple):
    """The velocity `D (∇ρ/ρ)(Bx)`: mobility D (d, d) and pull B (d, d)."""

    mobility: Tensor
    pull: Tensor

    def __call__(self, points: Tensor, score: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the velocity (n, d) at points (n, d); `score` returns ∇ρ/ρ (n, d) at points (n, d)."""
        return score(points @ self.pull.mT) @ self.mobility.mT


def sinkformer_limit(projections: Projections) -> ScoreVelocity:
    """Return the limit of T̄^∞: `½ W_V (W_QᵀW_K)⁻¹ ∇ρ/ρ`, for `W_QᵀW_K` symmetric positive definite.

    The paper states it without the ½ and for positive semi-definite matrices; its proof inverts the matrix.

    Examples:
        >>> import torch
        >>> from sinkformers.flows import Projections, sinkformer_limit
        >>> sinkformer_limit(Projections.tied(torch.eye(1))).mobility.item()
        -0.5
    """
    return _sinkformer("sinkformer_limit", projections, HEAT_COEFFICIENT)


def paper_sinkformer_limit(projections: Projections) -> ScoreVelocity:
    """Return the limit in Theorem 1 as printed: `W_V (W_QᵀW_K)⁻¹ ∇ρ/ρ`, twice the limit of T̄^∞."""
    return _sinkformer("paper_sinkformer_limit", projections, PAPER_HEAT_COEFFICIENT)


def transformer_limit(projections: Projections) -> ScoreVelocity:
    """Return the limit of T̄¹ with cost "l2": `W_V W_K⁻¹W_K⁻ᵀ (∇ρ/ρ)(W_K⁻¹W_Q x)`, if that point is in the support.

    With `W_V = −W_QᵀW_K` this is `−∇_x log ρ(W_K⁻¹W_Q x)`. The paper has `W_K⁻¹` for `W_K⁻ᵀ`.
    """
    _check_key("transformer_limit", projections)
    inverse = torch.linalg.inv(projections.key)
    return ScoreVelocity(projections.value @ inverse @ inverse.mT, inverse @ projections.query)


def paper_transformer_limit(projections: Projections) -> ScoreVelocity:
    """Return the limit in Proposition 4 as printed: `W_V W_K⁻¹W_K⁻¹ (∇ρ/ρ)(W_K⁻¹W_Q x)`; correct if W_K = W_Kᵀ."""
    _check_key("paper_transformer_limit", projections)
    inverse = torch.linalg.inv(projections.key)
    return ScoreVelocity(projections.value @ inverse @ inverse, inverse @ projections.query)


def first_order_limit(projections: Projections, *, softmax: bool) -> Tensor:
    """Return the matrix M (d, d) with `ε T(x) → Mx`.

    It is `W_V` for T^∞; for T¹ with cost "l2" it is `W_V W_K⁻¹W_Q`, which is −W_QᵀW_Q if `W_V = −W_QᵀW_K`.
    """
    if not softmax:
        return projections.value
    _check_key("first_order_limit", projections)
    return projections.value @ torch.linalg.solve(projections.key, projections.query)


def _sinkformer(caller: str, projections: Projections, constant: float) -> ScoreVelocity:
    interaction = projections.interaction
    checks.positive_definite(caller, "W_QᵀW_K", interaction)
    mobility = constant * projections.value @ torch.linalg.inv(interaction)
    return ScoreVelocity(mobility, torch.eye(projections.dim, dtype=interaction.dtype))


def _check_key(caller: str, projections: Projections) -> None:
    checks.invertible(caller, "W_K", projections.key)
