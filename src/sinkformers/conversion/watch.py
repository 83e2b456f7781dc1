"""`watch_attention`: what a converted model's attention does, layer by layer and head by head."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sinkformers.attention.masks import Masks, combine
from sinkformers.conversion.attend import WATCHER
from sinkformers.conversion.survey import Select, converted
from sinkformers.core import marginal_error


@dataclass
class Seen:
    """One call of one attention module: weights (batch, heads, n, m) before dropout, reduced to vectors."""

    column_sums: Tensor  # (batch, heads, m): what each key collects; zero where it does not take part
    row_entropy: Tensor  # (batch, heads, n), in nats
    row_error: Tensor  # (batch, heads): largest distance of a row sum from 1
    column_error: Tensor  # (batch, heads): largest distance of a column sum from (rows)/(columns)
    rows: Tensor  # (batch, heads, n) boolean: which queries take part
    columns: Tensor  # (batch, heads, m)
    weights: Tensor | None = None  # (batch, heads, n, m), where they are kept


@dataclass
class Layer:
    """The calls of one module, in order. It is what the module tells while it is watched."""

    keep_weights: bool = False
    calls: list[Seen] = field(default_factory=list)

    def see(self, weights: Tensor, attn_mask: Tensor | None, queries: Tensor | None, keys: Tensor | None) -> None:
        weights = weights.float() if weights.dtype in (torch.float16, torch.bfloat16) else weights
        part = _taking_part(weights, attn_mask, queries, keys)
        row_error, column_error = marginal_error(weights, part)
        self.calls.append(
            Seen(
                weights.sum(-2),
                torch.special.entr(weights).sum(-1),
                row_error,
                column_error,
                part.any(-1),
                part.any(-2),
                weights if self.keep_weights else None,
            )
        )


class Watch(dict[str, Layer]):
    """What was seen, by name of the module: `watch[name].calls`. Print it for a table."""

    def __missing__(self, name: object) -> Layer:
        names = ", ".join(map(repr, self))
        raise KeyError(f"watch_attention: no watched module is called {name!r}; there are {names}")

    def __str__(self) -> str:
        lines = ["largest column sum, smallest, mean row entropy, row error, column error (over all calls and heads)"]
        for name, layer in self.items():
            if not layer.calls:
                lines.append(f"  {name}: not called")
                continue
            sums = torch.cat([seen.column_sums[seen.columns] for seen in layer.calls])
            entropy = torch.cat([seen.row_entropy[seen.rows] for seen in layer.calls])
            rows, columns = (
                max(getattr(seen, side).max().item() for seen in layer.calls) for side in ("row_error", "column_error")
            )
            lines.append(
                f"  {name}: {sums.max():.3g}, {sums.min():.3g}, {entropy.mean():.3g}, {rows:.1e}, {columns:.1e}"
            )
        return "\n".join(lines)


@contextmanager
def watch_attention(model: nn.Module, *, select: Select = None, keep_weights: bool = False) -> Iterator[Watch]:
    """Watch the converted modules of a model while a block runs: column sums, row entropies and marginal errors.

    Every call computes its weights a second time, without a gradient; outputs do not change. To see a plain
    Transformer, convert it with `n_iters=1`. With `keep_weights` the weights themselves are kept too, in memory n × m a
    head.

    Yields:
        A dictionary from the names of modules to what was seen: `watch[name].calls` is a list with an entry a call,
        which has `column_sums` (batch, heads, m), `row_entropy` (batch, heads, n), `row_error` and `column_error`
        (batch, heads), `rows` and `columns`, boolean, for who took part, and `weights` (batch, heads, n, m) or None.

    Examples:
        >>> import torch, sinkformers
        >>> layer = sinkformers.to_sinkformer(torch.nn.MultiheadAttention(16, 4, batch_first=True), n_iters=21)
        >>> x = torch.randn(2, 9, 16)
        >>> with sinkformers.watch_attention(layer) as watch:
        ...     out, _ = layer(x, x, x)
        >>> watch[""].calls[0].column_sums.shape
        torch.Size([2, 4, 9])
    """
    places = converted("watch_attention", model, select)
    watch = Watch({place.name: Layer(keep_weights) for place in places})
    for place in places:
        place.module.__dict__[WATCHER] = watch[place.name]
    try:
        yield watch
    finally:
        for place in places:
            place.module.__dict__.pop(WATCHER, None)


def _taking_part(weights: Tensor, attn_mask: Tensor | None, queries: Tensor | None, keys: Tensor | None) -> Tensor:
    """Which entries take part, (batch, heads, n, m)."""
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
