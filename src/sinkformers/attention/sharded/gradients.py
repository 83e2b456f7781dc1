"""The exact gradient of the steps of a sharded call: one reduction for every column step.

The steps are walked back from the last one (docs/core.md). A row step `weights_l` with the adjoint x of its potentials
subtracts `weights_l ∘ x` from the gradient of the scores, a column step `shares_l ∘ y`. The adjoints of column
potentials are sums over all queries, hence over the ranks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sinkformers.attention.masks import zero_masked
from sinkformers.attention.sharded.shards import Shard, Totals
from sinkformers.attention.sharded.steps import Steps, column_factor
from sinkformers.attention.sharded.tiles import (
    Tiles,
    add_part,
    by_kv_head,
    sum_rows,
    times_keys,
    weigh,
)


class Gradients(NamedTuple):
    """Of this rank's tokens and bias; that of tau (lead) is this rank's contribution."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    tau: Tensor | None


class Adjoints(NamedTuple):
    """Of the potentials, step by step: what a step subtracts from the gradient of the scores."""

    rows: list[Tensor]  # (..., n) each
    cols: list[Tensor]  # (..., m) each, times tau


class Backward:
    """The gradient of a call from that of its output.

    Args:
        out, d_out: (..., n, e) of this rank, in the working dtype.
    """

    def __init__(self, tiles: Tiles, steps: Steps, tau: Tensor | None, out: Tensor, d_out: Tensor) -> None:
        self.tiles, self.steps, self.tau = tiles, steps, tau
        self.out, self.d_out = (zero_masked(x, tiles.valid.rows) for x in (out, d_out))
        self.factor = None if steps.ends_on_rows() else column_factor(tiles, steps.cols[-1], tau)
        self.d_tau = None if tau is None else torch.zeros_like(tau)

    def run(self, *, needs_bias: bool) -> Gradients:
        d_value, dg = self._through_values()
        adjoints = self._walk_back(dg)
        d_query, d_key, d_bias = self._through_scores(adjoints, needs_bias=needs_bias)
        return Gradients(d_query, d_key, d_value, d_bias, self.d_tau)

    def weights(self, scores: Tensor, rows: slice, shard: Shard) -> Tensor:
        """The last weights, before dropout."""
        steps = self.steps
        if self.factor is None:
            return self.tiles.normalised(scores, steps.rows[-1], rows, shard)
        shares = self.tiles.shares(scores, steps.rows[-1], steps.cols[-1], rows, shard)
        return shares.mul_(self.factor[..., None, shard.columns])

    def _through_values(self) -> tuple[Tensor, Tensor]:
        """The gradient of the values, and the adjoint (..., m) of the last column potentials from this rank's rows."""
        tiles = self.tiles
        totals = Totals(tiles.value, tiles.value.shape[-1], tiles.dtype, "gradients of values")
        dg, shared = tiles.vector(tiles.call.m, 0.0), tiles.value.shape[:-2] != tiles.call.lead
        df = self._row_adjoint() if self.factor is None else None
        for shard in tiles.keys.passes(values=True, totals=totals):
            value = shard.value.to(tiles.dtype)
            for rows in tiles.blocks(shard):
                weights = self.weights(tiles.scores(rows, shard), rows, shard)
                dropout, d_out = tiles.dropout(rows, shard), self.d_out[..., rows, :]
                dropped = weights if dropout is None else weights * dropout
                part = sum_rows(dropped, d_out, value)
                totals.current += part
                if shared:  # heads that share values have adjoints of their own
                    dg[..., shard.columns] += times_keys(d_out, value).mul_(dropped).sum(-2)
                else:
                    dg[..., shard.columns] += (value * part).sum(-1)
                if df is not None:
                    dg[..., shard.columns] -= weights.mul_(df[..., rows, None]).sum(-2)
        own = by_kv_head(tiles.valid.own_cols(tiles.call), tiles.value, tiles.call.lead)
        return zero_masked(totals.own, own), dg

    def _row_adjoint(self) -> Tensor:
        return (self.d_out * self.out).sum(-1)

    def _walk_back(self, dg: Tensor) -> Adjoints:
        """The adjoints of all steps, from that of the last column potentials."""
        found, df = Adjoints([], []), self._row_adjoint()
        if self.factor is None:
            found.rows.append(df)
            df = torch.zeros_like(df)
        for number in reversed(range(len(self.steps.cols))):
            col = self.steps.cols[number]
            if self.d_tau is not None:
                self.d_tau -= (dg * col.excess).sum(-1)
            dg = self.tiles.call.ranks.add_(dg, "adjoints of columns")
            y = dg if self.tau is None else dg * self.tau[..., None]
            x, dg = self._through_pair(number, df, y)
            found.rows.append(x)
            found.cols.append(y)
            df = torch.zeros_like(df)
        return Adjoints(found.rows[::-1], found.cols[::-1])

    def _through_pair(self, number: int, df: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Back through a column step and the row step before it: the adjoint of its rows, and this rank's of columns.

        Nothing leads further back from the first row step, whose column potentials are zero.
        """
        tiles, row, col = self.tiles, self.steps.rows[number], self.steps.cols[number]
        x, dg, goes_on = df, tiles.vector(tiles.call.m, 0.0), number > 0
        for shard in tiles.keys.passes(values=False):
            for rows in tiles.blocks(shard):
                scores = tiles.scores(rows, shard)
                weights = tiles.normalised(scores, row, rows, shard)
                if col.is_direct:
                    shares = weights / col.total[..., None, shard.columns]
                else:
                    shares = tiles.shares(scores, row, col, rows, shard)
                x[..., rows] -= shares.mul_(y[..., None, shard.columns]).sum(-1)
                if goes_on and tiles.keys.is_single:
                    dg[..., shard.columns] -= weights.mul_(x[..., rows, None]).sum(-2)
        if goes_on and not tiles.keys.is_single:
            for shard in tiles.keys.passes(values=False):
                for rows in tiles.blocks(shard):
                    weights = tiles.normalised(tiles.scores(rows, shard), row, rows, shard)
                    dg[..., shard.columns] -= weights.mul_(x[..., rows, None]).sum(-2)
        return x, dg

    def _through_scores(self, adjoints: Adjoints, *, needs_bias: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        tiles, call, bias = self.tiles, self.tiles.call, self.tiles.call.masks.bias
        totals = Totals(tiles.key, tiles.key.shape[-1], tiles.dtype, "gradients of keys")
        d_query = torch.zeros_like(tiles.query)
        d_bias = None
        if needs_bias and bias is not None:
            d_bias = bias.new_zeros(bias.shape, dtype=tiles.dtype)
        for shard in tiles.keys.passes(values=True, totals=totals):
            key = shard.key.to(tiles.dtype)
            for rows in tiles.blocks(shard):
                grad = self._scores_gradient(adjoints, rows, shard)
                d_query[..., rows, :] += weigh(grad, key)
                part = sum_rows(grad, tiles.query[..., rows, :], key)
                if call.l2:
                    part -= call.scale * sum_rows(grad, torch.ones_like(tiles.query[..., rows, :1]), key) * key
                totals.current += part
                if d_bias is not None:
                    add_part(d_bias, rows, shard.columns, grad)
        own = by_kv_head(tiles.valid.own_cols(call), tiles.key, call.lead)
        return zero_masked(d_query.mul_(call.scale), tiles.valid.rows), zero_masked(totals.own, own), d_bias

    def _scores_gradient(self, adjoints: Adjoints, rows: slice, shard: Shard) -> Tensor:
        """The gradient of some scores: that of the weights, less what every step subtracts."""
        tiles, scores = self.tiles, self.tiles.scores(rows, shard)
        d_weights = times_keys(self.d_out[..., rows, :], shard.value.to(tiles.dtype))
        dropout = tiles.dropout(rows, shard)
        d_weights = d_weights if dropout is None else d_weights.mul_(dropout)
        grad = self.weights(scores, rows, shard).mul_(d_weights)
        for number, (row, x) in enumerate(zip(self.steps.rows, adjoints.rows, strict=True)):
            weights, subtracted = tiles.normalised(scores, row, rows, shard), x[..., rows, None]
            if number < len(self.steps.cols):
                col, y = self.steps.cols[number], adjoints.cols[number]
                if col.is_direct:
                    subtracted = subtracted + (y / col.total)[..., None, shard.columns]
                else:
                    grad -= tiles.shares(scores, row, col, rows, shard).mul_(y[..., None, shard.columns])
            grad -= weights.mul_(subtracted)
        masked = tiles.is_masked(rows, shard)
        # Last of all: NaN at a valid entry must not reach a masked one through its zero.
        return grad if masked is None else grad.masked_fill_(masked, 0.0)
