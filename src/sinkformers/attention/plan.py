"""How a call of attention is served."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from sinkformers.core.backend import Backends


class Plan(NamedTuple):
    """The name of the backend, and the function to call with its arguments.

    Where a table of backends was asked, the plan has the table and the call too.
    """

    backend: str
    function: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    backends: Backends | None = None
    call: Any = None


def no_output(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, tau: float | Tensor) -> Tensor:
    """Zeros (…, n, e), where there are no keys, or no output at all: an empty sum is 0. All gradients are zeros."""
    inputs = (each for each in (query, key, value, bias, tau) if isinstance(each, Tensor))
    zero = sum(each.reshape(-1)[:0].sum() for each in inputs)
    return query.new_zeros(*query.shape[:-1], value.shape[-1]) + zero
