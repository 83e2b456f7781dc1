"""What generation keeps of the tokens so far: keys, values, and how much attention each key has received."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sinkformers.attention.causal.memory import TokenMemory
from sinkformers.core import checks
from sinkformers.core.modes import readable


class CacheLayer:
    """The cache of one attention layer. `sinkhorn_attention(…, cache=layer)` reads it, and adds the new tokens to it.

    Attributes:
        key, value: (…, m, d) and (…, m, e) of the tokens so far; None before the first call.
        received: (…, (n_iters − 1)/2, m), the logarithm of the attention that each key has received, by column step.
        expected: (…, m), what uniform attention would have given it.
        tau: the relaxation that the sums were counted with; None before the first call.
        grows: whether keys and values of a call are new tokens, as in self-attention. In the cross-attention of a
            decoder every call has all keys, and only the sums are kept.
    """

    def __init__(self, *, grows: bool = True) -> None:
        self.grows = grows
        self.key: Tensor | None = None
        self.value: Tensor | None = None
        self.received: Tensor | None = None
        self.expected: Tensor | None = None
        self.tau: float | Tensor | None = None
        self._keys, self._values = TokenMemory(), TokenMemory()

    def __len__(self) -> int:
        return 0 if self.key is None else self.key.shape[-2]

    def __bool__(self) -> bool:
        return True  # an empty cache is a cache

    def __repr__(self) -> str:
        return f"CacheLayer({len(self)} tokens)"

    def extended(self, caller: str, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens, the new ones last. What the cache holds is not changed."""
        if self.key is None or self.value is None:
            return key, value
        for name, old, new in (("key", self.key, key), ("value", self.value, value)):
            fits = old.shape[-2] == new.shape[-2] or self.grows
            if not fits or old.shape[:-2] != new.shape[:-2] or old.shape[-1] != new.shape[-1] or old.dtype != new.dtype:
                raise ValueError(
                    f"{caller}: the cache holds {name}s {tuple(old.shape)} of {old.dtype}, which {name}s "
                    f"{tuple(new.shape)} of {new.dtype} do not continue. Take a new cache for another batch or model, "
                    "and one layer of it per attention module."
                )
        checks.one_device(caller, "key", key, cache=self.key)
        if not self.grows:
            return key, value
        return self._keys.append(self.key, key), self._values.append(self.value, value)

    def sums(
        self, caller: str, query: Tensor, m: int, col_steps: int, tau: float | Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """The running sums of `m` keys, of which the last, new ones have received nothing; None at the first call."""
        if self.received is None or self.expected is None:
            self.tau = tau.detach().clone() if isinstance(tau, Tensor) else tau
            if self.key is not None and col_steps:
                raise ValueError(
                    f"{caller}: the cache was filled with n_iters=1 or tau=0, which keeps no column sums, and cannot "
                    f"be continued with n_iters={2 * col_steps + 1}. Take a new cache."
                )
            return None, None
        if self.received.shape[-2] != col_steps:
            raise ValueError(
                f"{caller}: the cache was filled with n_iters={2 * self.received.shape[-2] + 1}, and cannot be "
                f"continued with n_iters={2 * col_steps + 1}. Take a new cache."
            )
        if self.received.shape[:-2] != query.shape[:-2]:
            raise ValueError(
                f"{caller}: the cache holds column sums of heads {tuple(self.received.shape[:-2])}, which a query "
                f"{tuple(query.shape)} does not continue. Take a new cache for another batch or model."
            )
        if col_steps and self.tau is not None and not _same(self.tau, tau):
            raise ValueError(
                f"{caller}: the cache was filled with tau={_shown(self.tau)}, and cannot be continued with "
                f"tau={_shown(tau)}, as after a step of an optimiser. Take a new cache."
            )
        new, lowest = m - self.received.shape[-1], torch.finfo(self.received.dtype).min / 4
        if new < 0:
            raise ValueError(
                f"{caller}: the cache holds column sums of {self.received.shape[-1]} keys, which {m} keys do not "
                "continue. Take a new cache for another text."
            )
        return padded(self.received, new, lowest), padded(self.expected, new, 0.0)

    def store(self, key: Tensor, value: Tensor, received: Tensor | None, expected: Tensor | None) -> None:
        """Replace what the cache holds; gradients do not flow through it."""
        first = self.grows and self.key is None  # then these are the caller's tensors, who may write to them again
        self.key, self.value = (x.detach().clone() if first else x.detach() for x in (key, value))
        self.received = None if received is None else received.detach()
        self.expected = None if expected is None else expected.detach()

    def map(self, change: Any) -> None:
        """Apply a function to all tensors, such as a selection along the batch axis."""
        for name in ("key", "value", "received", "expected"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, change(tensor))


class ColumnSums(CacheLayer):
    """The running column sums alone, for a model that keeps keys and values itself.

    Every call has all keys and values, the new ones last. With `is_causal=True` query i sees the keys up to i + m − n.
    With `grows=False` the queries are of another text, as in cross-attention, and there may be more of them than keys.
    """

    def extended(self, caller: str, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key, value

    def store(self, key: Tensor, value: Tensor, received: Tensor | None, expected: Tensor | None) -> None:
        self.received = None if received is None else received.detach()
        self.expected = None if expected is None else expected.detach()

    def __len__(self) -> int:
        return 0 if self.received is None else self.received.shape[-1]

    def __repr__(self) -> str:
        return f"ColumnSums({len(self)} tokens)"


def _same(one: float | Tensor, two: float | Tensor) -> bool:
    """Whether two relaxations are equal, as far as that can be read."""
    tensors = [each for each in (one, two) if isinstance(each, Tensor)]
    if not tensors:
        return one == two
    if not all(map(readable, tensors)):
        return True
    values = [torch.as_tensor(each, dtype=tensors[0].dtype, device=tensors[0].device) for each in (one, two)]
    alike = values[0].shape == values[1].shape or 0 in (values[0].dim(), values[1].dim())
    return alike and bool((values[0] == values[1]).all())


def _shown(tau: float | Tensor) -> str:
    return f"a tensor of shape {tuple(tau.shape)}" if isinstance(tau, Tensor) else f"{tau:g}"


def padded(sums: Tensor, new: int, fill: float) -> Tensor:
    """Sums (…, m) with `new` more entries."""
    return torch.cat([sums, sums.new_full((*sums.shape[:-1], new), fill)], -1)


class SinkhornCache:
    """Keys, values and running column sums of all layers, for generation token by token or chunk by chunk.

    Layers are made when they are first asked for: `cache[0]`, `cache[1]`, … for self-attention, and `cache.cross(0)`, …
    for cross-attention, whose keys are the same at every call.

    Examples:
        >>> import torch, sinkformers
        >>> q, k, v = torch.randn(3, 2, 4, 10, 16).unbind()
        >>> cache = sinkformers.SinkhornCache()
        >>> whole = sinkformers.sinkhorn_attention(q, k, v, is_causal=True, n_iters=3)
        >>> parts = [
        ...     sinkformers.sinkhorn_attention(*(x[:, :, i : i + 5] for x in (q, k, v)), is_causal=True, cache=cache[0])
        ...     for i in (0, 5)
        ... ]
        >>> torch.allclose(torch.cat(parts, -2), whole, atol=1e-5), len(cache[0])
        (True, 10)
    """

    def __init__(self) -> None:
        self.layers: list[CacheLayer] = []
        self.cross_layers: list[CacheLayer] = []

    def __getitem__(self, layer: int) -> CacheLayer:
        return _layer(self.layers, layer, grows=True)

    def cross(self, layer: int) -> CacheLayer:
        """The cache of a cross-attention: what the keys, all of which every call has, have received so far."""
        return _layer(self.cross_layers, layer, grows=False)

    def __iter__(self) -> Iterator[CacheLayer]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"SinkhornCache({len(self)} layers, {max(map(len, self.layers), default=0)} tokens)"

    def reorder(self, index: Tensor) -> None:
        """Take these samples of the batch, the first axis, as beam search does."""
        if not isinstance(index, Tensor) or index.dim() != 1 or index.dtype not in (torch.int64, torch.int32):
            got = f"{index.dtype} {tuple(index.shape)}" if isinstance(index, Tensor) else type(index).__name__
            raise TypeError(f"SinkhornCache.reorder: index must be a tensor of whole numbers (batch,); got {got}.")
        layers = [layer for layer in (*self.layers, *self.cross_layers) if layer.key is not None]
        for layer in layers:
            if layer.key is not None and layer.key.dim() < 3:
                raise ValueError(
                    f"SinkhornCache.reorder: the cache holds keys {tuple(layer.key.shape)}, which have no batch axis."
                )
        for layer in layers:
            layer.map(lambda tensor: tensor.index_select(0, index.to(tensor.device)))

    def reset(self) -> None:
        """Forget all tokens."""
        self.layers.clear()
        self.cross_layers.clear()


def _layer(layers: list[CacheLayer], number: int, *, grows: bool) -> CacheLayer:
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise TypeError(f"SinkhornCache: a layer is a whole number ≥ 0; got {number!r}.")
    while len(layers) <= number:
        layers.append(CacheLayer(grows=grows))
    return layers[number]
