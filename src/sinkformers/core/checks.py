"""Checks of arguments: errors name the argument, what was expected, what was given, and how to fix it.

Types and shapes are checked at once. Values (masses, a tensor `tau`) are read inside registered operators, so that
they can be traced, and on accelerators they are asserted without synchronising.
"""

import math
import operator
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from sinkformers.core.registration import define, differentiable, register_vmap

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def dense(caller: str, name: str, value: Tensor) -> None:
    """A tensor that is neither sparse nor nested."""
    if value.is_nested:
        raise TypeError(
            f"{caller}: {name} must be a dense tensor; got a nested one. Pad it, "
            f"torch.nested.to_padded_tensor({name}, 0.0), and mask the padding."
        )
    if value.layout is not torch.strided:
        raise TypeError(
            f"{caller}: {name} must be a dense tensor; got one of layout {value.layout}. Convert it: {name}.to_dense()."
        )


def floating(caller: str, name: str, value: Tensor) -> None:
    """A dense tensor of one of the four dtypes in which there is arithmetic: float8 is for storage only."""
    dense(caller, name, value)
    if value.dtype not in DTYPES:
        advice = "Complex numbers are not supported." if value.is_complex() else f"Convert it, as with {name}.float()."
        raise TypeError(f"{caller}: {name} must be float16, bfloat16, float32 or float64; got {value.dtype}. {advice}")


def one_device(caller: str, name: str, like: Tensor, **others: Any) -> None:
    """All tensors on the device of `like`, the argument `name`; what is no tensor is passed over."""
    device = like.device
    for other, value in others.items():
        if isinstance(value, Tensor) and value.device != device:
            raise ValueError(
                f"{caller}: {other} must be on the device of {name}, {device}; got {value.device}. "
                f"Move it: {other}.to({name}.device)."
            )


def tensor(caller: str, name: str, value: Any, *, min_dim: int) -> None:
    """A dense floating-point tensor of at least `min_dim` axes."""
    if (
        isinstance(value, Tensor)
        and value.dtype in DTYPES
        and value.layout is torch.strided
        and not value.is_nested
        and value.dim() >= min_dim
    ):  # the tests below take longer
        return
    if not isinstance(value, Tensor):
        raise TypeError(f"{caller}: {name} must be a torch.Tensor; got {type(value).__name__}.")
    floating(caller, name, value)
    if value.dim() < min_dim:
        raise ValueError(
            f"{caller}: {name} must have at least {min_dim} axes, the last two being (…, n, m) or (…, n, d); "
            f"got shape {tuple(value.shape)}."
        )


def iterations(caller: str, value: Any) -> int | float:
    """`n_iters`, as a Python integer, or as `math.inf` for the limit."""
    if type(value) is not int and isinstance(value, Real) and value == math.inf:
        return math.inf
    meaning = "(1 is SoftMax, odd counts end on rows) or math.inf"
    return _count(caller, "n_iters", value, meaning, "The paper uses 3 for text and images, 21 for point clouds.")


def most_iterations(caller: str, value: Any) -> int:
    """`max_iters`, as a Python integer."""
    return _count(caller, "max_iters", value, "(the most products with the kernel)", "Leave it out for 1000.")


def _count(caller: str, name: str, value: Any, meaning: str, remedy: str) -> int:
    """A whole number that is no bool. While tracing it may be symbolic, and then cannot be put into a sentence."""
    if type(value) is int and 1 <= value < 2**63:  # the test below takes longer
        return value
    if type(value) is int and value >= 2**63:
        raise ValueError(
            f"{caller}: {name} must be below 2**63 {meaning}; got a number of {value.bit_length()} bits. {remedy}"
        )
    is_number = isinstance(value, Real)
    try:
        count = operator.index(value) if is_number and not isinstance(value, bool) else 0  # pyright: ignore
    except TypeError:
        count = 0
    if count < 1:
        kind = ValueError if is_number else TypeError
        raise kind(f"{caller}: {name} must be a whole number ≥ 1 {meaning}; got {value!r}. {remedy}")
    return count


