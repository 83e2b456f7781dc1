"""What a method's code does with its SoftMax: is it over the last axis of scores, and are values multiplied with it?

The statements are read in order, both sides of a condition, and every name gets what is known of its value: the SoftMax
calls whose weights it holds, whether a product of two tensors or a SoftMax went into it, and from which arguments it
comes. What is not understood is not weights.
"""

import ast
from typing import Any

import torch
from torch import nn

from sinkformers.conversion.inline_calls import is_matmul, keeps_weights, number, resolve, softmax_calls
from sinkformers.conversion.inline_source import Method, method
from sinkformers.conversion.inline_values import (
    Findings,
    Node,
    Value,
    Weights,
    index_of,
    joined,
    may_be_tokens,
    part_of,
    transposed,
)

_SPLITS = ("chunk", "split", "unbind", "tensor_split", "hsplit", "vsplit", "dsplit")
_SEQUENCES = ("list", "tuple", "iter", "map", "reversed")
_SHAPES = ("shape", "dtype", "device", "ndim", "size", "dim")
_KEEP = ("to", "type", "type_as", "float", "half", "double", "contiguous", "clone")
_VIEW = ("view", "reshape", "view_as", "reshape_as", "unsqueeze", "squeeze", "flatten", "unflatten")
_TURN = ("transpose", "permute", "swapaxes", "movedim", "rearrange")
_SWAPS = ({(-1, -2), (-2, -1)}, {(0, 2, 1)})


ANY = "*"  # before the name of a source that holds any number of arguments


def findings(module: nn.Module) -> Findings | None:
    """Return what is known of the SoftMax calls of a module, or None if its code cannot be read."""
    forward = method(type(module), "forward")
    if forward is None:
        return None
    found = Findings()
    tokens = {name for name in forward.parameters if may_be_tokens(name)}
    names = {name: Value(sources=frozenset({name} & tokens), bare=True) for name in forward.parameters}
    rest = (forward.tree.args.vararg, forward.tree.args.kwarg)
    names |= {each.arg: Value(sources=frozenset({ANY + each.arg})) for each in rest if each is not None}
    _Flow(module, forward, names, found, ())
    return found


