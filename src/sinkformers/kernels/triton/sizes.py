"""Which kernels serve a call, and in tiles of which size: one table by GPU, bytes per feature and width of the heads.

The sizes are the largest whose kernels, as the compilers report them, keep to the registers and the shared memory of
their GPU; tests/kernels/test_triton_compile.py asserts it. Nothing has been timed. `candidates` lists what a
measurement can choose from, and `prefer` makes its winner the choice of the process.
"""

from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver


class Tile(NamedTuple):
    """A tile of scores, and how many warps compute it."""

    rows: int
    cols: int
    warps: int
    stages: int = 1

    def options(self) -> dict[str, int | bool]:
        """The launch options."""
        sizes = {"ROWS": self.rows, "COLS": self.cols}
        return {**sizes, "num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


class Plan(NamedTuple):
    """How a call is computed: by passes over tiles, or for short sequences with a head in one program."""

    sums: Tile  # of the passes that sum
    gradient: Tile  # of those that hold the gradient of the scores as well
    head: Tile | None = None  # of a whole head, forward; None for passes
    head_gradient: Tile | None = None  # of a whole head, backward


class Kind(NamedTuple):
    """What a choice depends on."""

    gpu: str
    bytes: int  # per feature
    width: int  # of the wider of keys and values, padded
    n: int
    m: int


_PREFERRED: dict[Kind, Plan] = {}


def choose(call: Any) -> Plan:
    """The plan of a call: the preferred one, or the first candidate."""
    return _PREFERRED.get(kind_of(call)) or candidates(call)[0]


def prefer(call: Any, plan: Plan | None) -> None:
    """Compute calls of this kind by one of their candidates from now on; None returns to the first one."""
    kind = kind_of(call)
    _PREFERRED.pop(kind, None)
    if plan is not None:
        _PREFERRED[kind] = plan


def kind_of(call: Any) -> Kind:
    query, value = call.query, call.value
    width = padded_width(max(query.shape[-1], value.shape[-1]))
    return Kind(current_gpu(), query.element_size(), width, query.shape[-2], value.shape[-2])


def candidates(call: Any) -> list[Plan]:
    """All plans that the table offers for a call, the default first."""
    kind = kind_of(call)
    table = _TABLE[family(kind.gpu)]
    passes = table.passes[kind.bytes, kind.width]
    heads = _head_tiles(kind, *table.heads.get((kind.bytes, kind.width), (0, 0)))
    return [Plan(*tiles, *head) for head in heads for tiles in passes]


def padded_width(features: int) -> int:
    """Feature axes are padded to a power of two, 16 at least, as tensor cores need them."""
    return max(16, triton.next_power_of_2(features))


def current_gpu() -> str:
    """The GPU that kernels are compiled for, such as sm_90 or gfx942; in the interpreter, any."""
    if knobs.runtime.interpret:
        return "sm_80"
    target = driver.active.get_current_target()
    return f"sm_{target.arch}" if target.backend == "cuda" else target.arch.split(":")[0]
