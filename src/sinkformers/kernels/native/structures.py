"""The structures of `arguments.h`, each the owner of the tensors whose addresses it holds.

Their fields are those that the compiled library states, so that the two cannot disagree about a layout. An address is
taken in one place only, `Structure._address`, and the tensor it belongs to lives as long as the structure. The kernels
get the structure, so nothing they read or write can be freed before they return.
"""

import ctypes
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

# Raised with every change of what a field means; `library.cpp` states the same number.
INTERFACE = 3

_int = ctypes.c_int64
_pointer = ctypes.c_void_p
_real = ctypes.c_double


class Strided(ctypes.Structure):
    """Address of a tensor (b, h, i, …), and its strides in elements."""

    _fields_ = [("data", _pointer), *((name, _int) for name in "bhij")]


_KINDS = {"int": _int, "real": _real, "bits": ctypes.c_uint64, "strided": Strided, "data": _pointer}


class Structure(ctypes.Structure):
    """Arguments of a kernel. The methods below set tensors and keep them alive; None leaves a null pointer."""

    names: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, **numbers: Any) -> None:
        self._check(numbers)
        super().__init__(**numbers)
        self._tensors: list[Tensor] = []

    def _check(self, given: Mapping[str, Any]) -> None:
        """Raise for a name that the library does not state, where ctypes would set an attribute that it ignores."""
        if not self.names.issuperset(given):
            unknown = sorted(set(given) - self.names)
            raise AttributeError(f"sinkformers: the compiled kernels have no argument {', '.join(unknown)}.")

    def _address(self, tensor: Tensor) -> int:
        self._tensors.append(tensor)
        return tensor.data_ptr()

    def write(self, **tensors: Tensor | None) -> None:
        """Set pointers to the outputs, which must lie in order: a copy would be written in their place."""
        self._check(tensors)
        for name, tensor in tensors.items():
            if tensor is not None:
                assert tensor.is_contiguous(), name
                assert not tensor.is_neg(), name
                setattr(self, name, self._address(tensor))

    def read(self, **tensors: Tensor | None) -> None:
        """Set pointers to inputs, copied where they do not lie in order."""
        self._check(tensors)
        for name, tensor in tensors.items():
            if tensor is not None:
                setattr(self, name, self._address(_plain(tensor).contiguous()))

    def read_strided(self, **tensors: Tensor | None) -> None:
        """Set strided fields to inputs (b, h, i) or (b, h, i, j), with stride 0 along axes of size 1, which repeat."""
        self._check(tensors)
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


def structure(name: str, text: str) -> type[Structure]:
    """The structure that a library states: one field per line, its kind and its name."""
    fields = [(field, _KINDS[kind]) for kind, field in (line.split() for line in text.splitlines())]
    return type(name, (Structure,), {"_fields_": fields, "names": frozenset(field for field, _ in fields)})


def stated_structures(library: ctypes.CDLL) -> tuple[type[Structure], type[Structure]] | str:
    """The structures of attention and of the operator as a compiled library states them, or why it cannot be called."""
    remedy = "reinstall sinkformers, so that both are built from the same sources"
    different = "it was built from other sources than this Python package"
    try:
        library.sinkformers_structure.restype = ctypes.c_char_p
        library.sinkformers_smallest_exponent.restype = ctypes.c_double
        number = library.sinkformers_interface()
    except AttributeError:
        return f"{different}, and states no interface; {remedy}"
    if number != INTERFACE:
        return f"{different} (interface {number}, expected {INTERFACE}); {remedy}"
    names = ("AttentionArguments", "OperatorArguments")
    attention, operator = (structure(name, library.sinkformers_structure(at).decode()) for at, name in enumerate(names))
    for at, kind in enumerate((attention, operator)):
        if ctypes.sizeof(kind) != library.sinkformers_size(at):
            sizes = f"{names[at]} takes {library.sinkformers_size(at)} bytes, not {ctypes.sizeof(kind)}"
            return f"{different} ({sizes}); {remedy}"
    return attention, operator
