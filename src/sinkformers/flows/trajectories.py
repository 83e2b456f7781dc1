"""Particles that move by attention: the residual network, and its limit of infinite depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from sinkformers.flows.integrators import DORMAND_PRINCE, Tableau, integrate
from sinkformers.flows.maps import AttentionMap
from sinkformers.flows.measure import Measure


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A measure at each of `times`: states (len(times), n, d), with constant weights (n,)."""

    times: tuple[float, ...]
    states: Tensor
    weights: Tensor
    energies: tuple[float, ...]
    """The energies at each of `times`; empty if no `energy` was given."""
    accepted: int
    rejected: int
    evaluations: int
    residual: float
    """The largest residual of Sinkhorn's limit on the path; 0 for a fixed number of iterations."""
    converged: bool

    def __len__(self) -> int:
        return len(self.times)

    def __getitem__(self, index: int) -> Measure:
        return Measure(self.states[index], self.weights)


def flow(
    attention: AttentionMap,
    measure: Measure,
    times: Sequence[float],
    *,
    method: Tableau = DORMAND_PRINCE,
    h: float | None = None,
    rtol: float = 1e-6,
    atol: float = 1e-6,
    energy: Callable[[Measure], Tensor] | None = None,
    progress: Callable[[float], None] | None = None,
) -> Trajectory:
    """Integrate `ẋ_i = T_μ(x_i)`, where μ is the measure of the particles themselves.

    `method=EULER, h=1` is a stack of tied attention layers with skip connections; `method`, `h`, tolerances and
    `progress` are those of `integrate`. `energy` is evaluated at each of `times`.

    Examples:
        >>> import torch
        >>> from sinkformers.flows import AttentionMap, Measure, Projections, flow
        >>> start = Measure.uniform(torch.randn(7, 2, dtype=torch.float64))
        >>> path = flow(AttentionMap(Projections.tied(torch.eye(2, dtype=torch.float64))), start, (0.0, 1.0))
        >>> bool(path[1].covariance().trace() < start.covariance().trace()), path.converged
        (True, True)
    """
    worst, converged = 0.0, True

    def velocity(points: Tensor) -> Tensor:
        nonlocal worst, converged
        field = attention(measure.moved(points))
        worst, converged = max(worst, field.evidence.residual), converged and field.evidence.converged
        return field(points)

    path = integrate(velocity, measure.points, times, method=method, h=h, rtol=rtol, atol=atol, progress=progress)
    energies = () if energy is None else tuple(float(energy(measure.moved(state))) for state in path.states)
    return Trajectory(
        path.times,
        path.states,
        measure.weights,
        energies,
        path.accepted,
        path.rejected,
        path.evaluations,
        worst,
        converged,
    )
