"""How far attention is from doubly stochastic: column sums over all layers, marginal errors per layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sinkformers import watch_attention

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
NEAR = 0.1


@torch.no_grad()
def observe(model: nn.Module, run: Callable[[], object]) -> dict[str, Any]:
    """Measure the attention of a model while `run` calls it on a sample.

    Column sums are divided by those of a doubly stochastic matrix, (rows)/(columns), so that 1 is the target for any
    shape. `gap` is the mean distance from 1, `within_0.1` the share of columns at most 0.1 away.
    """
    training = model.training
    model.eval()
    with watch_attention(model) as watch:
        run()
    model.train(training)
    layers, everything = [], []
    for name, layer in watch.items():
        if not layer.calls:
            continue
        sums = torch.cat([_even(seen.column_sums, seen.rows, seen.columns) for seen in layer.calls])
        errors = (
            max(float(getattr(seen, side).max()) for seen in layer.calls) for side in ("row_error", "column_error")
        )
        row_error, column_error = errors
        layers.append({"name": name, **_gap(sums), "row_error": row_error, "column_error": column_error})
        everything.append(sums)
    if not everything:
        return {"columns": {}, "layers": []}
    sums = torch.cat(everything)
    # torch.quantile refuses more than 2²⁴ numbers; ranks of the sorted sums need no limit.
    ranked = sums.sort().values
    quantiles = [float(ranked[round(q * (len(ranked) - 1))]) for q in QUANTILES]
    return {"columns": {**_gap(sums), "quantiles": quantiles}, "layers": layers}


def _even(sums: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the column sums (batch, heads, m) of valid columns, divided by those of a doubly stochastic matrix."""
    share = rows.sum(-1, keepdim=True) / columns.sum(-1, keepdim=True)
    return (sums / share)[columns].double()


def _gap(sums: Tensor) -> dict[str, float]:
    distance = (sums - 1).abs()
    return {"gap": float(distance.mean()), "within_0.1": float((distance <= NEAR).double().mean())}
