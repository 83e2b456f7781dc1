"""Describe the arguments of an operator once, in an annotated named tuple.

Schemas, saving for backward, vmap rules, fake kernels and the selection of single matrices are derived from the
description, so that adding a field is one line:

    class Call(NamedTuple):
        scores: Annotated[Tensor, per_matrix("n", "m", gradient=True)]
        tau: Annotated[Tensor | None, per_matrix(gradient=True)]
        n_iters: int
"""

from collections.abc import Callable, Sequence
from functools import cache
from operator import itemgetter
from types import NoneType
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from torch import Tensor


class Role(NamedTuple):
    """What an operator may do with a tensor."""

    axes: tuple[str, ...] | None  # those after the leading axes; None for a tensor that all matrices share
    gradient: bool = False  # has a gradient
    saved: bool = True  # read by the backward pass


def per_matrix(*axes: str, gradient: bool = False, saved: bool = True) -> Role:
    """A tensor with leading axes, one part per matrix, whose last axes are the given ones."""
    return Role(axes, gradient, saved)


SHARED = Role(None)
"""A tensor without leading axes, such as the seed of dropout: `vmap` runs one call per seed."""


class Field(NamedTuple):
    name: str
    kind: type  # Tensor, int, float, bool or str
    optional: bool
    role: Role | None  # None for what is no tensor

    def schema(self) -> str:
        """The argument as torch's schema language writes it."""
        return f"{self.kind.__name__}{'?' if self.optional else ''} {self.name}"


class Description:
    """The fields of a named tuple, sorted by what an operator needs to know of them."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self.fields = [_field(name, hint) for name, hint in get_type_hints(kind, include_extras=True).items()]
        self.tensors = [field for field in self.fields if field.role is not None]
        self.settings = [field for field in self.fields if field.role is None]
        self.gradients = [field for field in self.tensors if field.role is not None and field.role.gradient]
        self.saved = [field for field in self.tensors if field.role is not None and field.role.saved]


@cache
def describe(kind: Any) -> Description:
    """The description of an annotated named tuple."""
    return Description(kind)


def picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that returns what stands at these places of a sequence."""
    return itemgetter(*places) if len(places) > 1 else lambda values: tuple(values[at] for at in places)


def select(call: Any, which: Tensor) -> Any:
    """The matrices where `which` (...) holds, stacked along one leading axis."""

    def pick(field: Field, part: Any) -> Any:
        if part is None or field.role is None or field.role.axes is None:
            return part
        last = part.shape[part.dim() - len(field.role.axes) :]
        return part.expand((*which.shape, *last))[which]

    kind = describe(type(call))
    return kind.kind(*(pick(field, part) for field, part in zip(kind.fields, call, strict=True)))


def shape_of(call: Any) -> tuple[Any, ...]:
    """What the time of a call depends on: device, dtypes and shapes, and its settings, of numbers only their sign."""
    parts = [(part.dtype, part.shape) if isinstance(part, Tensor) else _setting(part) for part in call]
    return type(call).__name__, call[0].device, *parts


def _setting(value: Any) -> Any:
    return value > 0 if isinstance(value, float) else value


def _field(name: str, hint: Any) -> Field:
    role = None
    if get_origin(hint) is Annotated:
        hint, role = get_args(hint)
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType]
    return Field(name, kinds[0], NoneType in get_args(hint), role)