def size(caller: str, name: str, value: Any) -> int:
    """A number of bytes that a kernel can be given."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{caller}: {name} must be a whole number of bytes; got {value!r}.")
    if not 0 <= value < 2**63:
        raise ValueError(f"{caller}: {name} must be from 0 to 2**63 - 1 bytes; got {value!r}.")
    return value


def positive(caller: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{caller}: {name} must be a positive number; got {value!r}.")
    if not 0 < float(value) < math.inf:
        raise ValueError(f"{caller}: {name} must be a positive number; got {value!r}.")
    return float(value)


def limit_tolerance(caller: str, n_iters: float, tol: Any) -> float:
    """`tol` at `n_iters=math.inf`, where 1e-3 is the default; a finite `n_iters` takes none."""
    if n_iters != math.inf:
        if tol is not None:
            raise ValueError(
                f"{caller}: tol goes with n_iters=math.inf, which iterates until it is met; got tol={tol!r} and "
                f"n_iters={n_iters}. Leave one of them out."
            )
        return 0.0
    return 1e-3 if tol is None else column_tolerance(caller, tol)


def column_tolerance(caller: str, tol: Any) -> float:
    """`tol` of a limit, as a float between 0 and 1."""
    if isinstance(tol, bool) or not isinstance(tol, Real):
        raise TypeError(f"{caller}: tol must be a number between 0 and 1; got {tol!r}.")
    if not 0 < float(tol) < 1:
        raise ValueError(f"{caller}: tol must lie between 0 and 1, as a relative error; got {tol!r}.")
    return float(tol)


def one_of(caller: str, name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{caller}: {name} must be one of {', '.join(map(repr, choices))}; got {value!r}.")


def number(caller: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{caller}: {name} must be a number; got {value!r}.")
    if not -math.inf < float(value) < math.inf:  # math.isfinite cannot be traced
        raise ValueError(f"{caller}: {name} must be a finite number; got {value!r}.")
    return float(value)


def probability(caller: str, name: str, value: Any) -> float:
    if type(value) is float and 0 <= value <= 1:
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{caller}: {name} must be a number from 0 to 1; got {value!r}.")
    if not 0 <= float(value) <= 1:
        raise ValueError(f"{caller}: {name} must be a number from 0 to 1; got {value!r}.")
    return float(value)


def mask(caller: str, name: str, value: Any, shape: torch.Size, axes: str, *, given: torch.Size | None = None) -> None:
    """A boolean tensor that broadcasts to `shape`; `given` is the shape that the user passed, where it was changed."""
    if not isinstance(value, Tensor) or value.dtype != torch.bool:
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(
            f"{caller}: {name} must be a boolean tensor, True where an entry is valid; got {got}. "
            f"For a mask of zeros and ones pass {name}.bool()."
        )
    dense(caller, name, value)
    broadcasts(caller, name, value, shape, axes, given=given)


def broadcasts(
    caller: str, name: str, value: Tensor, shape: torch.Size, axes: str, *, given: torch.Size | None = None
) -> None:
    last = shape[max(0, len(shape) - value.dim()) :]
    # Dynamo of older releases takes every zip for a strict one.
    fits = len(last) == value.dim() and all(have in (1, want) for have, want in zip(value.shape, last, strict=True))
    if not fits:
        raise ValueError(
            f"{caller}: {name} must broadcast to {axes} = {tuple(shape)}; got shape {tuple(given or value.shape)}. "
            "Insert axes of size 1 where it is to be repeated."
        )


def setting(caller: str, tau: Any, *, zero: bool = True) -> float | Tensor:
    """`tau` as a module keeps it: a number from 0 to 1, or a floating-point tensor whose values are read when used."""
    if type(tau) is float and 0 < tau <= 1:
        return tau
    if isinstance(tau, Tensor):
        floating(caller, "tau", tau)
        return tau
    if isinstance(tau, bool) or not isinstance(tau, Real):
        raise TypeError(f"{caller}: tau must be a number or a tensor; got {tau!r}.")
    if not 0 <= float(tau) <= 1 or (tau == 0 and not zero):
        raise ValueError(_tau_advice(caller, zero, repr(tau)))
    return float(tau)


def relaxation(caller: str, tau: Any, name: str, like: Tensor, *, zero: bool = True) -> float | Tensor:
    """`tau` as a call uses it: a tensor has to broadcast to the leading axes of `like`, the argument `name`, to be on
    its device, and to hold values from 0 to 1. A tensor without axes may stay on the CPU, as in torch's operations."""
    tau = setting(caller, tau, zero=zero)
    if isinstance(tau, float):
        return tau
    if tau.dim() or tau.device.type != "cpu":
        one_device(caller, name, like, tau=tau)
    broadcasts(caller, "tau", tau, like.shape[:-2], "the leading axes")
    return checked_tau(tau, caller, zero)


