"""The normalisations of a sharded call: row steps are local, and a column step sums over all ranks.

Each of them is a pass over the keys. Where all keys are at hand, a row step sums the columns in the same pass.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sinkformers.attention.masks import zero_masked
from sinkformers.attention.sharded.tiles import ColStep, RowStep, Tiles, exp_, weigh

# Column sums of weights that are smaller may have lost what was rounded to zero.
SMALLEST_SUM = {torch.float32: 1e-20, torch.float64: 1e-200}


class Steps(NamedTuple):
    """All normalisations of a call."""

    rows: list[RowStep]
    cols: list[ColStep]

    def ends_on_rows(self) -> bool:
        return len(self.rows) > len(self.cols)


def attend(tiles: Tiles, tau: Tensor | None) -> tuple[Tensor, Steps]:
    """The output (..., n, e) of this rank's queries, and the steps that led to it."""
    steps = Steps([], [])
    definition, g = tiles.call.definition(), tiles.vector(tiles.call.m, 0.0)
    sums = out = None
    for step in definition.steps():
        if not step.rows:
            assert sums is not None
            steps.cols.append(_column_step(tiles, steps.rows[-1], sums))
            g = potential(steps.cols[-1].excess, tau)
            continue
        is_last = step.number == definition.col_steps()
        row, sums, out = row_step(tiles, g, output=is_last, sums=not is_last)
        if step.is_first():
            tiles.shift, row = row.top, row._replace(top=torch.zeros_like(row.top))
        steps.rows.append(row)
    if out is None:
        out = _output_after_columns(tiles, steps, tau)
    return zero_masked(out, tiles.valid.rows), steps


def potential(excess: Tensor, tau: Tensor | None) -> Tensor:
    """The column potentials after a column step."""
    return -excess if tau is None else -tau[..., None] * excess


def row_step(
    tiles: Tiles, g: Tensor, *, output: bool = False, sums: bool = False
) -> tuple[RowStep, Tensor | None, Tensor | None]:
    """Normalise rows; return also this rank's column sums and the output, where they are asked for."""
    top, total = tiles.vector(tiles.call.n, -torch.inf), tiles.vector(tiles.call.n, 0.0)
    out = tiles.query.new_zeros(*top.shape, tiles.value.shape[-1]) if output else None
    col_sums = tiles.vector(tiles.call.m, 0.0) if sums else None
    for shard in tiles.keys.passes(values=output):
        for rows in tiles.blocks(shard):
            x = tiles.scores(rows, shard).add_(g[..., None, shard.columns])
            highest = torch.maximum(top[..., rows], x.amax(-1))
            safe = highest.masked_fill(highest == -torch.inf, 0.0)
            weights, rescale = exp_(x.sub_(safe[..., None])), (top[..., rows] - safe).exp()
            total[..., rows] = total[..., rows] * rescale + weights.sum(-1)
            top[..., rows] = highest
            if out is not None:
                dropout = tiles.dropout(rows, shard)
                weights = weights if dropout is None else weights.mul_(dropout)
                more = weigh(weights, shard.value.to(weights.dtype))
                out[..., rows, :] = out[..., rows, :] * rescale[..., None] + more
            if col_sums is not None and tiles.keys.is_single:
                col_sums[..., shard.columns] += weights.div_(_or_one(total[..., rows])[..., None]).sum(-2)
    total = _or_one(total)
    row = RowStep(g, top.masked_fill(top == -torch.inf, 0.0), total)
    if col_sums is not None and not tiles.keys.is_single:
        # The first maxima become the shift of the scores only after this pass.
        _sum_columns(tiles, row, g, col_sums)
    return row, col_sums, None if out is None else out.div_(total[..., None])


def _sum_columns(tiles: Tiles, row: RowStep, lift: Tensor, sums: Tensor) -> Tensor:
    lifted = row._replace(g=lift)
    for shard in tiles.keys.passes(values=False):
        for rows in tiles.blocks(shard):
            weights = tiles.normalised(tiles.scores(rows, shard), lifted, rows, shard)
            sums[..., shard.columns] += weights.sum(-2)
    return sums


def _column_step(tiles: Tiles, row: RowStep, sums: Tensor) -> ColStep:
    """Sum the columns over all ranks.

    The sums of the rows' weights do where they are not too small. Otherwise the columns are summed again, relative to
    their maxima. All ranks see the same sums, and decide alike.
    """
    ranks, lift = tiles.call.ranks, row.g
    total = ranks.add_(sums, "column sums")
    low = ~(total > SMALLEST_SUM[total.dtype])  # true of NaN
    low = low if tiles.valid.cols is None else low & tiles.valid.cols
    is_direct = not bool(low.any())
    if not is_direct:
        lift = -ranks.maximum_(_column_maxima(tiles, row), "column maxima")
        lift = lift.masked_fill(lift == torch.inf, 0.0)
        total = ranks.add_(_sum_columns(tiles, row, lift, torch.zeros_like(total)), "column sums")
    excess = total.log() - lift - tiles.valid.log_ratio
    if tiles.valid.cols is not None:
        total, excess = (
            total.masked_fill(~tiles.valid.cols, 1.0),
            excess.masked_fill(~tiles.valid.cols, 0.0),
        )
    return ColStep(lift, total, excess, is_direct)


def _column_maxima(tiles: Tiles, row: RowStep) -> Tensor:
    """The maxima of `scores + f` over this rank's rows."""
    top, f = tiles.vector(tiles.call.m, -torch.inf), -(row.top + row.total.log())
    for shard in tiles.keys.passes(values=False):
        for rows in tiles.blocks(shard):
            x = tiles.scores(rows, shard).add_(f[..., rows, None])
            top[..., shard.columns] = torch.maximum(top[..., shard.columns], x.amax(-2))
    return top


def _output_after_columns(tiles: Tiles, steps: Steps, tau: Tensor | None) -> Tensor:
    """The output where columns were normalised last."""
    out = tiles.query.new_zeros(*tiles.call.lead, tiles.call.n, tiles.value.shape[-1])
    factor = column_factor(tiles, steps.cols[-1], tau)
    for shard in tiles.keys.passes(values=True):
        for rows in tiles.blocks(shard):
            weights = tiles.shares(tiles.scores(rows, shard), steps.rows[-1], steps.cols[-1], rows, shard)
            weights *= factor[..., None, shard.columns]
            dropout = tiles.dropout(rows, shard)
            weights = weights if dropout is None else weights.mul_(dropout)
            out[..., rows, :] += weigh(weights, shard.value.to(weights.dtype))
    return out


def column_factor(tiles: Tiles, col: ColStep, tau: Tensor | None) -> Tensor:
    """What the shares of a last column step are multiplied with to be weights (..., m)."""
    left = tiles.valid.log_ratio if tau is None else tiles.valid.log_ratio + (1 - tau[..., None]) * col.excess
    return left.expand(col.excess.shape).exp()


def _or_one(total: Tensor) -> Tensor:
    return total.masked_fill(total == 0, 1.0)
