"""`watch_attention`: statistics of a converted model's attention, by layer and head."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sinkformers.attention.masks import Masks, combine
from sinkformers.conversion.adapter import Place
from sinkformers.conversion.attend import WATCHER
from sinkformers.conversion.curves import Curve, Curves, curves_figure, curves_svg
from sinkformers.conversion.survey import Select, select_converted
from sinkformers.conversion.tables import html_table, text_table
from sinkformers.core import marginal_error
from sinkformers.core.causal import expected_share
from sinkformers.core.limit import HasEvidence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADER = ("module", "largest column sum", "smallest column sum", "mean row entropy", "row error", "column error")
SEARCH = ("residual", "products")  # the largest, where a module has n_iters=math.inf


@dataclass(repr=False)
class Call:
    """The weights (batch, heads, n, m) of one call of an attention module, before dropout, reduced to vectors."""

    column_sums: Tensor  # (batch, heads, m): zero at masked keys; of causal modules, relative to uniform attention
    row_entropy: Tensor  # (batch, heads, n), in nats
    row_error: Tensor  # (batch, heads): largest distance of a row sum from 1
    column_error: Tensor  # (batch, heads): largest distance of a column sum from (valid rows) / (valid columns), or 1
    rows: Tensor  # (batch, heads, n), boolean: the valid queries
    columns: Tensor  # (batch, heads, m), boolean: the valid keys
    weights: Tensor | None = None  # (batch, heads, n, m) with `keep_weights`
    residual: Tensor | None = None  # (batch, heads), for `n_iters=math.inf`: where the search for the limit ended
    products: Tensor | None = None  # (batch, heads), for `n_iters=math.inf`: with exp(scores) or its transpose
    scores: Tensor | None = None  # (batch, heads, n, m) with `keep_scores`: minus infinity where masked

    def __repr__(self) -> str:
        shape = (*self.rows.shape, self.columns.shape[-1])
        largest, smallest, entropy, row_error, column_error = _statistics([self])
        residual, products = _search([self])
        return (
            f"Call(weights {shape}: column sums {smallest} to {largest}, mean row entropy {entropy}, "
            f"row error {row_error}, column error {column_error}"
            + (f", residual {residual} after {products} products)" if residual else ")")
        )


# What is drawn of each call.
CURVES: tuple[tuple[str, Callable[[Call], float]], ...] = (
    ("largest column sum", lambda call: float(call.column_sums[call.columns].max())),
    ("smallest column sum", lambda call: float(call.column_sums[call.columns].min())),
    ("row error", lambda call: float(call.row_error.max())),
    ("column error", lambda call: float(call.column_error.max())),
)


@dataclass(repr=False)
class WatchedModule:
    """The calls of one module while it is watched, in order."""

    keep_weights: bool = False
    keep_scores: bool = False
    calls: list[Call] = field(default_factory=list)

    def record(
        self,
        weights: Tensor,
        attn_mask: Tensor | None,
        queries: Tensor | None,
        keys: Tensor | None,
        evidence: HasEvidence | None = None,
        *,
        in_order: bool = False,
        scores: Tensor | None = None,
    ) -> None:
        """Append a call with these weights and masks; `evidence` says how the search for the limit ended.

        `scores` are minus infinity where masked. Where rows are normalised in order, column sums are relative to those
        of uniform attention under the masks.
        """
        weights = weights.float() if weights.dtype in (torch.float16, torch.bfloat16) else weights
        valid = _valid_entries(weights, attn_mask, queries, keys)
        row_error, column_error = marginal_error(weights, valid)
        column_sums = weights.sum(-2)
        if in_order:
            columns, target = valid.any(-2), expected_share(valid, weights.dtype)[..., -1, :]
            column_sums = torch.where(columns, column_sums / target, 0.0)
            column_error = torch.where(columns, (column_sums - 1).abs(), 0.0).amax(-1)
        self.calls.append(
            Call(
                column_sums,
                torch.special.entr(weights).sum(-1),
                row_error,
                column_error,
                valid.any(-1),
                valid.any(-2),
                weights if self.keep_weights else None,
                None if evidence is None else evidence.residual.detach(),
                None if evidence is None else evidence.products,
                scores if self.keep_scores else None,
            )
        )

    def __repr__(self) -> str:
        return f"WatchedModule(calls={self.calls})"


class Watch(dict[str, WatchedModule]):
    """The watched modules by name: `watch[name].calls`. Print it, or show it in a notebook, for a table."""

    def __missing__(self, name: object) -> WatchedModule:
        names = ", ".join(map(repr, self))
        raise KeyError(f"watch_attention: no watched module is called {name!r}; there are {names}")

    def __repr__(self) -> str:
        return text_table(*self._table())

    def _repr_html_(self) -> str:
        return html_table("attention over all calls and heads", *self._table()) + curves_svg(self._curves())

    def plot(self) -> "Figure":
        """Return a matplotlib figure of column sums and marginal errors over the calls, one line per module.

        Watched while a model trains, the calls are the steps of training.

        Examples:
            >>> import torch, sinkformers
            >>> layer = sinkformers.to_sinkformer(torch.nn.MultiheadAttention(16, 4, batch_first=True), n_iters=3)
            >>> with sinkformers.watch_attention(layer) as watch:
            ...     for _ in range(5):
            ...         x = torch.randn(2, 9, 16)
            ...         out, _ = layer(x, x, x)
            >>> figure = watch.plot()
        """
        return curves_figure(self._curves())

    def _curves(self) -> list[Curves]:
        """Return what is drawn; every number is over the batch and the heads of one call."""
        found: dict[str, list[Curve]] = {title: [] for title, _ in CURVES}
        for name, module in self.items():
            for title, number in CURVES:
                values = [number(call) if call.columns.any() else math.nan for call in module.calls]
                found[title].append(Curve(name or "(the model itself)", values))
        return [Curves(title, curves, logarithmic="error" in title) for title, curves in found.items()]

    def _table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        header, rows = HEADER, []
        if any(call.residual is not None for module in self.values() for call in module.calls):
            header = HEADER + SEARCH
        for name, module in self.items():
            statistics = _statistics(module.calls) if module.calls else ["not called"] + [""] * 4
            row = (name or "(the model itself)", *statistics, *_search(module.calls))
            rows.append(row[: len(header)])
        return header, rows


@contextmanager
def watch_attention(
    model: nn.Module, *, select: Select = None, keep_weights: bool = False, keep_scores: bool = False
) -> Iterator[Watch]:
    """Watch the converted modules of a model inside a `with` block: column sums, row entropies and marginal errors.

    Every call computes its weights a second time, without a gradient; outputs do not change. To watch a plain
    Transformer, convert it with `n_iters=1`. With `keep_weights` the weights are kept too, n × m numbers per head, and
    with `keep_scores` the scores that they are computed from.

    Yields:
        A dictionary by module name. `watch[name].calls` is a list with one entry per call, which has `column_sums`
        (batch, heads, m), `row_entropy` (batch, heads, n), `row_error` and `column_error` (batch, heads), boolean
        `rows` (batch, heads, n) and `columns` (batch, heads, m), True at valid queries and keys, and `weights`
        and `scores` (batch, heads, n, m) or None; scores are minus infinity where masked. For `n_iters=math.inf` it
        has `residual` and `products` (batch, heads) too, which say where the search for the limit ended and what it
        took; otherwise they are None.

        `watch.plot()` draws column sums and marginal errors by layer over the calls, as a matplotlib figure; notebooks
        show the same below the table, without matplotlib.

        Where rows are normalised in order, as in causal attention, `column_sums` are divided by those of uniform
        attention under the same mask, over the queries of the call, and `column_error` is their largest distance from
        1. A call that continues a cache counts its own queries only.

    Examples:
        >>> import torch, sinkformers
        >>> layer = sinkformers.to_sinkformer(torch.nn.MultiheadAttention(16, 4, batch_first=True), n_iters=21)
        >>> x = torch.randn(2, 9, 16)
        >>> with sinkformers.watch_attention(layer) as watch:
        ...     out, _ = layer(x, x, x)
        >>> watch[""].calls[0].column_sums.shape
        torch.Size([2, 4, 9])
    """
    places = select_converted("watch_attention", model, select)
    watch = Watch({place.name: WatchedModule(keep_weights, keep_scores) for place in places})
    with watched_by(places, watch):
        yield watch


@contextmanager
def watched_by(places: Sequence[Place], watchers: Mapping[str, WatchedModule]) -> Iterator[None]:
    """Have converted modules report their calls to `watchers`, by name, inside a `with` block."""
    for place in places:
        place.module.__dict__[WATCHER] = watchers[place.name]
    try:
        yield
    finally:
        for place in places:
            place.module.__dict__.pop(WATCHER, None)


def _statistics(calls: list[Call]) -> list[str]:
    """Return the statistics of `HEADER` over all calls and heads, as texts."""
    sums = torch.cat([call.column_sums[call.columns] for call in calls])
    entropy = torch.cat([call.row_entropy[call.rows] for call in calls])
    if not sums.numel():
        return ["all masked"] + [""] * 4
    errors = (max(getattr(call, side).max().item() for call in calls) for side in ("row_error", "column_error"))
    return [f"{sums.max():.3g}", f"{sums.min():.3g}", f"{entropy.mean():.3g}", *(f"{error:.1e}" for error in errors)]


def _search(calls: list[Call]) -> list[str]:
    """Return the largest residual and the most products of all calls and heads, as texts; empty without any."""
    residuals = [call.residual.max() for call in calls if call.residual is not None and call.residual.numel()]
    products = [call.products.max() for call in calls if call.products is not None and call.products.numel()]
    if not residuals:
        return ["", ""]
    return [f"{torch.stack(residuals).max():.1e}", str(int(torch.stack(products).max()))]


def _valid_entries(weights: Tensor, attn_mask: Tensor | None, queries: Tensor | None, keys: Tensor | None) -> Tensor:
    """Return which entries of the weights are valid, (batch, heads, n, m)."""
    is_bias = attn_mask is not None and attn_mask.is_floating_point()
    queries, keys = (
        side[:, None] if side is not None and side.dim() == 2 and weights.dim() == 4 else side
        for side in (queries, keys)
    )
    masks = Masks(attn_mask if is_bias else None, None if is_bias else attn_mask, queries, keys)
    entries = combine(masks).entries
    return (
        weights.new_ones((), dtype=torch.bool).expand(weights.shape)
        if entries is None
        else entries.expand(weights.shape)
    )
