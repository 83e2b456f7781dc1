"""Sinkhorn until the marginals hold, each matrix by itself.

The kernel `exp(C − r − c)` is computed once, and again only when the scalings of a matrix have drifted far: they are
then absorbed into the shifts, so that scores of any size stay within the floating-point range.

Where tau is 1 the limit is known by its column sums. Where it is less it is the fixed point of the map `g ↦ F(g)` that
a row step and a column step make of the column potentials. In the spread of g, its largest entry less its smallest, F
is a contraction by tau: log-sum-exp is one by 1, and the column step multiplies by tau. So g is at most
`spread(F(g) − g)/(1 − τ)` away from its limit, and weights that are SoftMax over rows of `C + g` are off by tanh of a
quarter of that at most. Constants cancel in the weights, each connected component of the support having its own.
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


class _Run:
    """The matrices that have not converged: (k, n, m), with their place in the batch."""

    def __init__(self, problem: Problem, tau: Tensor | None) -> None:
        self.place = torch.arange(problem.scores.shape[0], device=problem.scores.device)
        self.problem, self.tau = problem, tau
        self.r = torch.zeros_like(problem.scores[..., 0])
        self.c, self.kernel = _kernel(problem, self.r)
        self.g, self.v = torch.zeros_like(self.c), self.c.exp()
        self.before = self.components = None
        if tau is not None:
            self.before = problem.target * torch.exp(-self.c)  # the column sums that leave g = 0
            self.components = _components(problem)
        self.row_step()

    def row_step(self) -> None:
        self.u = torch.where(self.problem.rows, 1 / apply(self.kernel, self.v), 0.0)
        weight = self.problem.weight
        self.s = apply(self.kernel.mT, self.u if weight is None else self.u * weight)

    def col_step(self) -> None:
        excess = self.excess()
        self.g = -excess if self.tau is None else -self.tau[:, None] * excess
        v = self.problem.target / self.s
        if self.tau is not None:  # the shift of a column cancels only where its sum is taken in full
            v = v.pow(self.tau[:, None]) * torch.exp((1 - self.tau[:, None]) * self.c)
            self.before = self.s
        self.v = torch.where(self.problem.cols, v, 0.0)

    def residual(self) -> Tensor:
        """After a row step: how far the columns are from their targets, or the weights at most from their limit.

        The former where tau is 1.
        """
        error = (self.s * self.v / self.problem.target - 1).abs()
        marginal = error.masked_fill(~self.problem.cols, 0.0).amax(-1)
        if self.tau is None or self.before is None or self.components is None:
            return marginal
        change = torch.where(self.s == self.before, 0.0, self.tau[:, None] * (self.s / self.before).log())
        high, low = (
            torch.full_like(change, empty).scatter_reduce_(
                -1, self.components, change.masked_fill(~self.problem.cols, empty), reduce
            )
            for empty, reduce in ((-torch.inf, "amax"), (torch.inf, "amin"))
        )
        bound = _weight_error((high - low).amax(-1).clamp_min(0.0), self.tau)
        return torch.where((self.tau == 1) | marginal.isnan(), marginal, bound)

    def excess(self) -> Tensor:
        return torch.where(self.problem.cols, self.s.log() + self.c - self.problem.log_target(), 0.0)

    def weights(self) -> Tensor:
        return self.kernel * self.u[..., None] * self.v[..., None, :]

    def absorb(self) -> None:
        """Compute the kernel again around the potentials reached, for the matrices that have drifted."""
        reach = self.u.amax(-1) * self.v.amax(-1)
        far = ((reach > DRIFT) | (reach < 1 / DRIFT)) & self.problem.rows.any(-1)
        if not far.any():
            return
        part, rows = self.problem.select(far), self.problem.rows[far]
        r = torch.where(rows, self.r[far] - self.u[far].log(), 0.0)
        c, kernel = _kernel(part, r)
        if self.before is not None:
            self.before[far] = (self.before[far].log() + self.c[far] - c).exp()
        self.r[far], self.c[far], self.kernel[far] = r, c, kernel
        self.u[far], self.v[far] = rows.to(r.dtype), torch.where(part.cols, (self.g[far] + c).exp(), 0.0)
        weight = 1.0 if part.weight is None else part.weight
        self.s[far] = apply(self.kernel[far].mT, self.u[far] * weight)

    def keep(self, which: Tensor) -> None:
        self.problem = self.problem.select(which)
        for name in ("place", "tau", "r", "c", "kernel", "g", "u", "v", "s", "before", "components"):
            value = getattr(self, name)
            setattr(self, name, value if value is None else value[which])


def converge(problem: Problem, tau: Tensor | None, tol: Tensor, max_iters: int) -> tuple[Tensor, ...]:
    """Weights, column excess, residual, iterations and converged, for matrices (k, n, m)."""
    run = _Run(problem, tau)
    weights, excess = torch.empty_like(problem.scores), problem.target.new_empty(problem.target.shape)
    residual = problem.target.new_zeros(problem.scores.shape[0])
    iterations = torch.zeros_like(residual, dtype=torch.int64)
    done = torch.zeros_like(residual, dtype=torch.bool)
    for taken in range(1, max_iters + 1, 2):
        if taken > 1:
            run.col_step()
            run.row_step()
            run.absorb()
        now = run.residual()
        # NaN will not get better; stop there too.
        stops = ~(now > tol[run.place]) if taken + 2 <= max_iters else torch.ones_like(now, dtype=torch.bool)
        new = stops & ~done[run.place]
        if new.any():
            place = run.place[new]
            weights[place], excess[place], residual[place] = run.weights()[new], run.excess()[new], now[new]
            iterations[place], done[place] = taken, True
            going = ~done[run.place]
            if not going.any():
                break
            if going.sum() <= going.numel() / 2:  # copying the rest pays once half of the batch stands still
                run.keep(going)
    # Where potentials drifted far the kernel was computed around rounded ones; rows sum to 1 all the same.
    weights /= weights.sum(-1, keepdim=True).masked_fill_(~problem.rows[..., None], 1.0)
    weights.masked_fill_(problem.scores == -torch.inf, 0.0)
    return weights, excess, residual, iterations, residual <= tol
