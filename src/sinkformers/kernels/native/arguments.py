"""The arguments of a kernel: the structures of `arguments.h`, as the compiled library states them.

A structure is packed from the values of its fields, by name, so that the two sides cannot disagree about its layout. An
address is taken in one place only, `Arguments._address`, and the tensor it belongs to lives as long as the arguments,
so that nothing a kernel reads or writes can be freed before it returns.
"""

import ctypes
import struct
from collections.abc import Mapping
from copy import copy
from typing import Any

from torch import Tensor

# Raised with every change of what a field means; `library.cpp` states the same number.
INTERFACE = 8

# How the values of each kind are packed; a strided tensor is its address and its strides in elements along b, h, i, j.
_KINDS = {"int": "q", "real": "d", "bits": "Q", "data": "P", "strided": "Pqqqq"}


class _Places(dict[str, int]):
    """Where the values of each field begin, by name."""

    def __missing__(self, name: str) -> int:
        raise AttributeError(f"sinkformers: the compiled kernels have no argument {name!r}.")


class Layout:
    """The fields of a structure, and how their values are packed."""

    def __init__(self, text: str) -> None:
        fields = [line.split() for line in text.splitlines()]
        self.places, count, form = _Places(), 0, "@"
        for kind, name in fields:
            self.places[name] = count
            count += len(_KINDS[kind])
            form += _KINDS[kind]
        self.packer, self.values = struct.Struct(form), [0] * count

    def filled(self, **numbers: Any) -> "Layout":
        """The layout with the values of some fields set, for all calls that have them in common."""
        filled = copy(self)
        filled.values = self.values.copy()
        for name, number in numbers.items():
            filled.values[self.places[name]] = number
        return filled


class Arguments:
    """The values of one call. A field that is not set is zero, or a null pointer.

    Tensors are read through `resolve_neg`: a negative view stores the opposite of what it shows.
    """

    def __init__(self, layout: Layout, **numbers: Any) -> None:
        self.layout, self._values, self._tensors = layout, layout.values.copy(), []
        for name, number in numbers.items():
            self._values[layout.places[name]] = number

    def packed(self) -> bytes:
        return self.layout.packer.pack(*self._values)

    def _address(self, tensor: Tensor) -> int:
        self._tensors.append(tensor)
        return tensor.data_ptr()

    def write(self, **tensors: Tensor | None) -> None:
        """Set pointers to outputs, which must be contiguous: a copy would be written in their place."""
        for name, tensor in tensors.items():
            if tensor is not None:
                assert tensor.is_contiguous(), name
                self._values[self.layout.places[name]] = self._address(tensor)

    def read(self, **tensors: Tensor | None) -> None:
        """Set pointers to inputs, copied where they are not contiguous."""
        for name, tensor in tensors.items():
            if tensor is not None:
                self._values[self.layout.places[name]] = self._address(tensor.resolve_neg().contiguous())

    def divide(self, memory: Tensor, offsets: Mapping[str, int]) -> None:
        """Set pointers to parts of one tensor, by the number of elements before each part; copied as `read` does."""
        values, places, size = self._values, self.layout.places, memory.element_size()
        address = self._address(memory.resolve_neg().contiguous())
        for name, offset in offsets.items():
            values[places[name]] = address + offset * size

    def read_strided(self, name: str, tensor: Tensor) -> None:
        """Set a strided field to an input (b, h, i) or (b, h, i, j), with stride 0 along axes of size 1."""
        place, tensor = self.layout.places[name], tensor.resolve_neg()
        shape, steps = tensor.shape, tensor.stride()
        if 1 in shape:
            steps = [0 if size == 1 else step for size, step in zip(shape, steps, strict=True)]
        self._values[place : place + 1 + len(steps)] = (self._address(tensor), *steps)

    def write_strided(self, name: str, tensor: Tensor) -> None:
        """Set a strided field to a contiguous output (b, h, i, j), with stride 0 along axes of size 1."""
        assert tensor.is_contiguous(), name
        self.read_strided(name, tensor)

    def read_tokens(self, name: str, tensor: Tensor) -> None:
        """Set a strided field to tokens (b, h, i, features), copied where their features are not adjacent."""
        place, tensor = self.layout.places[name], tensor.resolve_neg()
        steps = tensor.stride()
        if steps[3] != 1 and tensor.shape[3] != 1:
            tensor = tensor.contiguous()
            steps = tensor.stride()
        self._values[place : place + 5] = (self._address(tensor), *steps)


def stated_layouts(library: ctypes.CDLL) -> tuple[Layout, Layout] | str:
    """The layouts of attention and of the operator that a compiled library states, or why it cannot be called."""
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
    attention, operator = (Layout(library.sinkformers_structure(which).decode()) for which in range(2))
    for which, layout in enumerate((attention, operator)):
        size = library.sinkformers_size(which)
        if layout.packer.size != size:
            return f"{different} (a structure takes {size} bytes, not {layout.packer.size}); {remedy}"
    return attention, operator
