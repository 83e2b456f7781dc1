"""What is known of the value of an expression in a method's code."""

import ast
from typing import Any, NamedTuple

Key = tuple[str, int]  # the name of a method, and the number of a SoftMax call in it


class Weights(NamedTuple):
    """Weights of one SoftMax call, as they are or transposed, and whether they were viewed in another shape."""

    site: Key
    transposed: bool = False
    viewed: bool = False


class Node(NamedTuple):
    """An expression in a method, and one inside of it or an axis of its value."""

    method: str
    node: ast.expr
    inner: ast.expr | None = None
    axis: int = -1


class Value(NamedTuple):
    """What is known of an expression."""

    weights: frozenset[Weights] = frozenset()
    product: bool = False  # of two tensors
    softmax: bool = False  # went into it
    sources: frozenset[str] = frozenset()  # the arguments of the method that it comes from
    left: frozenset[str] = frozenset()  # those of the first factors of products
    right: frozenset[str] = frozenset()  # those of their second factors
    unclear: bool = False  # which of the sources it comes from is not known
    altered: frozenset[int] = frozenset()  # by these expressions weights may have been changed on the way
    factors: frozenset[int] = frozenset()  # the first factors of the products that it comes from
    bare: bool = False  # an argument as it is, or the parts of one: each of them is a source of its own

    def join(self, other: "Value") -> "Value":
        parts: Any = [one | two for one, two in zip(self, other, strict=True)]  # pyright: ignore[reportOperatorIssue]
        return Value(*parts)


def joined(values: list[Value]) -> Value:
    found = Value()
    for value in values:
        found = found.join(value)
    return found


def part_of(value: Value, part: str) -> Value:
    """Return what is known of a part: of an argument it is a source of its own; otherwise which is which is not."""
    if value.bare:
        return Value(sources=frozenset(f"{each}[{part}]" for each in value.sources))
    return value._replace(weights=frozenset(), unclear=value.unclear or len(value.sources) > 1)


def transposed(value: Value) -> Value:
    turned = (each._replace(transposed=not each.transposed) for each in value.weights)
    return value._replace(weights=frozenset(turned))
