"""The limit of a sharded call: the solver of `core`, whose products with the kernel are passes over the keys.

Vectors over rows are those of this rank, and vectors over columns are the same on all ranks, as are the decisions.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sinkformers.attention.masks import zero_masked
from sinkformers.attention.sharded.gradients import Adjoints, Backward, Gradients
from sinkformers.attention.sharded.shards import Totals
from sinkformers.attention.sharded.steps import Steps, row_step
from sinkformers.attention.sharded.tiles import (
    ColStep,
    RowStep,
    Tiles,
    by_kv_head,
    exp_,
    sum_rows,
    times_keys,
)
from sinkformers.core import implicit
from sinkformers.core.kernel_domain import apply
from sinkformers.core.limit_iteration import DRIFT, Iteration, tolerance_floor
from sinkformers.core.limit_solver import Limit, solve
from sinkformers.core.problem import Problem


class Evidence(NamedTuple):
    """How each head converged, (...)."""

    residual: Tensor
    products: Tensor
    converged: Tensor


class ShardedIteration(Iteration):
    """Sinkhorn's iterations on this rank's rows, whose kernel `exp(C − r − c)` is computed when it is used."""

    shrinks = False

    def __init__(self, tiles: Tiles, tau: Tensor | None) -> None:
        self.tiles, self.tau = tiles, None if tau is None else tau.reshape(-1)
        self.place = torch.arange(tiles.call.lead.numel(), device=tiles.query.device)
        rows, cols = (self._valid(valid, size) for valid, size in _sides(tiles))
        target = tiles.valid.log_ratio.exp().expand(*tiles.call.lead, tiles.call.m)
        nothing = tiles.query.new_empty(len(self.place), 0, tiles.call.m)
        self.problem = Problem(nothing, rows, cols, None, self._flat(target))
        self.r, self.kernel, self.components = tiles.query.new_zeros(rows.shape), nothing, None
        self.c = self._column_maxima()
        self.g, self.v = torch.zeros_like(self.c), self.c.exp()
        self.before = None if tau is None else self.problem.target * torch.exp(-self.c)
        self.row_step()

    def times(self, columns: Tensor) -> Tensor:
        out, x = torch.zeros_like(self.r), self._by_head(columns)
        for rows, cols, kernel in self._kernels():
            self._by_head(out)[..., rows] += apply(kernel, x[..., cols])
        return out

    def times_transposed(self, rows: Tensor) -> Tensor:
        return self._sum_columns(rows, square=False)

    def squares_transposed(self, rows: Tensor) -> Tensor:
        return self._sum_columns(rows, square=True)

    def sum_over_rows(self, rows: Tensor) -> Tensor:
        return self.tiles.call.ranks.add_(rows.sum(-1), "a sum over rows")

    def weights(self) -> Tensor:
        return self.kernel

    def far(self) -> Tensor:
        top = self.u.amax(-1) if self.u.shape[-1] else self.r.new_zeros(len(self.place))
        reach = self.tiles.call.ranks.maximum_(top.contiguous(), "the largest scaling of rows") * self.v.amax(-1)
        return ((reach > DRIFT) | (reach < 1 / DRIFT)) & self.problem.cols.any(-1)

    def start_at(self, which: Tensor, f: Tensor, g: Tensor) -> None:
        rows, cols, old = self.problem.rows, self.problem.cols, self.c
        self.r[which] = torch.where(rows[which], -f, 0.0)
        self.c = torch.where(which[:, None], self._column_maxima(), old)
        if self.before is not None:
            moved = (self.before.log() + old - self.c).exp()
            self.before = torch.where(which[:, None], moved, self.before)
        self.g[which] = g
        self.u[which] = rows[which].to(self.r.dtype)
        self.v[which] = torch.where(cols[which], (g + self.c[which]).exp(), 0.0)
        self.sum_columns()

    def _kernels(self):
        """The kernel by tiles, with their rows and columns."""
        r, c = self._by_head(self.r), self._by_head(self.c)
        for shard in self.tiles.keys.passes(values=False):
            for rows in self.tiles.blocks(shard):
                scores = self.tiles.scores(rows, shard)
                yield rows, shard.columns, exp_(scores.sub_(r[..., rows, None]).sub_(c[..., None, shard.columns]))

    def _sum_columns(self, rows: Tensor, *, square: bool) -> Tensor:
        out, x = torch.zeros_like(self.problem.target), self._by_head(rows)
        for block, cols, kernel in self._kernels():
            kernel = kernel.square_() if square else kernel
            self._by_head(out)[..., cols] += apply(kernel.mT, x[..., block])
        return self.tiles.call.ranks.add_(out, "column sums")

    def _column_maxima(self) -> Tensor:
        """The largest scores less `r` of each column over all ranks; 0 in empty columns."""
        top, r = self.tiles.vector(self.tiles.call.m, -torch.inf), self._by_head(self.r)
        for shard in self.tiles.keys.passes(values=False):
            for rows in self.tiles.blocks(shard):
                x = self.tiles.scores(rows, shard).sub_(r[..., rows, None]).amax(-2)
                top[..., shard.columns] = torch.maximum(top[..., shard.columns], x)
        top = self._flat(self.tiles.call.ranks.maximum_(top, "column maxima"))
        return top.masked_fill(~self.problem.cols, 0.0)

    def _valid(self, valid: Tensor | None, size: int) -> Tensor:
        every = torch.ones((), dtype=torch.bool, device=self.tiles.query.device) if valid is None else valid
        return self._flat(every.expand(*self.tiles.call.lead, size))

    def _flat(self, vectors: Tensor) -> Tensor:
        return vectors.reshape(len(self.place), vectors.shape[-1]).contiguous()

    def _by_head(self, vectors: Tensor) -> Tensor:
        return vectors.view(*self.tiles.call.lead, vectors.shape[-1])


def _sides(tiles: Tiles) -> list[tuple[Tensor | None, int]]:
    return [(tiles.valid.rows, tiles.call.n), (tiles.valid.cols, tiles.call.m)]


def attend(tiles: Tiles, tau: Tensor | None, tol: float, max_products: int) -> tuple[Tensor, Steps, Evidence]:
    """The output at the limit, its last row step with a column step that says how far columns are off, and evidence."""
    call = tiles.call
    first, _, _ = row_step(tiles, tiles.vector(call.m, 0.0))
    tiles.shift = first.top
    run = ShardedIteration(tiles, tau)
    n = sum(call.queries_by_rank)
    goal = torch.full_like(run.residual(), max(tol, tolerance_floor(tiles.dtype, n, call.m)))
    found = solve(run, _empty(run), goal, max_products, newton=True)
    g = found.g.view(*call.lead, call.m)
    row, _, out = row_step(tiles, g, output=True)
    assert out is not None
    sums = run.tiles.vector(call.m, 0.0)
    for shard in tiles.keys.passes(values=False):
        for rows in tiles.blocks(shard):
            sums[..., shard.columns] += tiles.normalised(tiles.scores(rows, shard), row, rows, shard).sum(-2)
    sums = call.ranks.add_(sums, "column sums")
    excess = sums.log() - g - tiles.valid.log_ratio
    if tiles.valid.cols is not None:
        excess = excess.masked_fill(~tiles.valid.cols, 0.0)
    evidence = Evidence(*(part.view(call.lead) for part in (found.residual, found.products, found.converged)))
    steps = Steps([row], [ColStep(g, torch.ones_like(g), excess, True)])
    return zero_masked(out, tiles.valid.rows), steps, evidence


def _empty(run: ShardedIteration) -> Limit:
    residual = run.problem.target.new_zeros(len(run.place))
    count = torch.zeros_like(residual, dtype=torch.int64)
    f, g = torch.zeros_like(run.r), torch.zeros_like(run.g)
    return Limit(run.kernel.clone(), f, g, residual, count, count.clone(), count.bool())


class ImplicitBackward(Backward):
    """The gradient of the limit at the weights of the last row step (`core/implicit.py`).

    The steps are that row step, and one column step whose excess is that of the columns.
    """

    def __init__(
        self, tiles: Tiles, steps: Steps, tau: Tensor | None, out: Tensor, d_out: Tensor, tol: float = 0.0
    ) -> None:
        super().__init__(tiles, steps, tau, out, d_out)
        self.factor, self.tol = None, tol

    def run(self, *, needs_bias: bool) -> Gradients:
        ranks = self.tiles.call.ranks
        d_value, cols, own, col_side, col_size, row_size = self._sums()
        cols_here = cols.clone()
        both = ranks.add_(torch.stack([cols, own, col_side, col_size]), "sums over the weights")
        cols, own, col_side, col_size = both.unbind()
        row_side = self._row_adjoint()
        side, size = self._transposed(torch.stack([row_side, row_size])).unbind()
        z = implicit.solve(
            lambda x: self._transposed(self._times(x)[None])[0], own, cols, self.tau, col_side - side, col_size + size,
            self.tol,
        )  # fmt: skip
        y = z if self.tau is None else self.tau[..., None] * z
        x = row_side - self._times(y)
        if self.d_tau is not None:
            self.d_tau = -(z * cols_here * self.steps.cols[0].excess).sum(-1)
        d_query, d_key, d_bias = self._through_scores(Adjoints([x], [y]), needs_bias=needs_bias)
        return Gradients(d_query, d_key, d_value, d_bias, self.d_tau)

    def _tiles(self):
        for shard in self.tiles.keys.passes(values=False):
            for rows in self.tiles.blocks(shard):
                yield rows, shard.columns, self.weights(self.tiles.scores(rows, shard), rows, shard)

    def _times(self, columns: Tensor) -> Tensor:
        """The weights times vectors (..., m)."""
        out = self.tiles.vector(self.tiles.call.n, 0.0)
        for rows, cols, weights in self._tiles():
            out[..., rows] += apply(weights, columns[..., cols])
        return out

    def _transposed(self, vectors: Tensor) -> Tensor:
        """The transposed weights times some vectors (count, ..., n), summed over the ranks."""
        out = vectors.new_zeros(*vectors.shape[:-1], self.tiles.call.m)
        for rows, cols, weights in self._tiles():
            out[..., cols] += apply(weights.mT, vectors[..., rows])
        return self.tiles.call.ranks.add_(out, "sums over the weights")

    def _sums(self) -> tuple[Tensor, ...]:
        """The gradient of the values; and this rank's sums of the weights P, of P∘P, of the local gradient
        `P∘dP` and of its size over columns, and of its size over rows."""
        tiles = self.tiles
        totals = Totals(tiles.value, tiles.value.shape[-1], tiles.dtype, "gradients of values")
        cols, own, side, size = (tiles.vector(tiles.call.m, 0.0) for _ in range(4))
        row_size = tiles.vector(tiles.call.n, 0.0)
        for shard in tiles.keys.passes(values=True, totals=totals):
            value, at = shard.value.to(tiles.dtype), shard.columns
            for rows in tiles.blocks(shard):
                weights = self.weights(tiles.scores(rows, shard), rows, shard)
                dropout, d_out = tiles.dropout(rows, shard), self.d_out[..., rows, :]
                dropped = weights if dropout is None else weights * dropout
                totals.current += sum_rows(dropped, d_out, value)
                local = times_keys(d_out, value).mul_(dropped)
                cols[..., at] += weights.sum(-2)
                own[..., at] += weights.square().sum(-2)
                side[..., at] += local.sum(-2)
                size[..., at] += local.abs_().sum(-2)
                row_size[..., rows] += local.sum(-1)
        valid = by_kv_head(tiles.valid.own_cols(tiles.call), tiles.value, tiles.call.lead)
        return zero_masked(totals.own, valid), cols, own, side, size, row_size


def last_row_step(steps: Steps) -> Steps:
    """The last row step of a finite number, and the column step before it, as the implicit gradient reads them."""
    row, col = steps.rows[-1], steps.cols[-1]
    return Steps([RowStep(*row)], [ColStep(row.g, torch.ones_like(col.total), col.excess, True)])
