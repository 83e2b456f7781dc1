"""Which kernels serve a call, and in tiles of which size: one table by GPU, bytes per feature, masks and width.

The sizes are the largest whose kernels, as the compilers report them, keep to the registers and the shared memory of
their GPU; tests/kernels/test_triton_compile.py asserts it. Nothing has been timed: `candidates` lists what a
measurement can choose from, and `prefer` makes its winner the choice of the process.
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
        sizes = {"ROWS": self.rows, "COLS": self.cols}
        return {**sizes, "num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}

    def launches(self) -> list[dict[str, bool]]:
        """Which heads each launch of `head_backward` serves: two with fewer registers, or for small heads a single one.

        Heads whose steps are far from the last one are rare: as a rule the second launch ends where it begins.
        """
        if self.rows * self.cols <= _ONE_LAUNCH:
            return [{"NEAR_ONES": True, "FAR_ONES": True}]
        return [{"NEAR_ONES": near, "FAR_ONES": not near} for near in (True, False)]


class Plan(NamedTuple):
    """How a call is computed: by passes over tiles, or for short sequences with a head in one program.

    In `blocks`, that program holds a block of rows at a time, backward.
    """

    sums: Tile  # of the passes that sum
    gradient: Tile  # of those that hold the gradient of the scores as well
    head: Tile | None = None  # of a head in one program, forward; None for passes
    head_gradient: Tile | None = None  # backward
    pair: Tile | None = None  # whole rows, for a row step and a column step in one pass; None for a pass each
    blocks: Tile | None = None  # a block of rows of a head in one program, backward


class Kind(NamedTuple):
    """What the choice of a plan depends on."""

    gpu: str
    bytes: int  # per feature
    matrices: bool  # whether there is a bias or a mask of entries, whose addresses take registers
    width: int  # of queries or values, whichever is wider, padded
    n: int
    m: int


class Heads(NamedTuple):
    """How many scores one program holds at most, sizes padded to powers of two."""

    forward: int
    backward: int


_ONE_LAUNCH = 32 * 64
_SMALL, _WIDE = 64 * 64, 128 * 128
_NVIDIA = {
    (2, False): Heads(_WIDE, _WIDE),
    (2, True): Heads(_SMALL, _SMALL),
    (4, False): Heads(_WIDE, _SMALL),
    (4, True): Heads(_SMALL, _SMALL),
}
# By GPU, as far as its name is known; then by bytes and matrices.
_HEADS = {
    "sm_": _NVIDIA,
    "sm_75": {**_NVIDIA, (2, False): Heads(_SMALL, _SMALL), (4, False): Heads(_SMALL, _SMALL)},
    "sm_9": {**_NVIDIA, (2, False): Heads(_WIDE, _SMALL)},
    "sm_10": {**_NVIDIA, (2, False): Heads(_WIDE, _SMALL)},
    "gfx9": {**_NVIDIA, (4, False): Heads(_WIDE, _WIDE)},
    "gfx11": {
        (2, False): Heads(_WIDE, _SMALL),
        (2, True): Heads(_SMALL, _SMALL),
        (4, False): Heads(_SMALL, _ONE_LAUNCH),
        (4, True): Heads(_ONE_LAUNCH, _ONE_LAUNCH),
    },
}


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
    """What the plan of a call, forward and backward, depends on."""
    query, value = call.query, call.value
    matrices = call.bias is not None or call.entries is not None
    width = padded_width(max(query.shape[-1], value.shape[-1]))
    return Kind(current_gpu(), query.element_size(), matrices, width, query.shape[-2], value.shape[-2])


def candidates(call: Any) -> list[Plan]:
    """All plans that the table offers for a call, the default first."""
    return plans(kind_of(call))


def plans(kind: Kind) -> list[Plan]:
    """All plans that the table offers for a kind of call, the default first."""
    passes = Plan(*pass_tiles(kind.gpu, kind.bytes, kind.width, kind.matrices))
    found = [passes]
    if (pair := _pair_tile(kind)) is not None:
        found.insert(0, passes._replace(pair=pair))
    forward, backward = _head_tiles(kind)
    if forward is not None:
        found.insert(0, passes._replace(head=forward, head_gradient=backward))
    if backward is None and (blocks := _block_tile(kind)) is not None:
        found.insert(0, found[0]._replace(blocks=blocks))
    return found


def pass_tiles(gpu: str, size: int, width: int, matrices: bool = False) -> tuple[Tile, Tile]:
    """Tiles of the passes that sum, and smaller ones for those that hold the gradient of the scores as well."""
    few = _has_few_registers(gpu)
    if size == 2:
        side, stages = 64 if width <= 128 and not few else 32, 2
    else:
        side, stages = 32 if width <= 128 else 16, 1
    warps = 4 if width <= 64 and not matrices else 8
    small = Tile(min(side, 32), min(side, 32), 4 if width <= 64 and not few else 8, stages)
    return Tile(side, side, warps, stages), small


def causal_tile(gpu: str, size: int, width: int, matrices: bool) -> Tile:
    """The tile of all passes of causal attention; its rows do not depend on the GPU, since of each block of them a
    vector is saved."""
    large, small = pass_tiles("", size, width)
    narrow = size == 2 and (matrices or _has_few_registers(gpu))  # whose blocks have twice the rows
    warps = {"gfx9": 4, "gfx1": 16}.get(gpu[:4], 8)  # on gfx9 four share all registers
    return small._replace(rows=large.rows, cols=min(small.cols, 16 if narrow else 32), warps=warps)


def _has_few_registers(gpu: str) -> bool:
    """Whether the compiler spills kilobytes of tiles that fit other GPUs."""
    return gpu == "sm_75" or gpu.startswith("gfx11")


def _head_tiles(kind: Kind) -> tuple[Tile | None, Tile | None]:
    """The tiles of a head in one program, forward and backward; None where it is too large."""
    rows, cols, most = padded_width(kind.n), padded_width(kind.m), _most_scores(kind)
    if max(rows, cols) > 256:
        return None, None
    tile = Tile(rows, cols, 8 if rows * cols > _ONE_LAUNCH else 4)
    return tile if rows * cols <= most.forward else None, tile if rows * cols <= most.backward else None


def _pair_tile(kind: Kind) -> Tile | None:
    """Blocks of whole rows; None where even few rows are too large."""
    cols = padded_width(kind.m)
    rows = min(64, _most_scores(kind).forward // cols)
    return Tile(rows, cols, 8) if rows >= 16 else None


def _block_tile(kind: Kind) -> Tile | None:
    """Blocks of rows of a head in one program; None where the gradients of its keys and values are too large."""
    rows, cols = padded_width(kind.n), padded_width(kind.m)
    if kind.bytes != 2 or kind.matrices or kind.width > 64 or max(rows, cols) > 256 or _has_few_registers(kind.gpu):
        return None
    most = 32 * 256 if kind.gpu.startswith("gfx9") else 16 * 256
    return Tile(min(rows, most // cols), cols, 8)


def _most_scores(kind: Kind) -> Heads:
    name = max((name for name in _HEADS if kind.gpu.startswith(name)), key=len, default="gfx11")
    return _HEADS[name][kind.bytes, kind.matrices]


def padded_width(features: int) -> int:
    """Axes are padded to powers of two, 16 at least, as tensor cores need them."""
    return max(16, triton.next_power_of_2(features))


def current_gpu() -> str:
    """The GPU that kernels are compiled for, such as sm_90 or gfx942; in the interpreter, any."""
    if knobs.runtime.interpret:
        return "sm_80"
    target = driver.active.get_current_target()
    return f"sm_{target.arch}" if target.backend == "cuda" else target.arch.split(":")[0]
