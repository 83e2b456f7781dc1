"""Reference solutions of the limits' equations on a grid, in one or two dimensions.

The method is finite volumes without flux through the boundary: what leaves a cell enters its neighbour. So mass is
conserved up to rounding, which is asserted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sinkformers.core import checks as core_checks
from sinkformers.flows.densities import Density, midpoints
from sinkformers.flows.integrators import BOGACKI_SHAMPINE, integrate
from sinkformers.flows.limits import ScoreVelocity

SMOOTHING = 4  # passes; their width is 1.4 cells


@dataclass(frozen=True)
class Grid:
    """`cells` equal cells along each of the `dim` axes of [−reach, reach]^dim; densities have shape (cells,) * dim."""

    reach: float
    cells: int
    dim: int = 1

    def __post_init__(self) -> None:
        core_checks.positive("Grid", "reach", self.reach)
        if self.dim not in (1, 2) or self.cells < 3:
            raise ValueError(f"Grid: dim must be 1 or 2 and cells ≥ 3; got dim {self.dim!r} and {self.cells!r} cells.")

    @property
    def width(self) -> float:
        return 2 * self.reach / self.cells

    def centres(self) -> Tensor:
        """(cells^dim, dim)"""
        return midpoints(self.cells, self.dim) * self.reach

    def faces(self, axis: int) -> Tensor:
        """Return the centres (n, dim) of the inner faces between cells along `axis`."""
        axes = [midpoints(self.cells, 1)[:, 0] * self.reach for _ in range(self.dim)]
        axes[axis] = axes[axis][:-1] + self.width / 2
        return torch.cartesian_prod(*axes).reshape(-1, self.dim)

    def density(self, density: Density) -> Tensor:
        """Return the values of a density at the centres of the cells, scaled to mass 1."""
        values = density.log(self.centres()).exp().reshape((self.cells,) * self.dim)
        return values / self.mass(values)

    def mass(self, values: Tensor) -> float:
        return values.sum().item() * self.width**self.dim


class DensityPath(NamedTuple):
    """Densities (len(times), cells, …) at each of `times`."""

    grid: Grid
    times: tuple[float, ...]
    densities: Tensor


def heat(grid: Grid, density: Tensor, times: Sequence[float], *, coefficient: float) -> DensityPath:
    """Solve `∂_t ρ = c Δρ`, to second order in space and exactly in time.

    The eigenvectors of the finite-volume Laplacian are cosines without flux through the boundary.

    Examples:
        >>> from sinkformers.flows import Bump, Grid, heat
        >>> grid = Grid(reach=4.0, cells=101)
        >>> path = heat(grid, grid.density(Bump()), (0.0, 1.0), coefficient=0.5)
        >>> round(grid.mass(path.densities[1]), 12)
        1.0
    """
    _check_density(grid, density)
    core_checks.positive("heat", "coefficient", coefficient)
    n = grid.cells
    k = torch.arange(n, dtype=density.dtype)
    cosines = torch.cos(math.pi * k[:, None] * (k + 0.5) / n) * math.sqrt(2 / n)
    cosines[0] /= math.sqrt(2)
    decay = -coefficient * (2 * torch.sin(math.pi * k / (2 * n)) / grid.width) ** 2
    modes = _along_axes(density, cosines)
    rate = decay if grid.dim == 1 else decay[:, None] + decay
    densities = [_along_axes(modes * torch.exp(rate * (t - times[0])), cosines.mT) for t in times]
    return _checked_path(grid, times, torch.stack(densities))


def score_flow(
    grid: Grid, density: Tensor, times: Sequence[float], *, velocity: ScoreVelocity, rtol: float = 1e-6
) -> DensityPath:
    """Solve `∂_t ρ + div(ρ D (∇ρ/ρ)(B·)) = 0`, the equation of Theorem 1 for any W_V, and of Proposition 4.

    Second order in space for smooth densities; in time Bogacki and Shampine's pair, whose step control keeps it stable.
    If Bx is outside the grid, the score of the nearest inner face is used. The density must be positive on all cells,
    since the score is undefined elsewhere.

    If B is not 1 the equation damps no wave: one of frequency ξ acts on that of frequency Bᵀξ. Oscillations from cell
    to cell would grow, so slopes are smoothed over a few cells. On fine grids, oscillations still grow over long times.
    """
    _check_density(grid, density)
    if not (density > 0).all():
        raise ValueError(
            f"score_flow: density must be positive, since its score is ∇ρ/ρ; its smallest value is "
            f"{density.min().item():.3g}. Choose a grid within its support."
        )
    faces = [grid.faces(axis) @ velocity.pull.mT for axis in range(grid.dim)]
    passes = 0 if torch.equal(velocity.pull, torch.eye(grid.dim, dtype=velocity.pull.dtype)) else SMOOTHING

    def rates(values: Tensor) -> Tensor:
        logs = values.clamp_min(torch.finfo(values.dtype).tiny).log()
        slopes = [logs.diff(dim=axis) / grid.width for axis in range(grid.dim)]  # each at the faces of its axis
        slopes = [_smoothed(slope, passes) for slope in slopes]
        change = torch.zeros_like(values)
        for axis, at in enumerate(faces):
            score = torch.stack([_interpolate(grid, slope, which, at) for which, slope in enumerate(slopes)], dim=-1)
            before, after = values.narrow(axis, 0, grid.cells - 1), values.narrow(axis, 1, grid.cells - 1)
            flux = (score @ velocity.mobility[axis]).reshape(before.shape) * (before + after) / 2
            change.narrow(axis, 0, grid.cells - 1).sub_(flux / grid.width)
            change.narrow(axis, 1, grid.cells - 1).add_(flux / grid.width)
        return change

    atol = rtol * density.max().item()
    path = integrate(rates, density, times, method=BOGACKI_SHAMPINE, rtol=rtol, atol=atol)
    return _checked_path(grid, times, path.states)


def _along_axes(values: Tensor, matrix: Tensor) -> Tensor:
    for axis in range(values.dim()):
        values = (matrix @ values.movedim(axis, 0)).movedim(0, axis)
    return values


def _smoothed(values: Tensor, passes: int) -> Tensor:
    """Average each value with its neighbours, ¼ ½ ¼, along every axis; linear functions do not change."""
    for axis in [*range(values.dim())] * passes:
        first, last = values.narrow(axis, 0, 2), values.narrow(axis, values.shape[axis] - 2, 2)
        before, after = first.narrow(axis, 0, 1) - first.diff(dim=axis), last.narrow(axis, 1, 1) + last.diff(dim=axis)
        wide = torch.cat([before, values, after], dim=axis)
        pairs = wide.narrow(axis, 1, wide.shape[axis] - 1) + wide.narrow(axis, 0, wide.shape[axis] - 1)
        values = (pairs.narrow(axis, 1, pairs.shape[axis] - 1) + pairs.narrow(axis, 0, pairs.shape[axis] - 1)) / 4
    return values


def _interpolate(grid: Grid, values: Tensor, axis: int, points: Tensor) -> Tensor:
    """Interpolate multilinearly at points (n, dim) from values at the faces of `axis` and the centres of the other."""
    first = torch.full((grid.dim,), 0.5, dtype=points.dtype)
    first[axis] = 1.0
    last = torch.tensor(values.shape) - 1
    place = torch.minimum(((points + grid.reach) / grid.width - first).clamp_min(0), last.to(points.dtype))
    low = torch.minimum(place.floor().long(), last - 1)
    part = place - low
    result = values.new_zeros(len(points))
    for corner in range(2**grid.dim):
        bits = torch.tensor([corner >> axis & 1 for axis in range(grid.dim)])
        share = torch.where(bits.bool(), part, 1 - part).prod(-1)
        result += share * values[tuple((low + bits).unbind(-1))]
    return result


def _check_density(grid: Grid, density: Tensor) -> None:
    if density.shape != (grid.cells,) * grid.dim:
        raise ValueError(f"density must have the grid's shape {(grid.cells,) * grid.dim}; got {tuple(density.shape)}.")
    if not abs(grid.mass(density) - 1) <= 1e-6:
        raise ValueError(f"density must have mass 1 on its grid; got {grid.mass(density):.6g}. Grid.density makes one.")


def _checked_path(grid: Grid, times: Sequence[float], densities: Tensor) -> DensityPath:
    """Return the path, after asserting that mass is conserved."""
    lost = (densities.flatten(1).sum(1) - densities[0].sum()).abs().max().item() * grid.width**grid.dim
    assert lost <= 1e-9, f"finite volumes lost mass {lost:.3g}"
    return DensityPath(grid, tuple(float(t) for t in times), densities)
