"""The source of a method as a syntax tree, and a method compiled from a changed tree.

A tree is only used if its file compiles to the very bytecode of the method: otherwise it is not what is running.
"""

import ast
import functools
import inspect
import linecache
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
        return self.tree.args.args[0].arg

    @property
    def parameters(self) -> tuple[str, ...]:
        arguments = self.tree.args
        return tuple(each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))[1:]


@functools.cache
def method(kind: type[nn.Module], name: str) -> Method | None:
    """Return a method of a class, or None if its source is not available, or is not what is running."""
    function: Any = inspect.unwrap(getattr(kind, name, None) or _nothing)
    code = getattr(function, "__code__", None)
    if not isinstance(function, FunctionType) or code is None or function is _nothing or code.co_freevars:
        return None
    running = _running(code.co_filename).get((code.co_name, code.co_firstlineno))
    if running is None or not _same(running[1], code) or not running[0].args.args:
        return None
    return Method(function, running[0])


@functools.cache
def _running(file: str) -> dict[tuple[str, int], tuple[ast.FunctionDef, CodeType]]:
    """Return the functions in a file, as syntax trees and compiled, by name and first line."""
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
    for decorator in reversed(decorators):
        source = compile(ast.Expression(decorator), original.__code__.co_filename, "eval")
        function = eval(source, original.__globals__)(function)
    return function


def _nothing() -> None:
    """Stand for a method that does not exist."""


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
    return one.co_code == other.co_code and one.co_names == other.co_names and one.co_varnames == other.co_varnames