def _tau_advice(caller: str, zero: bool, got: str) -> str:
    if zero:
        return f"{caller}: tau must lie in [0, 1] (0 is SoftMax, 1 is Sinkhorn); got {got}."
    return (
        f'{caller}: gradient="implicit" needs tau in (0, 1], since 0 is SoftMax and has no column step to invert; '
        f'got {got}. gradient="unrolled", with a finite n_iters, takes 0 too.'
    )


def mass(caller: str, name: str, value: Any, shape: torch.Size) -> Tensor:
    """Row or column masses (..., n): non-negative, sum 1, without a gradient."""
    tensor(caller, name, value, min_dim=1)
    if value.requires_grad:
        raise ValueError(
            f"{caller}: {name} gets no gradient, but requires one. Pass {name}.detach(); to learn it, write the steps "
            "with masses (docs/core.md) in torch's own operations."
        )
    broadcasts(caller, name, value, shape, "the masses' shape")
    if value.shape[-1:] != shape[-1:]:
        raise ValueError(f"{caller}: {name} must have {shape[-1]} entries along its last axis; got {value.shape[-1]}.")
    return checked_mass(value, caller, name)


def _require(holds: Tensor, message: str) -> None:
    if holds.device.type == "cpu":
        if not holds.item():
            raise ValueError(message)
    else:
        torch._assert_async(holds, message)  # pyright: ignore[reportPrivateImportUsage]


def _check_tau(tau: Tensor, caller: str, zero: bool) -> Tensor:
    inside = ((tau >= 0) if zero else (tau > 0)) & (tau <= 1)
    _require(inside.all(), _tau_advice(caller, zero, _shown(tau)))
    return tau.clone(memory_format=torch.contiguous_format)


def _check_mass(mass: Tensor, caller: str, name: str) -> Tensor:
    _require((mass >= 0).all(), f"{caller}: {name} must be non-negative; got {_shown(mass)}.")
    # Masses divided by their sum, in their own dtype, are off by two roundings of eps/2 each, that of the sum and that
    # of the quotient; and by those of adding in float32 or better.
    summed = torch.float64 if mass.dtype == torch.float64 else torch.float32
    tolerance = torch.finfo(mass.dtype).eps + mass.shape[-1] * torch.finfo(summed).eps
    total = mass.to(torch.float64 if mass.device.type == "cpu" else torch.float32).sum(-1)
    _require(
        ((total - 1).abs() <= tolerance).all(),
        f"{caller}: {name} must sum to 1 along its last axis; its sums are {_shown(total)}, off by "
        f"{_shown((total - 1).abs())}. Divide it by {name}.sum(-1, keepdim=True).",
    )
    return mass.clone(memory_format=torch.contiguous_format)


def _shown(values: Tensor) -> str:
    """The range of the values, for a message; left out on an accelerator, where reading would synchronise."""
    if values.device.type != "cpu":
        return "values outside it"
    if values.numel() == 0:
        return "nothing"
    low, high = values.min().item(), values.max().item()
    return f"{low:.6g}" if low == high else f"values from {low:.6g} to {high:.6g}"


def _copy(tensor: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


_TAU_OPERATOR = define("checked_tau", _check_tau, _copy)
checked_mass = define("checked_mass", _check_mass, _copy)
register_vmap(_TAU_OPERATOR)
register_vmap(checked_mass)
checked_tau = differentiable(
    _TAU_OPERATOR,
    _check_tau,
    lambda ctx, inputs, output: None,
    lambda ctx, grad: (grad, None, None),
    lambda ctx, tangent, *_: tangent.clone(),
)
