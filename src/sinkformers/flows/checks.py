"""Validation of arguments: messages name the argument, what was expected, what was given, and a remedy."""

import torch
from torch import Tensor

# Matrices that are symmetric or singular up to this many roundings count as such.
ROUNDING = 1e3


def slack(matrix: Tensor) -> float:
    """Return how large rounding can make an entry that should be zero."""
    return ROUNDING * torch.finfo(matrix.dtype).eps * max(matrix.abs().max().item(), torch.finfo(matrix.dtype).tiny)


def _with_values(caller: str, name: str, value: Tensor) -> None:
    if isinstance(value, Tensor) and value.is_meta:
        raise ValueError(f"{caller}: {name} must hold values; got a tensor on meta, which has none.")


def points(caller: str, name: str, value: Tensor) -> None:
    """Raise unless the points are (n, d), n ≥ 1, finite, in float32 or float64."""
    _with_values(caller, name, value)
    if not isinstance(value, Tensor) or value.dtype not in (torch.float32, torch.float64):
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{caller}: {name} must be a tensor of float32 or float64; got {got}. Convert it: .double().")
    if value.dim() != 2 or 0 in value.shape:
        raise ValueError(f"{caller}: {name} must have shape (n, d), n ≥ 1, d ≥ 1; got {tuple(value.shape)}.")
    lost = ~value.detach().isfinite().all(-1)
    if lost.any():
        which = int(lost.nonzero()[0])
        raise ValueError(
            f"{caller}: {name} must be finite, but particle {which} is at {value[which].tolist()} "
            f"({int(lost.sum())} of {len(lost)} are not finite)."
        )


def weights(caller: str, value: Tensor, n: int) -> None:
    """Raise unless the weights are (n,), non-negative, with sum 1."""
    if value.shape != (n,):
        raise ValueError(f"{caller}: weights must have shape ({n},), one per particle; got {tuple(value.shape)}.")
    if not (value >= 0).all():
        raise ValueError(f"{caller}: weights must be non-negative; the smallest is {value.min().item():.6g}.")
    total = value.double().sum().item()
    if not abs(total - 1) <= (2 + n) * torch.finfo(value.dtype).eps:
        raise ValueError(f"{caller}: weights must sum to 1; their sum is {total:.6g}. Divide them by weights.sum().")


def matrix(caller: str, name: str, value: Tensor, shape: tuple[int | None, int | None]) -> None:
    """Raise unless `value` is a finite matrix of this shape; None in `shape` allows any size."""
    _with_values(caller, name, value)
    fits = isinstance(value, Tensor) and value.dim() == 2
    if not fits or any(want not in (None, have) for have, want in zip(value.shape, shape, strict=True)):
        expected = ", ".join("any" if want is None else str(want) for want in shape)
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{caller}: {name} must be a matrix of shape ({expected}); got {got}.")
    if not value.isfinite().all():
        raise ValueError(f"{caller}: {name} must be finite; it has {int((~value.isfinite()).sum())} other entries.")


def symmetric(caller: str, name: str, value: Tensor) -> None:
    """Raise unless the matrix is symmetric up to rounding."""
    gap = (value - value.mT).abs().max().item()
    if gap > slack(value):
        raise ValueError(
            f"{caller}: {name} must be symmetric; it differs from its transpose by up to {gap:.3g}. "
            "W_Q = W_K makes W_QᵀW_K symmetric."
        )


def positive_definite(caller: str, name: str, value: Tensor) -> None:
    """Raise unless the matrix is symmetric with eigenvalues above rounding."""
    symmetric(caller, name, value)
    lowest = torch.linalg.eigvalsh(value)[0].item()
    if lowest <= slack(value):
        kind = "singular" if lowest >= -slack(value) else "indefinite or negative"
        raise ValueError(
            f"{caller}: {name} must be positive definite, but it is {kind}: its lowest eigenvalue is {lowest:.3g}."
        )


def invertible(caller: str, name: str, value: Tensor) -> None:
    """Raise unless the matrix is square with singular values above rounding."""
    if value.shape[0] != value.shape[1]:
        raise ValueError(f"{caller}: {name} must be square and invertible; got shape {tuple(value.shape)}.")
    lowest = torch.linalg.svdvals(value)[-1].item()
    if lowest <= slack(value):
        raise ValueError(f"{caller}: {name} must be invertible, but its lowest singular value is {lowest:.3g}.")
