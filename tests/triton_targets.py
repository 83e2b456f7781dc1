"""Compile the library's Triton kernels for GPUs that are not there, and read what the compilers say of them.

A driver that only names its target stands in for a GPU: the library's own functions are called, and each launch stops
once the kernel is compiled. So the sizes, types and strides are those of real calls.
"""

import contextlib
import io
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Compiled(NamedTuple):
    """One kernel as it was compiled, and what it takes of the GPU."""

    name: str
    registers: int  # per thread
    spills: int  # bytes per thread that are written to memory because registers are missing
    shared: int  # bytes per program
    threads: int  # per program
    asm: Any
    hash: str


_READ: dict[str, Compiled] = {}  # a kernel is compiled once per process, and its compiler speaks once


class Driver:
    """A GPU that can be named but not launched on."""

    def __init__(self, name: str) -> None:
        cuda = name.startswith("sm_")
        lanes = 64 if name.startswith("gfx9") else 32
        self.target = GPUTarget("cuda", int(name[3:]), 32) if cuda else GPUTarget("hip", name, lanes)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> Any:
        return self.target.arch

    def get_current_stream(self, _device: Any) -> int:
        return 0


@contextlib.contextmanager
def compiling(name: str, cache: str) -> Iterator[list[Compiled]]:
    """Compile for the GPU `name`, such as sm_90 or gfx942, instead of launching; the list grows with each kernel."""
    kernels: list[Compiled] = []
    run, active, directory, log = JITFunction.run, driver._active, knobs.cache.dir, knobs.nvidia.dump_ptxas_log

    def compile_only(self: JITFunction, *args: Any, **options: Any) -> Any:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            kernel = run(self, *args, **{**options, "warmup": True})
        if kernel.hash not in _READ:
            _READ[kernel.hash] = _read(kernel, driver._active.target, said.getvalue())
        if _READ[kernel.hash] not in kernels:
            kernels.append(_READ[kernel.hash])
        return kernel

    JITFunction.run, driver._active = compile_only, Driver(name)
    knobs.cache.dir, knobs.nvidia.dump_ptxas_log = cache, True
    try:
        yield kernels
    finally:
        JITFunction.run, driver._active = run, active
        knobs.cache.dir, knobs.nvidia.dump_ptxas_log = directory, log


def _read(kernel: Any, target: GPUTarget, said: str) -> Compiled:
    if target.backend == "cuda":
        registers, spills = _number(r"Used (\d+) registers", said), _number(r"(\d+) bytes spill stores", said)
    else:  # the accumulators of gfx9 are registers too, and `vgpr_count` counts both kinds
        text = kernel.asm["amdgcn"]
        registers, spills = _number(r"\.vgpr_count:\s+(\d+)", text), 4 * _number(r"\.vgpr_spill_count:\s+(\d+)", text)
    threads = kernel.metadata.num_warps * target.warp_size
    return Compiled(kernel.metadata.name, registers, spills, kernel.metadata.shared, threads, kernel.asm, kernel.hash)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, (pattern, text)
    return int(found[1])
