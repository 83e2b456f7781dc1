"""The source of a method as a syntax tree, and a method compiled from a changed tree.

A tree is only used if its file compiles to the very bytecode of the method: otherwise it is not what is running.
"""

import ast
import functools
import inspect
import linecache
import os
import re
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn


class Method(NamedTuple):
    """A method in Python: its function, without decorators, and its syntax tree."""

    function: Any
    tree: ast.FunctionDef

    @property
    def own(self) -> str:
        """Return what the method calls `self`."""
        return (*self.tree.args.posonlyargs, *self.tree.args.args)[0].arg

    @property
    def parameters(self) -> tuple[str, ...]:
        arguments = self.tree.args
        return tuple(each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))[1:]


def method(kind: type[nn.Module], name: str) -> Method | None:
    """Return a method of a class, or None if its source is not available, or is not what is running."""
    outer: Any = getattr(kind, name, None)
    function: Any = None if outer is None else inspect.unwrap(outer)
    if not isinstance(function, FunctionType) or function.__code__.co_freevars:
        return None
    return _method(outer, function, _stamp(function.__code__.co_filename))


@functools.cache
def _method(outer: Any, function: FunctionType, stamp: tuple[int, int] | None) -> Method | None:
    code = function.__code__
    running = _running(code.co_filename, stamp).get((code.co_name, code.co_firstlineno))
    if running is None or not _same(running[1], code):
        return None
    tree = running[0]
    if not (*tree.args.posonlyargs, *tree.args.args) or _has_private_names(tree):
        return None
    if outer is not function or tree.decorator_list:
        try:
            again = _decorated(function, tree.decorator_list, function)
        except Exception:  # a name of the class's body, for instance, which cannot be read here
            return None
        if _layers(again) != _layers(outer):
            return None  # it was wrapped after its definition, which a compiled method would lose
    return Method(function, tree)


def _has_private_names(tree: ast.FunctionDef) -> bool:
    """Return whether a method has names such as `__scale`, which Python only resolves inside of the class."""
    names = (value for node in ast.walk(tree) for _, value in ast.iter_fields(node) if isinstance(value, str))
    return any(re.fullmatch(r"__\w*(?<!__)", name) is not None for name in names)


def _layers(function: Any) -> list[Any]:
    """Return the code of the functions around a function, outermost first."""
    codes = []
    while hasattr(function, "__wrapped__"):
        codes.append(getattr(function, "__code__", None))
        function = function.__wrapped__
    return codes


def _stamp(file: str) -> tuple[int, int] | None:
    """Return what changes when a file does, or None if there is no such file, as in notebooks."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


@functools.cache
def _running(file: str, stamp: tuple[int, int] | None) -> dict[tuple[str, int], tuple[ast.FunctionDef, CodeType]]:
    """Return the functions in a file, as syntax trees and compiled, by name and first line."""
    if stamp is not None:
        linecache.checkcache(file)
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
        codes = [compile(tree, file, "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):
        return {}
    for code in codes:  # which grows
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    at = {(code.co_name, code.co_firstlineno): code for code in codes}
    found: dict[tuple[str, int], tuple[ast.FunctionDef, CodeType]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            place = (node.name, min([node.lineno, *(each.lineno for each in node.decorator_list)]))
            if place in at:
                found[place] = node, at[place]
    return found


def compiled(changed: Method) -> Any:
    """Return the function of a changed tree, with the globals, the defaults and the decorators of the original."""
    original, tree = changed
    namespace: dict[str, Any] = {}
    decorators, tree.decorator_list = tree.decorator_list, []
    exec(_compile(changed), original.__globals__, namespace)
    function = namespace[tree.name]
    function.__defaults__, function.__kwdefaults__ = original.__defaults__, original.__kwdefaults__
    function.__doc__, function.__qualname__ = original.__doc__, original.__qualname__
    return _decorated(function, decorators, original)


def _decorated(function: Any, decorators: list[ast.expr], original: Any) -> Any:
    """Return a function with the decorators of another."""
    for decorator in reversed(decorators):
        source = compile(ast.Expression(decorator), original.__code__.co_filename, "eval")
        function = eval(source, original.__globals__)(function)
    return function


def _compile(changed: Method) -> CodeType:
    original, tree = changed
    arguments = tree.args
    for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if each is not None:
            each.annotation = None  # may name what is only imported for type checkers
    tree.returns = None
    # The values are those of the original; only their number counts here.
    arguments.defaults = [ast.copy_location(ast.Constant(None), each) for each in arguments.defaults]
    arguments.kw_defaults = [each and ast.copy_location(ast.Constant(None), each) for each in arguments.kw_defaults]
    module = ast.fix_missing_locations(ast.Module([tree], []))
    return compile(module, original.__code__.co_filename, "exec", dont_inherit=True)


def _same(one: CodeType, other: CodeType) -> bool:
    names = one.co_names == other.co_names and one.co_varnames == other.co_varnames
    return one.co_code == other.co_code and names and _same_constants(one.co_consts, other.co_consts)


def _same_constants(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(
        _same(each, its) if isinstance(each, CodeType) and isinstance(its, CodeType) else _same_constant(each, its)
        for each, its in zip(one, other, strict=True)
    )


def _same_constant(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return _same_constants(one, other)
    return type(one) is type(other) and (one == other if isinstance(one, frozenset) else repr(one) == repr(other))
