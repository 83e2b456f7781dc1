"""Replacement of SoftMax calls in the methods of a class: they are compiled again with another call there."""

import ast
import copy
import functools
import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from sinkformers.conversion.inline_source import Method, compiled, method
from sinkformers.conversion.inline_values import Findings, Key

WEIGHTS = "_sinkhorn_weights"  # called in place of SoftMax
OPERAND = "_sinkhorn_operand"  # called with weights that were viewed in another shape before they are used
BEFORE = "_sinkhorn_before"  # called with weights that an expression changes
AFTER = "_sinkhorn_after"  # called with what it makes of them
FACTOR = "_sinkhorn_factor"  # called with the first factor of scores
CROSSES = "_sinkhorn_crosses"  # called at the start of `forward`
_CROSS = "_sinkhorn_cross"  # the local variable with its answer


class Change(NamedTuple):
    """One call to replace. Nodes are given by their position in `ast.walk` of the method, which can be pickled."""

    method: str
    call: int
    scores: int = -1  # none: `call` is an expression that is passed through a method
    dim: int = -1
    dtype: int = -1
    mask: int = -1
    through: str = WEIGHTS


class Plan(NamedTuple):
    """All changes to a class, and the arguments of its `forward` that tell cross-attention."""

    changes: tuple[Change, ...]
    queries: tuple[str, ...]  # tokens that queries come from
    others: tuple[str, ...]  # tokens that only keys come from: None in self-attention, or one of those
    same: tuple[str, ...]  # where queries and keys share no argument, or which is not known: all the same tensor
    digest: str  # of the code that positions are in


def digest(kind: type[nn.Module], names: Iterable[str]) -> str:
    """Return a digest of the code of methods. A plan may be unpickled where the code is another."""
    trees = (None if (found := method(kind, name)) is None else found.tree for name in sorted(set(names)))
    source = "\n".join("" if tree is None else ast.unparse(tree) for tree in trees)
    return hashlib.sha256(source.encode()).hexdigest()


def changes(kind: type[nn.Module], found: Findings, sites: list[Key]) -> tuple[Change, ...]:
    """Return the changes that replace these SoftMax calls."""
    made = []
    for key in sites:
        site, at = found.sites[key], _positions(kind, key[0])
        assert site.dim is not None
        extra = [-1 if node is None else at[id(node)] for node in (site.dtype, site.mask)]
        made.append(Change(key[0], at[id(site.call)], at[id(site.scores)], site.dim, *extra))
    through = [(name, node, OPERAND, -1) for name, node in found.operands]
    for each in (found.alterations[number] for number in sorted(found.altered)):
        assert each.inner is not None
        through += [(each.method, each.inner, BEFORE, -1), (each.method, each.node, AFTER, -1)]
    numbers = frozenset().union(*(found.scores[key].factors for key in sites))
    factors = (found.factors[number] for number in sorted(numbers))
    through += [(each.method, each.node, FACTOR, each.axis) for each in factors]
    made += [Change(name, _positions(kind, name)[id(node)], dim=dim, through=to) for name, node, to, dim in through]
    return tuple(dict.fromkeys(made))


def _positions(kind: type[nn.Module], name: str) -> dict[int, int]:
    found = method(kind, name)
    assert found is not None
    return {id(node): position for position, node in enumerate(ast.walk(found.tree))}


@functools.cache
def rewritten(kind: type[nn.Module], plan: Plan) -> dict[str, Any]:
    """Return the changed methods of a class by name."""
    made: dict[str, Any] = {}
    for name in dict.fromkeys(change.method for change in plan.changes):
        found = method(kind, name)
        if found is None:
            raise RuntimeError(
                f"sinkformers: the source of {kind.__name__}.{name} cannot be read, or is not that of the code that "
                "runs, so its SoftMax cannot be replaced. Convert the model where its source is installed."
            )
        _check_code(kind, plan)
        made[name] = compiled(_changed(found, plan))
    return made


def _check_code(kind: type[nn.Module], plan: Plan) -> None:
    if digest(kind, (change.method for change in plan.changes)) != plan.digest:
        raise RuntimeError(
            f"sinkformers: the code of {kind.__name__} is not the code that was converted, as after another version of "
            "its library was installed, so it is not known which of its calls to replace. Load the weights into a new "
            "model, and convert that."
        )


def _changed(found: Method, plan: Plan) -> Method:
    tree = copy.deepcopy(found.tree)
    nodes, own = list(ast.walk(tree)), found.own
    guarded = tree.name == "forward" and bool(plan.others or plan.same)
    replaced: dict[int, ast.expr] = {}
    for change in plan.changes:
        if change.method == tree.name:
            place = id(nodes[change.call])
            replaced[place] = _call(nodes, change, own, guarded, replaced.get(place))
    tree = _Replace(replaced).visit(tree)
    if guarded:
        names = ", ".join(
            f"({''.join(name + ', ' for name in each)})" for each in (plan.queries, plan.others, plan.same)
        )
        tree.body.insert(0, ast.parse(f"{_CROSS} = {own}.{CROSSES}({names})").body[0])
        ast.copy_location(tree.body[0], tree.body[1])
        for node in ast.walk(tree.body[0]):
            ast.copy_location(node, tree.body[1])
    return Method(found.function, tree)


def _call(nodes: list[ast.AST], change: Change, own: str, guarded: bool, already: ast.expr | None) -> ast.expr:
    """Return the call in the place of a node, for which there may be another call already."""
    call: Any = nodes[change.call]
    function = ast.Attribute(ast.Name(own, ast.Load()), change.through, ast.Load())
    if change.scores < 0:
        axis = [ast.Constant(change.dim)] if change.through == FACTOR else []
        return ast.copy_location(ast.Call(function, [call if already is None else already, *axis], []), call)
    given: dict[str, Any] = {"dim": ast.Constant(change.dim)}
    given |= {key: nodes[at] for key, at in (("dtype", change.dtype), ("mask", change.mask)) if at >= 0}
    if change.mask >= 0:
        given["original"] = call.func
    if guarded:
        given["cross"] = ast.Name(_CROSS, ast.Load())
    keywords = [ast.keyword(key, value) for key, value in given.items()]
    made = ast.Call(function, [nodes[change.scores]], keywords)  # pyright: ignore[reportArgumentType]
    return ast.copy_location(made, call)


class _Replace(ast.NodeTransformer):
    """Put other expressions in the place of some, and visit what is inside of them."""

    def __init__(self, replaced: dict[int, ast.expr]) -> None:
        self.replaced = replaced

    def visit(self, node: ast.AST) -> Any:
        return self.generic_visit(self.replaced.pop(id(node), node))
