"""Sinkhorn's iterations for the limit: matrices (k, n, m), their scalings, and how far each is from its limit.

The kernel `exp(C − r − c)` is computed once, and again only when the scalings of a matrix have drifted far: they are
then absorbed into the shifts, so that scores of any size stay within the floating-point range.

Where tau is 1 the limit is known by its column sums. Where it is less it is the fixed point of the map `g ↦ F(g)` that
a row step and a column step make of the column potentials, and `F(g) − g = −τ·log(c/t e^(−λg))`, with column sums c,
targets t and λ = 1/τ − 1. In the spread of g, its largest entry less its smallest, F is a contraction by tau:
log-sum-exp is one by 1, and the column step multiplies by tau. So g is at most `spread(F(g) − g)/(1 − τ)` away from its
limit, and weights that are SoftMax over rows of `C + g` are off by tanh of a quarter of that at most. Constants cancel
in the weights, each connected component of the support having its own.
"""

import torch
from torch import Tensor

from sinkformers.core.kernel_domain import apply, exponentiate
from sinkformers.core.problem import Problem
from sinkformers.core.ranges import BLOCK

# Scalings are absorbed once max u · max v leaves [1/DRIFT, DRIFT].
DRIFT = 1e10


def tolerance_floor(dtype: torch.dtype, n: int, m: int) -> float:
    """What rounding leaves of a relative error of sums: √terms·eps for a block of terms, with a margin of 2."""
    return 2 * torch.finfo(dtype).eps * min(max(n, m), BLOCK) ** 0.5


def tolerance(tol: float, tau: Tensor | None, residual: Tensor, n: int, m: int) -> Tensor:
    """The tolerance of each matrix, in the shape of the residuals: no smaller than rounding lets them become."""
    floor = torch.full_like(residual, tolerance_floor(residual.dtype, n, m))
    if tau is not None:  # a spread is the difference of two entries
        tau = tau.to(residual).expand(residual.shape)
        floor = torch.where(tau == 1, floor, _weight_error(2 * floor, tau))
    return floor.clamp_min(tol)


def _weight_error(spread: Tensor, tau: Tensor) -> Tensor:
    """How far a weight can be from its limit, where the next column step changes the potentials by so much."""
    return torch.tanh(spread / (4 * (1 - tau)))


def _components(problem: Problem) -> Tensor:
    """A number (k, m) for each column, the same for those that are connected by entries of the support."""
    linked, m = problem.scores != -torch.inf, problem.cols.shape[-1]
    labels = torch.zeros_like(problem.cols, dtype=torch.int32)
    if linked.equal(problem.rows[..., None] & problem.cols[..., None, :]):
        return labels.long()
    labels += torch.arange(m, dtype=labels.dtype, device=labels.device)
    while True:  # the smallest number spreads along rows and columns, and then to all that hold one it has replaced
        rows = torch.where(linked, labels[..., None, :], m).amin(-1, keepdim=True)
        lower = torch.minimum(labels, torch.where(linked, rows, m).amin(-2))
        lower = lower.gather(-1, lower.long())
        if lower.equal(labels):
            return labels.long()
        labels = lower


def _kernel(problem: Problem, r: Tensor) -> tuple[Tensor, Tensor]:
    """Column maxima `c` (k, m) of the scores less `r`, and `exp(C − r − c)`: every column has an entry equal to 1."""
    c = (problem.scores - r[..., None]).amax(-2).masked_fill(~problem.cols, 0.0)
    return c, exponentiate(problem.scores - c[..., None, :], r)


