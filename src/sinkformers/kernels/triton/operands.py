"""What the kernels are handed: tensors of any strides, and the masks that say which entries take part.

A kernel runs one program per block and matrix. Programs count through the leading axes themselves, so that a transposed
head axis or a mask that repeats over the batch (stride 0) is read where it lies and nothing is copied.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Strided(NamedTuple):
    """A tensor (*lead, rows, cols) and its strides in elements, 0 along axes that repeat."""

    data: Any
    lead: tuple[int, ...]
    row: int
    col: int


class Mask(NamedTuple):
    """Which entries of the scores (*lead, n, m) take part, and what is added to them."""

    bias: Strided | None
    entries: Strided | None  # bool
    rows: Any  # bool (heads, n), contiguous: some entry is left; None where all are
    cols: Any  # bool (heads, m)
    lowest: float  # a bias down here means masked
    lead: tuple[int, ...]
    n: int
    m: int


def strided(tensor: Tensor) -> Strided:
    """The view of a tensor with at least two axes that kernels understand."""
    *lead, row, col = (0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return Strided(tensor, tuple(lead) or (0,), row, col)


@triton.jit
def locate(operand, lead, head):
    """Where matrix number `head` of an operand begins."""
    at = operand.data
    rest = head.to(tl.int64)
    for axis in tl.static_range(len(lead) - 1, -1, -1):
        at += (rest % lead[axis]) * operand.lead[axis]
        rest = rest // lead[axis]
    return at


@triton.jit
def tokens(operand, lead, head, index, alive, width, WIDTH: tl.constexpr):
    """Tokens (block, WIDTH) of one matrix. Those out of the game read as zero, whatever stands there."""
    feature = tl.arange(0, WIDTH)
    at = locate(operand, lead, head) + index.to(tl.int64)[:, None] * operand.row + feature[None, :] * operand.col
    return tl.load(at, mask=alive[:, None] & (feature < width)[None, :], other=0.0)


@triton.jit
def block(count, SIZE: tl.constexpr):
    """The matrix that this program works on, and the rows or columns of it."""
    blocks = tl.cdiv(count, SIZE)
    head = tl.program_id(0) // blocks
    return head, (tl.program_id(0) % blocks) * SIZE + tl.arange(0, SIZE)


@triton.jit
def taking_part(alive, head, index, count):
    """Of these rows or columns, those that exist and have an entry left."""
    inside = index < count
    if alive is not None:
        inside = inside & (tl.load(alive + head.to(tl.int64) * count + index, mask=inside, other=0) != 0)
    return inside


@triton.jit
def entries_taking_part(mask, head, i, j, row, col):
    """A tile of the mask, and of the bias: zero where masked."""
    alive = row[:, None] & col[None, :]
    if mask.entries is not None:
        at = locate(mask.entries, mask.lead, head) + i.to(tl.int64)[:, None] * mask.entries.row
        alive = alive & (tl.load(at + j.to(tl.int64)[None, :] * mask.entries.col, mask=alive, other=0) != 0)
    bias = tl.zeros(alive.shape, tl.float32)
    if mask.bias is not None:
        at = locate(mask.bias, mask.lead, head) + i.to(tl.int64)[:, None] * mask.bias.row
        bias = tl.load(at + j.to(tl.int64)[None, :] * mask.bias.col, mask=alive, other=0.0).to(tl.float32)
        # Hugging Face writes the lowest finite number for minus infinity; column steps would divide it away.
        masked = bias <= mask.lowest
        alive = alive & (masked == 0)
        bias = tl.where(masked, 0.0, bias)
    return alive, bias


@triton.jit
def score_tile(mask, head, i, j, row, col, q, k, scale, L2: tl.constexpr):
    """Scores in float32 of tokens that were read with `tokens`; minus infinity where masked."""
    alive, bias = entries_taking_part(mask, head, i, j, row, col)
    # The default for float32 is tf32, whose ten bits would be the largest error of all.
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale + bias
    if L2:  # |q|² shifts whole rows, which no weight depends on
        wide = k.to(tl.float32)
        scores -= (0.5 * scale * tl.sum(wide * wide, 1))[None, :]
    return tl.where(alive, scores, float("-inf"))
