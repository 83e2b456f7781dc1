"""Small calls that the same code serves as a large one, with random numbers in their tensors."""

import itertools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from sinkformers.core.description import Description, Field, describe

ROWS, COLUMNS = (131, 37, 277, 1031), (137, 41, 283, 547, 1033)
"""Numbers of queries and keys, in the order in which they are tried: beyond one tile, and no multiple of any."""
MOST_SCORES = 1031 * 1033
FEW_STEPS = 5
SEED = 20220301


class NoSample(Exception):
    """No small call is of the kind that was asked for."""


def sample_like(call: Any, kind: Callable[[Any], Hashable]) -> Any:
    """A small call of the same kind: on the same device, of the same dtypes, with the same optional tensors.

    The numbers come from a generator of its own.
    """
    description = describe(type(call))
    given = axes_of(call)
    steps = dict.fromkeys((_few(call), getattr(call, "n_iters", None)))
    for m, n, n_iters in itertools.product((*COLUMNS, given["m"]), (*ROWS, given["n"]), steps):
        if n * m > MOST_SCORES:
            continue
        sizes = {**given, "n": n, "m": m}
        if n_iters is not None:
            sizes |= {"row steps": (n_iters + 1) // 2, "column steps": n_iters // 2}
        sample = _draw(description, call, sizes, n_iters)
        if kind(sample) == kind(call):
            return sample
    raise NoSample("no small call is served by the same code")


def _few(call: Any) -> int | None:
    """A small number of iterations that ends as that of the call does, on rows or on columns."""
    n_iters = getattr(call, "n_iters", None)
    return n_iters if n_iters is None or n_iters <= FEW_STEPS else FEW_STEPS - (FEW_STEPS - n_iters) % 2


def axes_of(call: Any) -> dict[str, int]:
    """The sizes of the last axes of the tensors that every call has, by name."""
    sizes: dict[str, int] = {}
    for field in describe(type(call)).tensors:
        if not field.optional and field.role is not None and field.role.axes:
            shape = getattr(call, field.name).shape
            sizes |= zip(field.role.axes, shape[len(shape) - len(field.role.axes) :], strict=True)
    return sizes


def _draw(description: Description, call: Any, sizes: dict[str, int], n_iters: int | None) -> Any:
    generator, device = torch.Generator("cpu").manual_seed(SEED), call[0].device
    changed: dict[str, Any] = {
        field.name: _tensor(field, getattr(call, field.name), sizes, generator, device) for field in description.tensors
    }
    changed |= {"n_iters": n_iters, "implicit": False, "scale": sizes.get("d", 1) ** -0.5, "tol": 1e-4}
    if getattr(call, "dropout_p", 0) > 0:
        changed |= {"dropout_p": 0.25, "seed": torch.tensor(SEED)}
    kind = description.kind
    return kind(*(changed.get(field.name, getattr(call, field.name)) for field in description.fields))


def _tensor(
    field: Field, given: Tensor | None, sizes: dict[str, int], generator: torch.Generator, device: torch.device
) -> Tensor | None:
    """Random numbers in place of a tensor. Axes along which it repeats keep their size of 1."""
    if given is None or field.role is None or field.role.axes is None:
        return given
    axes = field.role.axes
    lead, last = given.shape[: given.dim() - len(axes)], given.shape[given.dim() - len(axes) :]
    repeats = [field.optional and size == 1 for size in last]
    shape = [max(1, min(size, 2)) for size in lead]
    shape += [1 if repeat else sizes[axis] for axis, repeat in zip(axes, repeats, strict=True)]
    return _numbers(shape, len(axes), given.dtype, generator).to(device)


def _numbers(shape: list[int], axes: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Four of five entries of a mask are valid; numbers per matrix or token are positive, since they may be shares."""
    uniform = torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")
    if dtype == torch.bool:
        valid = uniform < 0.8
        valid[..., 0] = True
        return valid
    if not dtype.is_floating_point:
        return torch.arange(uniform.numel(), device="cpu").reshape(shape).to(dtype)
    if axes < 2:
        return (0.5 + 0.5 * uniform).to(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").mul_(1.5).to(dtype)
