"""The structures of `arguments.h`, each the owner of the tensors whose addresses it holds.

An address is taken in one place only, `Structure._address`, and the tensor it belongs to lives as long as
the structure. The kernels get the structure, so nothing they read or write can be freed before they return.
"""

import ctypes
from typing import Any

from torch import Tensor

# Raised with every change of a structure or of what one of its fields means; `library.cpp` states the same number.
INTERFACE = 2

_int = ctypes.c_int64
_pointer = ctypes.c_void_p
_real = ctypes.c_double


class Strided(ctypes.Structure):
    """Address of a tensor (b, h, i, …), and its strides in elements."""

    _fields_ = [("data", _pointer), *((name, _int) for name in "bhij")]


class Structure(ctypes.Structure):
    """Arguments of a kernel. The methods below set tensors and keep them alive; None leaves a null pointer."""

    def __init__(self, **numbers: Any) -> None:
        super().__init__(**numbers)
        self._tensors: list[Tensor] = []

    def _address(self, tensor: Tensor) -> int:
        self._tensors.append(tensor)
        return tensor.data_ptr()

    def write(self, **tensors: Tensor | None) -> None:
        """Set pointers to the outputs, which must lie in order: a copy would be written in their place."""
        for name, tensor in tensors.items():
            if tensor is not None:
                assert tensor.is_contiguous(), name
                assert not tensor.is_neg(), name
                setattr(self, name, self._address(tensor))

    def read(self, **tensors: Tensor | None) -> None:
        """Set pointers to inputs, copied where they do not lie in order."""
        for name, tensor in tensors.items():
            if tensor is not None:
                setattr(self, name, self._address(_plain(tensor).contiguous()))

    def read_strided(self, **tensors: Tensor | None) -> None:
        """Set strided fields to inputs (b, h, i) or (b, h, i, j), with stride 0 along axes of size 1, which repeat."""
        for name, tensor in tensors.items():
            if tensor is not None:
                tensor = _plain(tensor)
                steps = (0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
                setattr(self, name, Strided(self._address(tensor), *steps))

    def read_tokens(self, **tensors: Tensor) -> None:
        """Set strided fields to tokens (b, h, i, features), copied where their features do not lie side by side."""
        for name, tensor in tensors.items():
            tensor = _plain(tensor)
            together = tensor.stride(-1) == 1 or tensor.shape[-1] == 1
            self.read_strided(**{name: tensor if together else tensor.contiguous()})


def _plain(tensor: Tensor) -> Tensor:
    """The tensor with its values in memory: a negative view stores the opposite of what it shows."""
    return tensor.resolve_neg()


class AttentionArguments(Structure):
    _fields_ = [
        *((name, _int) for name in ["batch", "heads", "n", "m", "d", "e", "n_iters", "threads", "workspace"]),
        *((name, Strided) for name in ["query", "key", "value", "bias", "entries", "queries", "keys", "tau"]),
        *((name, _real) for name in ["scale", "dropout", "bias_floor"]),
        ("seed", ctypes.c_uint64),
        *((name, _int) for name in ["l2", "drops"]),
        ("d_out", Strided),
        *(
            (name, _pointer)
            for name in ["out", "u", "s", "r", "safe", "d_query", "d_key", "d_value", "d_bias", "d_tau"]
        ),
    ]


class OperatorArguments(Structure):
    _fields_ = [
        *((name, _int) for name in ["batch", "n", "m", "n_iters", "threads"]),
        *((name, _pointer) for name in ["scores", "row_weight", "col_target", "tau", "d_weights"]),
        *((name, _pointer) for name in ["weights", "u", "s", "r", "safe", "d_scores", "d_tau"]),
    ]


def disagreement(library: ctypes.CDLL) -> str | None:
    """Why a compiled library cannot be called with these structures, or None where it can."""
    remedy = "reinstall sinkformers, so that both are built from the same sources"
    try:
        stated = library.sinkformers_interface
    except AttributeError:
        return f"it was built from other sources than this Python package, and states no interface; {remedy}"
    expected = (INTERFACE, *(ctypes.sizeof(kind) for kind in (Strided, AttentionArguments, OperatorArguments)))
    found = tuple(stated(part) for part in range(len(expected)))
    if found == expected:
        return None
    return (
        "it was built from other sources than this Python package (interface and sizes of its structures are "
        f"{found}, expected {expected}); {remedy}"
    )
