"""Which kernels serve a call, and in tiles of which size: one table by GPU, kind of tokens and width of the heads.

The sizes are the largest whose kernels, as the compiler reports them, keep to the registers and the shared memory of
their GPU without spilling; tests/kernels/test_triton_compile.py asserts that. Nothing has been timed: `candidates`
lists what a measurement should choose from, and `prefer` makes its winner the choice of this process.
"""

from typing import Any, NamedTuple

import triton
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
        warps, stages = {"num_warps": self.warps}, {"num_stages": self.stages}
        return {"ROWS": self.rows, "COLS": self.cols, **warps, **stages, "enable_fp_fusion": True}


class Plan(NamedTuple):
    """How a call is computed. A head in one program has a tile of its own; without it, passes over tiles compute it."""

    sums: Tile  # of the passes that sum
    gradient: Tile  # of those that hold the gradient of the scores as well
    head: Tile | None = None  # of a head that one program holds, forward
    head_gradient: Tile | None = None


def padded_width(features: int) -> int:
    """Feature axes are padded to a power of two, 16 at least, as tensor cores need them."""
    return max(16, triton.next_power_of_2(features))
