"""The contents of masked tokens change no valid output and no gradient, for every public name that takes a mask.

The cases are compared with the public names and their arguments, so that none is missing.
"""

import inspect
import math
import types
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import sinkformers
from sinkformers import attention, core, models, modules
from tests.masked_cases import CASES, Fill

FILLINGS = [0.0, 1e30, math.nan, math.inf, -math.inf]


def callables() -> Iterator[tuple[str, types.FunctionType]]:
    """Yield the public functions and methods of this package that compute with tensors.

    `forward` has the name of its module. `tune` passes its arguments on, and returns times.
    """
    for package in (sinkformers, core, attention, modules, models):
        for name in package.__all__:
            thing = getattr(package, name)
            if inspect.isfunction(thing) and name != "tune":
                yield name, thing
            elif inspect.isclass(thing) and issubclass(thing, nn.Module):
                for method, function in inspect.getmembers(thing, inspect.isfunction):
                    if not method.startswith("_") and function.__module__.startswith("sinkformers"):
                        yield name if method == "forward" else f"{name}.{method}", function


def test_every_public_name_that_takes_a_mask_has_a_case():
    expected = {
        (name, argument)
        for name, function in callables()
        for argument, parameter in inspect.signature(function).parameters.items()
        if "mask" in argument and "Tensor" in str(parameter.annotation)
    }
    assert {(name, argument) for name, arguments, _ in CASES.values() for argument in arguments} == expected


@pytest.mark.parametrize(("n_iters", "dropout"), [(1, 0.0), (1, 0.4), (2, 0.0), (5, 0.4)])
@pytest.mark.parametrize("name", CASES)
def test_the_contents_of_masked_tokens_change_no_bit(name, n_iters, dropout):
    _, _, run = CASES[name]
    results = []
    for filling in FILLINGS:
        torch.manual_seed(1)
        out, sources = run(filled_with(filling), n_iters, dropout)
        grads = torch.autograd.grad(out.square().sum(), sources, allow_unused=True) if sources else ()
        results.append([out, *grads])
    for result in results:
        for got, expected in zip(result, results[0], strict=True):
            assert (got is None) == (expected is None)
            if got is not None:
                assert got.isfinite().all()
                assert got.equal(expected)
    assert all(grad is not None for grad in results[0])


def filled_with(filling: float) -> Fill:
    """Return a function that fills masked tokens (…, n, d), or masked token ids (…, n)."""

    def fill(x: Tensor, valid: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x.masked_fill(~valid, 3 if math.isfinite(filling) else -7)  # −7 is not a token id
        masked = ~valid if x.shape == valid.shape else ~valid[..., None]
        return x.masked_fill(masked, filling).requires_grad_()

    return fill
