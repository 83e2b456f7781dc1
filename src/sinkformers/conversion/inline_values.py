"""What is known of the values of expressions in a method's code, and what was found in it."""

import ast
import re
from typing import Any, NamedTuple

from sinkformers.conversion.inline_calls import Site

# Arguments that are no tokens, though they may reach keys and not queries: positions, masks, caches. What is no tensor
# needs no mention here.
_NO_TOKENS = re.compile(r"pos|past|cache|mask|bias|freq|^cos|^sin|^rel|_rel|^seg|^output_|^attn_prompt")
_EMBEDDINGS = re.compile(r"emb")
_OTHERS = re.compile(r"encoder|context|memory|cross|source|src|key|kv", re.IGNORECASE)  # whose embeddings are tokens

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


class Findings:
    """What was found in the methods of a module that its `forward` leads to."""

    def __init__(self) -> None:
        self.sites: dict[Key, Site] = {}
        self.scores: dict[Key, Value] = {}
        self.proven: set[Key] = set()  # sites whose weights are multiplied with values
        self.looped: set[Key] = set()  # sites inside of loops, which may be given their own weights
        self.inside: set[Key] = set()  # sites inside of functions in a method, whose arguments are not followed
        self.changed: set[Key] = set()  # sites whose weights are changed in place
        self.operands: list[tuple[str, ast.expr]] = []  # viewed weights in such products: checked when they run
        self.alterations: list[Node] = []  # expressions that change weights, such as masks; `inner` are the weights
        self.altered: set[int] = set()  # those whose results are multiplied with values: checked when they run
        self.factors: list[Node] = []  # first factors of products, and the axis that each product adds up


def may_be_tokens(name: str) -> bool:
    """Return whether an argument of this name may hold tokens."""
    return not _NO_TOKENS.search(name) and (not _EMBEDDINGS.search(name) or bool(_OTHERS.search(name)))


def index_of(nodes: list[Node], node: Node) -> int:
    """Return the number of a node in a list that it is added to."""
    if node not in nodes:
        nodes.append(node)
    return nodes.index(node)
