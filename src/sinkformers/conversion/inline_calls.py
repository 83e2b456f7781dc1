"""Calls in the code of a module: SoftMax, products, dropout; names are resolved to the objects they stand for."""

import ast
import copy
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinkformers.conversion.inline_source import Method, method

_DROPOUT = (F.dropout, torch.dropout)
_MATMUL = (torch.matmul, torch.bmm)
SOFTMAX = (F.softmax, torch.softmax, torch.special.softmax)


class Site(NamedTuple):
    """A SoftMax call: its node, the node of the scores, and those of dimension, dtype and mask, if it has them."""

    call: ast.Call
    scores: ast.expr
    dim: int | None
    dtype: ast.expr | None = None
    mask: ast.expr | None = None


def softmax_calls(module: nn.Module, found: Method) -> list[Site]:
    """Return the SoftMax calls of a method in the order of the tree, whatever axis they are over."""
    sites = []
    for node in ast.walk(found.tree):
        site = _site(node, module, found) if isinstance(node, ast.Call) else None
        if site is not None:
            sites.append(site)
    return sites


def _site(node: ast.Call, module: nn.Module, found: Method) -> Site | None:
    function = resolve(node.func, module, found)
    keywords = {each.arg: each.value for each in node.keywords}
    given = list(node.args)
    if function in SOFTMAX and given:
        known = len(given) <= 2 and set(keywords) <= {
            "dim",
            "dtype",
            "_stacklevel",
        }  # the third is not the same in both
        dim = keywords.get("dim", given[1] if len(given) == 2 else None)
        return Site(node, given[0], number(dim) if known else None, keywords.get("dtype"))
    if _is_softmax_module(function) and len(given) == 1:
        return Site(node, given[0], function.dim)
    if isinstance(node.func, ast.Call) and resolve(node.func.func, module, found) is nn.Softmax and len(given) == 1:
        dims = [*node.func.args, *(each.value for each in node.func.keywords)]
        return Site(node, given[0], number(dims[0]) if dims else None)
    if isinstance(node.func, ast.Attribute) and function is None and node.func.attr == "softmax":
        dim = keywords.get("dim", given[0] if given else None)
        known = len(given) <= 2 and set(keywords) <= {"dim", "dtype"}
        dtype = keywords.get("dtype", given[1] if len(given) == 2 else None)
        return Site(node, node.func.value, number(dim) if known else None, dtype)
    owner = getattr(function, "__self__", None)  # DeBERTa's SoftMax with a mask, an autograd function
    if isinstance(owner, type) and owner.__name__ == "XSoftmax" and len(given) == 3:
        return Site(node, given[0], number(given[2]), mask=given[1])
    return None


def _is_softmax_module(function: Any) -> TypeGuard[nn.Softmax]:
    """Return whether a module computes SoftMax as torch's does: a subclass may have a forward of its own."""
    plain = isinstance(function, nn.Softmax) and type(function).forward is nn.Softmax.forward
    return plain and "forward" not in vars(function)


def resolve(node: ast.expr, module: nn.Module, found: Method) -> Any:
    """Return the object that a name or an attribute of `self` or of a global stands for; None for anything local."""
    if isinstance(node, ast.Name):
        local = node.id in found.function.__code__.co_varnames
        return module if node.id == found.own else None if local else found.function.__globals__.get(node.id)
    if isinstance(node, ast.Attribute):
        base = resolve(node.value, module, found)
        return None if base is None or isinstance(base, Tensor) else getattr(base, node.attr, None)
    return None


def keeps_weights(function: Any) -> bool:
    """Return whether a function returns weights where it is given them: dropout, or nothing at all."""
    if function in _DROPOUT or isinstance(function, nn.Identity):
        return True
    return isinstance(function, nn.Module) and "Dropout" in type(function).__name__


def is_matmul(function: Any) -> bool:
    """Return whether a function multiplies two tensors, or is a submodule that does nothing else."""
    if function in _MATMUL:
        return True
    if not isinstance(function, nn.Module) or list(function.children()) or list(function.parameters()):
        return False
    found = method(type(function), "forward")
    last = None if found is None else found.tree.body[-1]
    if found is None or not isinstance(last, ast.Return) or not isinstance(last.value, ast.Call):
        return False
    given = [each.id for each in last.value.args if isinstance(each, ast.Name)]
    return resolve(last.value.func, function, found) is torch.matmul and tuple(given) == found.parameters


def number(node: ast.expr | None) -> int | None:
    """Return a whole number that is written out, or None."""
    try:
        value = None if node is None else ast.literal_eval(copy.deepcopy(node))
    except ValueError:
        return None
    return value if type(value) is int else None
