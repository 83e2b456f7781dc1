"""Keys and values of all ranks, gathered or passed around a ring, and their gradients on the way back."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sinkformers.distributed import Exchange, Ranks

_TOKENS, _SUMS = 0, 1  # tags of messages


class Shard(NamedTuple):
    """Some consecutive keys, with their values where a pass needs them."""

    columns: slice
    key: Tensor  # (..., columns, d)
    value: Tensor  # (..., columns, e); without columns where a pass does not need them


class Totals:
    """Sums over all queries for each key, such as the gradient of the keys: (..., m, width) in all.

    While a shard is at hand, `current` is its part, to which this rank adds. After the pass `own` is that of this
    rank's keys.
    """

    def __init__(self, like: Tensor, width: int, dtype: torch.dtype, what: str) -> None:
        self.lead, self.width, self.what = like.shape[:-2], width, what
        self._like, self._dtype = like, dtype
        self.current = self.own = self.zeros(0)

    def zeros(self, columns: int) -> Tensor:
        return self._like.new_zeros(*self.lead, columns, self.width, dtype=self._dtype)


class Gathered:
    """All keys and values on every rank, gathered when a pass needs them first."""

    def __init__(self, ranks: Ranks, sizes: list[int], key: Tensor, value: Tensor) -> None:
        self.ranks, self.sizes, self.is_single = ranks, sizes, True
        self._local = key, value
        self._key: Tensor | None = None
        self._value: Tensor | None = None

    def passes(self, *, values: bool, totals: Totals | None = None) -> Iterator[Shard]:
        """One pass over all keys. It has to be run to its end, on all ranks."""
        key, value = self._local
        if self._key is None:
            self._key = self.ranks.gather(key, self.sizes, "keys")
        if self._value is None and values:
            self._value = self.ranks.gather(value, self.sizes, "values")
        m = sum(self.sizes)
        if totals is not None:
            totals.current = totals.zeros(m)
        yield Shard(slice(0, m), self._key, value[..., :0, :] if self._value is None else self._value)
        if totals is not None:
            totals.own = self.ranks.scatter_sum(totals.current, self.sizes, totals.what)
            totals.current = totals.zeros(0)


class Ring:
    """This rank's keys and values, and those of one other rank at a time.

    A shard is sent on while it is computed with, so that two shards are in memory.
    """

    def __init__(self, ranks: Ranks, sizes: list[int], key: Tensor, value: Tensor) -> None:
        self.ranks, self.sizes, self.is_single = ranks, sizes, ranks.size == 1
        self._key, self._value = key.contiguous(), value.contiguous()
        self._starts = [sum(sizes[:rank]) for rank in range(ranks.size)]

    def passes(self, *, values: bool, totals: Totals | None = None) -> Iterator[Shard]:
        """One pass over all keys. It has to be run to its end, on all ranks."""
        ranks, held = self.ranks, [self._key, self._value] if values else [self._key]
        if totals is not None:
            totals.current = totals.zeros(self.sizes[ranks.rank])
        for step in range(ranks.size):
            owner, following = ((ranks.rank - step - more) % ranks.size for more in (0, 1))
            coming: list[Exchange] = []
            if step < ranks.size - 1:
                coming = [
                    Exchange(ranks, part, self._empty(part, following), what, tag=_TOKENS)
                    for part, what in zip(held, ("keys", "values"), strict=False)
                ]
            columns = slice(self._starts[owner], self._starts[owner] + self.sizes[owner])
            yield Shard(columns, held[0], held[1] if values else self._value[..., :0, :])
            if totals is not None and ranks.size > 1:
                room = totals.zeros(self.sizes[following])
                totals.current = Exchange(ranks, totals.current, room, totals.what, tag=_SUMS).wait()
            held = [each.wait() for each in coming]
        if totals is not None:
            totals.own, totals.current = totals.current, totals.zeros(0)

    def _empty(self, like: Tensor, owner: int) -> Tensor:
        return like.new_empty(*like.shape[:-2], self.sizes[owner], like.shape[-1])


Keys = Gathered | Ring
SOURCES: dict[str, type[Gathered] | type[Ring]] = {"gather": Gathered, "ring": Ring}