class Iteration:
    """The matrices that have not converged: (k, n, m), with their place in the batch.

    What reads the kernel or sums over rows is a method of its own, so that these may be somewhere else.

    Args:
        bounds_weights: for tau < 1 the residual bounds the error of the weights, instead of that of the column sums.
    """

    shrinks = True  # whether matrices that have converged are left out of the batch

    def __init__(self, problem: Problem, tau: Tensor | None, *, bounds_weights: bool) -> None:
        self.place = torch.arange(problem.scores.shape[0], device=problem.scores.device)
        self.problem, self.tau = problem, tau
        self.r = torch.zeros_like(problem.scores[..., 0])
        self.c, self.kernel = _kernel(problem, self.r)
        self.g, self.v = torch.zeros_like(self.c), self.c.exp()
        self.before = self.components = None
        if tau is not None:
            self.before = problem.target * torch.exp(-self.c)  # the column sums that leave g = 0
            self.components = _components(problem) if bounds_weights else None
        self.row_step()

    def times(self, columns: Tensor) -> Tensor:
        """The product of the kernel with vectors (k, m)."""
        return apply(self.kernel, columns)

    def times_transposed(self, rows: Tensor) -> Tensor:
        """The product of the transposed kernel with vectors (k, n)."""
        return apply(self.kernel.mT, rows)

    def squares_transposed(self, rows: Tensor) -> Tensor:
        """The same with the squares of its entries."""
        return apply(self.kernel.square().mT, rows)

    def sum_over_rows(self, rows: Tensor) -> Tensor:
        return rows.sum(-1)

    def row_step(self) -> None:
        self.u = torch.where(self.problem.rows, 1 / self.times(self.v), 0.0)
        self.sum_columns()

    def sum_columns(self) -> None:
        self.s = self.times_transposed(self.weighted(self.u))

    def weighted(self, rows: Tensor) -> Tensor:
        return rows if self.problem.weight is None else rows * self.problem.weight

    def col_step(self) -> None:
        excess = torch.where(self.problem.cols, self.s.log() + self.c - self.problem.log_target(), 0.0)
        self.g = -excess if self.tau is None else -self.tau[:, None] * excess
        v = self.problem.target / self.s
        if self.tau is not None:  # the shift of a column cancels only where its sum is taken in full
            v = v.pow(self.tau[:, None]) * torch.exp((1 - self.tau[:, None]) * self.c)
            self.before = self.s
        self.v = torch.where(self.problem.cols, v, 0.0)

    def step(self, which: Tensor) -> None:
        """A column step and a row step, where `which` (k)."""
        old = self.g, self.u, self.v, self.s, self.before
        self.col_step()
        self.row_step()
        for name, before in zip(("g", "u", "v", "s", "before"), old, strict=True):
            if before is not None:
                setattr(self, name, torch.where(which[:, None], getattr(self, name), before))

    def moved(self, u: Tensor, v: Tensor, g: Tensor) -> None:
        """Take other scalings, whose rows sum to 1."""
        self.u, self.v, self.g = u, v, g
        self.sum_columns()
        if self.tau is not None:
            self.before = self.problem.target * torch.exp(-self.g / self.tau[:, None] - self.c)

    def sums(self) -> Tensor:
        """The column sums of the weights (k, m)."""
        return self.s * self.v

    def target(self) -> Tensor:
        """What the columns aim at (k, m): for tau < 1 that depends on their potentials."""
        if self.tau is None:
            return self.problem.target
        return self.problem.target * torch.exp((1 - 1 / self.tau[:, None]) * self.g)

    def residual(self) -> Tensor:
        """After a row step: how far the columns are from their targets, or the weights at most from their limit."""
        cols, target = self.problem.cols, self.problem.target
        ratio = self.sums() / target if self.before is None or self.tau is None else self.s / self.before
        marginal = (ratio - 1).abs().masked_fill(~cols, 0.0).amax(-1)
        if self.tau is None or self.components is None:
            return marginal
        change = torch.where(self.s == self.before, 0.0, self.tau[:, None] * ratio.log())
        high, low = (
            torch.full_like(change, empty).scatter_reduce_(
                -1, self.components, change.masked_fill(~cols, empty), reduce
            )
            for empty, reduce in ((-torch.inf, "amax"), (torch.inf, "amin"))
        )
        bound = _weight_error((high - low).amax(-1).clamp_min(0.0), self.tau)
        return torch.where((self.tau == 1) | marginal.isnan(), marginal, bound)

    def potentials(self) -> tuple[Tensor, Tensor]:
        """`f` (k, n) and `g` (k, m)."""
        return torch.where(self.problem.rows, self.u.log() - self.r, 0.0), self.g

    def weights(self) -> Tensor:
        return self.kernel * self.u[..., None] * self.v[..., None, :]

    def far(self) -> Tensor:
        """Which matrices have drifted (k)."""
        reach = self.u.amax(-1) * self.v.amax(-1)
        return ((reach > DRIFT) | (reach < 1 / DRIFT)) & self.problem.rows.any(-1)

    def absorb(self) -> None:
        """Compute the kernel again around the potentials reached, for the matrices that have drifted."""
        far = self.far()
        if far.any():
            f, g = self.potentials()
            self.start_at(far, f[far], g[far])

    def start_at(self, which: Tensor, f: Tensor, g: Tensor) -> None:
        """Compute the kernel again around potentials, for the matrices where `which` (k)."""
        part, rows = self.problem.select(which), self.problem.rows[which]
        r = torch.where(rows, -f, 0.0)
        c, kernel = _kernel(part, r)
        if self.before is not None:
            self.before[which] = (self.before[which].log() + self.c[which] - c).exp()
        self.r[which], self.c[which], self.kernel[which], self.g[which] = r, c, kernel, g
        self.u[which], self.v[which] = rows.to(r.dtype), torch.where(part.cols, (g + c).exp(), 0.0)
        weight = 1.0 if part.weight is None else part.weight
        self.s[which] = apply(kernel.mT, self.u[which] * weight)

    def keep(self, which: Tensor) -> None:
        self.problem = self.problem.select(which)
        for name in ("place", "tau", "r", "c", "kernel", "g", "u", "v", "s", "before", "components"):
            value = getattr(self, name)
            setattr(self, name, value if value is None else value[which])