def _in_functions(tree: ast.FunctionDef) -> list[ast.AST]:
    """Return the nodes inside of functions in a method."""
    functions = [node for node in ast.walk(tree) if node is not tree]
    functions = [node for node in functions if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
    return [node for function in functions for node in ast.walk(function)]


class _Flow:
    """The flow of data through one method, whose arguments have these values."""

    def __init__(
        self,
        module: nn.Module,
        method: Method,
        names: dict[str, Value],
        found: Findings,
        callers: tuple[str, ...],
        loops: int = 0,
    ) -> None:
        self.loops = loops
        self.module, self.method, self.names, self.found = module, method, names, found
        self.callers = (*callers, method.tree.name)
        self.sites = {(method.tree.name, number): site for number, site in enumerate(softmax_calls(module, method))}
        found.sites |= self.sites
        found.inside |= {key for key, site in self.sites.items() if site.call in _in_functions(method.tree)}
        self.returns = Value()
        self.seen: dict[int, Value] = {}  # what is known of the expressions of the current statement
        self._block(method.tree.body)

    def _block(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, statement: ast.stmt) -> None:
        self.seen.clear()
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            value = self._value(statement.value)
            for target in targets:
                self._assign(target, statement.value, value, adds=isinstance(statement, ast.AugAssign))
        elif isinstance(statement, ast.If):
            self._value(statement.test)
            before = dict(self.names)
            self._block(statement.body)
            after, self.names = self.names, before
            self._block(statement.orelse)
            for name, value in after.items():
                self.names[name] = value.join(self.names[name]) if name in self.names else value
        elif isinstance(statement, ast.Return) and statement.value is not None:
            self.returns = self.returns.join(self._value(statement.value))
        else:
            loop = isinstance(statement, ast.For | ast.AsyncFor | ast.While)
            self.loops += loop
            for field in ast.iter_child_nodes(statement):
                if isinstance(field, ast.expr):
                    self._value(field)
            for block in ("body", "orelse", "finalbody"):
                self._block(getattr(statement, block, []))
            self.loops -= loop

    def _assign(self, target: ast.expr, node: ast.expr, value: Value, adds: bool) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            same = isinstance(node, ast.Tuple | ast.List) and len(node.elts) == len(target.elts)
            same = same and not any(isinstance(part, ast.Starred) for part in (*node.elts, *target.elts))  # pyright: ignore[reportAttributeAccessIssue]
            for position, each in enumerate(target.elts):
                part = node.elts[position] if same else node  # pyright: ignore[reportAttributeAccessIssue]
                self._assign(each, part, self._value(part) if same else part_of(value, str(position)), adds)
        elif isinstance(target, ast.Name):
            if adds:  # of weights and something else it is not known what becomes
                self.found.changed |= {each.site for each in self.names.get(target.id, Value()).weights}
                value = self.names.get(target.id, Value()).join(value)._replace(weights=frozenset())
            self.names[target.id] = value
        else:
            self._changes(target)

    def _changes(self, target: ast.expr) -> None:
        """Note the weights that a change of this expression, in place, changes: it may be a part or a view of them."""
        self.found.changed |= {each.site for each in self._value(target).weights}
        if isinstance(target, ast.Attribute | ast.Subscript | ast.Starred):
            self._changes(target.value)
        elif isinstance(target, ast.Call) and isinstance(target.func, ast.Attribute):
            self._changes(target.func.value)

    def _value(self, node: ast.expr) -> Value:
        """Return what is known of an expression, and note products of weights with values in it."""
        if id(node) in self.seen:
            return self.seen[id(node)]
        value = self.seen[id(node)] = self._evaluated(node)
        return value

    def _evaluated(self, node: ast.expr) -> Value:
        value = self._noted(node, self._known(node))
        if not value.bare or isinstance(node, ast.Name | ast.IfExp | ast.BoolOp) or self._keeps_parts(node):
            return value
        return value._replace(bare=False)

    def _noted(self, node: ast.expr, value: Value) -> Value:
        """Return the value with the note that weights were changed, if they go into an expression that changes them."""
        if isinstance(node, ast.BinOp):
            given = [node.left, node.right]
        elif isinstance(node, ast.Call) and node not in (site.call for site in self.sites.values()):
            owner = node.func if isinstance(node.func, ast.Attribute) and node.func.attr not in _SHAPES else None
            given = [*node.args, *([] if owner is None else [owner.value])]
        else:
            return value
        holders = [each for each in given if self._value(each).weights]
        masks = isinstance(node, ast.Call) and self._masks(node)
        if not holders or (value.weights and not masks):
            return value
        inner = holders[0] if len(holders) == 1 else None
        number = index_of(self.found.alterations, Node(self.method.tree.name, node, inner))
        weights = self._value(holders[0]).weights if masks and inner is not None else value.weights
        return value._replace(weights=weights, altered=value.altered | {number})

    def _masks(self, node: ast.Call) -> bool:
        function = resolve(node.func, self.module, self.method)
        is_method = isinstance(node.func, ast.Attribute) and function is None and node.func.attr == "masked_fill"
        return is_method or (function is torch.masked_fill and len(node.args) == 3)

    def _keeps_parts(self, node: ast.expr) -> bool:
        """Return whether an expression splits, views or normalises an argument, or does so with each of its parts."""
        if isinstance(node, ast.BinOp):
            return not isinstance(node.op, ast.MatMult)
        if isinstance(node, ast.GeneratorExp | ast.ListComp):
            return any(self._value(each.iter).bare for each in node.generators)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SPLITS:
            return any(self._value(each).bare for each in (node.func.value, *node.args))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _SEQUENCES:
            return any(self._value(each).bare for each in node.args)
        return isinstance(node, ast.Call) and self._keeps_tokens(node)

    def _keeps_tokens(self, node: ast.Call) -> bool:
        """Return whether a call returns its argument in another shape, or each of its tokens normalised."""
        target, function = node.func, resolve(node.func, self.module, self.method)
        name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
        if name in (*_KEEP, *_VIEW, *_TURN):
            owner = target.value if isinstance(target, ast.Attribute) and function is None else None
            return any(self._value(each).bare for each in ([*node.args[:1]] if owner is None else [owner]))
        norm = isinstance(function, nn.Module) and "Norm" in type(function).__name__
        return (norm or keeps_weights(function)) and any(self._value(each).bare for each in node.args[:1])

    def _known(self, node: ast.expr) -> Value:
        for key, site in self.sites.items():
            if site.call is node:
                scores = self._value(site.scores)
                self.found.looped |= {key} if self.loops else set()
                self.found.scores[key] = scores.join(self.found.scores.get(key, Value()))
                return scores._replace(weights=frozenset([Weights(key)]), softmax=True, altered=frozenset())
        if isinstance(node, ast.Name):
            return self.names.get(node.id, Value())
        if isinstance(node, ast.Attribute):
            inner = self._value(node.value)
            if node.attr in _SHAPES:
                return Value()
            if node.attr == "mT":
                return transposed(inner)
            return inner._replace(weights=frozenset())
        if isinstance(node, ast.Subscript) and self._value(node.value).bare:
            return part_of(self._value(node.value), ast.unparse(node.slice))
        if isinstance(node, ast.IfExp):
            return self._value(node.body).join(self._value(node.orelse))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            return self._product(node.left, node.right)
        if isinstance(node, ast.Call):
            return self._call(node)
        return joined(self._children(node))._replace(weights=frozenset())

    def _children(self, node: ast.AST) -> list[Value]:
        """Return the values of the expressions directly inside a node, keyword arguments included."""
        found = []
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                found.append(self._value(child))
            elif not isinstance(child, ast.expr_context | ast.operator | ast.cmpop | ast.unaryop | ast.boolop):
                found += self._children(child)
        return found

    def _call(self, node: ast.Call) -> Value:
        target = node.func
        function = resolve(target, self.module, self.method)
        name = target.attr if isinstance(target, ast.Attribute) else ""
        if name.endswith("_") and not name.endswith("__"):
            for each in (target.value, *node.args[:1]):  # pyright: ignore[reportAttributeAccessIssue]
                self._changes(each)
        if isinstance(target, ast.Attribute) and function is None:  # a method of a tensor
            return self._tensor_method(target, node)
        if is_matmul(function):
            return self._product(node.args[0], node.args[1]) if len(node.args) == 2 else Value()
        if function is torch.einsum:
            return self._einsum(node)
        if getattr(function, "__self__", None) is self.module and isinstance(target, ast.Attribute):
            inner = method(type(self.module), target.attr)
            if inner is not None and target.attr not in self.callers and softmax_calls(self.module, inner):
                return self._own_method(inner, node)
        parts = joined(self._children(node))
        if keeps_weights(function) and node.args:
            return parts._replace(weights=self._value(node.args[0]).weights)
        return parts._replace(weights=frozenset())

    def _own_method(self, inner: Method, node: ast.Call) -> Value:
        """Return the value of a method of the module that has SoftMax calls of its own."""
        names = {name: Value() for name in inner.parameters}
        names |= {name: self._value(each) for name, each in zip(inner.parameters, node.args, strict=False)}
        names |= {each.arg: self._value(each.value) for each in node.keywords if each.arg in names}
        return _Flow(self.module, inner, names, self.found, self.callers, self.loops).returns

    def _tensor_method(self, target: ast.Attribute, node: ast.Call) -> Value:
        base = self._value(target.value)
        if target.attr in _SHAPES:
            return Value()
        if target.attr in ("matmul", "bmm") and len(node.args) == 1:
            return self._product(target.value, node.args[0])
        parts = base.join(joined(self._children(node)))._replace(weights=frozenset())
        factors = [*node.args, *(each.value for each in node.keywords if each.arg in ("batch1", "batch2"))]
        if target.attr == "baddbmm" and len(factors) > 1:  # a product that is added to a bias
            return self._product(*factors[:2]).join(base)._replace(weights=frozenset())
        if target.attr in _KEEP:
            return parts._replace(weights=base.weights)
        if target.attr in _VIEW:
            return parts._replace(weights=frozenset(each._replace(viewed=True) for each in base.weights))
        if target.attr in ("transpose", "permute", "swapaxes"):
            axes = tuple(number(each) for each in node.args)
            if any(axes in swap for swap in _SWAPS):
                return parts._replace(weights=transposed(base).weights)
        return parts

    def _product(self, left: ast.expr, right: ast.expr) -> Value:
        one, two = self._value(left), self._value(right)
        if not two.softmax:
            self._prove(left, [each for each in one.weights if not each.transposed], one)
        if not one.softmax:
            self._prove(right, [each for each in two.weights if each.transposed], two)
        both = one.join(two)
        sides: dict[str, Any] = {"left": both.left | one.sources, "right": both.right | two.sources}
        sides["factors"] = both.factors | {self._factor(left)}
        return both._replace(weights=frozenset(), product=True, **sides)

    def _einsum(self, node: ast.Call) -> Value:
        operands = node.args[1:]
        if len(operands) == 1 and isinstance(operands[0], ast.List | ast.Tuple):
            operands = operands[0].elts
        values = [self._value(each) for each in operands]
        both = joined(values)._replace(weights=frozenset())
        equation = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else ""
        if len(values) != 2 or not isinstance(equation, str) or "->" not in equation:
            return both
        inputs, output = equation.replace(" ", "").split("->")
        letters = inputs.split(",")
        for which, other in ((0, 1), (1, 0)):
            for each in values[which].weights:
                rows, columns = letters[which][-2:] if not each.transposed else letters[which][-2:][::-1]
                contracts = columns in letters[other] and columns not in output
                if contracts and rows in output and rows not in letters[other] and not values[other].softmax:
                    self._prove(operands[which], [each], values[which])
        sides: dict[str, Any] = {"left": both.left | values[0].sources, "right": both.right | values[1].sources}
        added = [letter for letter in letters[0] if letter in letters[1] and letter not in output]
        if len(added) == 1 and "." not in letters[0]:
            axis = letters[0].index(added[0]) - len(letters[0])
            sides["factors"] = both.factors | {self._factor(operands[0], axis)}
        return both._replace(product=True, **sides)

    def _factor(self, node: ast.expr, axis: int = -1) -> int:
        return index_of(self.found.factors, Node(self.method.tree.name, node, axis=axis))

    def _prove(self, operand: ast.expr, weights: list[Weights], value: Value) -> None:
        self.found.proven |= {each.site for each in weights}
        self.found.altered |= value.altered if weights else set()
        note = (self.method.tree.name, operand)
        if any(each.viewed for each in weights) and note not in self.found.operands:
            self.found.operands.append(note)
