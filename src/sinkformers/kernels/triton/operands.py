"""The operands of the kernels: tensors of any strides, and the masks that say which entries are valid.

A kernel runs one program per block and matrix. Programs count through the leading axes themselves, so that a transposed
head axis or a mask that repeats over the batch (stride 0) is read where it lies and nothing is copied.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Strided(NamedTuple):
    """A tensor (*lead, rows, cols) and its strides in elements: 0 along axes that repeat, None for 1.

    Compilers before 3.7 lose an integer that is 1 in a tuple once it meets a loop; a None they keep, and like a 1 it
    tells them that neighbours can be read at once.
    """

    data: Any  # None where there is none
    lead: tuple[int | None, ...]
    row: int | None
    col: int | None


class Mask(NamedTuple):
    """Which entries of the scores are valid, and what is added to them."""

    bias: Strided
    entries: Strided  # bool
    rows: Any  # bool (heads, n), contiguous: has a valid entry; None where all have
    cols: Any  # bool (heads, m)
    lowest: float  # a bias down here means masked
    lead: tuple[int, ...]  # the leading axes that programs count through: see `counted`
    behind: Any = None  # n − m where row i sees the columns up to i − behind only, as under a triangle; never positive


def counted(lead: torch.Size) -> tuple[int, ...]:
    """The leading axes longer than 1; one at least, whose length is not used."""
    return tuple(size for size in lead if size > 1) or (1,)


def strided(tensor: Tensor | None, lead: torch.Size) -> Strided:
    """The view of a tensor (*lead, rows, cols), or one whose axes of size 1 repeat, that kernels understand."""
    if tensor is None:
        return Strided(None, (0,) * len(counted(lead)), 0, 0)
    tensor = tensor.resolve_neg()  # a negative view stores the opposite of its values
    steps = [0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    leading = [step for step, size in zip(steps[:-2], lead, strict=True) if size > 1] or [0]
    *leading, row, col = (None if step == 1 else step for step in [*leading, *steps[-2:]])
    return Strided(tensor, tuple(leading), row, col)


@triton.jit
def times(index, step):
    """`index * step` for a stride, in 64 bits: n×m matrices outgrow 32."""
    product = index.to(tl.int64)
    if step is not None:
        product = product * step
    return product


@triton.jit
def locate(operand, lead, head):
    """Where matrix number `head` of an operand begins."""
    at = operand.data
    rest = head
    for axis in tl.static_range(len(lead) - 1, 0, -1):
        at += times(rest % lead[axis], operand.lead[axis])
        rest = rest // lead[axis]
    return at + times(rest, operand.lead[0])


@triton.jit
def tokens(operand, lead, head, index, valid, width, WIDTH: tl.constexpr, first=0):
    """Tokens (block, WIDTH) of one matrix, from feature `first` on. Masked ones read as zero, whatever they hold."""
    feature = first + tl.arange(0, WIDTH)
    at = locate(operand, lead, head) + times(index, operand.row)[:, None] + times(feature, operand.col)[None, :]
    return tl.load(at, mask=valid[:, None] & (feature < width)[None, :], other=0.0)


@triton.jit
def store_tokens(data, head, index, count, valid, width, values, WIDTH: tl.constexpr, first=0):
    """Write tokens (block, WIDTH) of one matrix of a contiguous tensor, from feature `first` on; zero where masked."""
    feature = first + tl.arange(0, WIDTH)
    at = data + (head.to(tl.int64) * count + index)[:, None] * width + feature[None, :]
    result = tl.where(valid[:, None], values, 0.0).to(data.dtype.element_ty)
    tl.store(at, result, mask=(index < count)[:, None] & (feature < width)[None, :])


@triton.jit
def block(count, SIZE: tl.constexpr):
    """The matrix that this program works on, and the rows or columns of it."""
    blocks = tl.cdiv(count, SIZE)
    head = tl.program_id(0) // blocks
    return head, (tl.program_id(0) % blocks) * SIZE + tl.arange(0, SIZE)


@triton.jit
def valid_lines(valid, head, index, count):
    """Of these rows or columns, those that exist and have a valid entry."""
    inside = index < count
    if valid is not None:
        inside = inside & (tl.load(valid + head.to(tl.int64) * count + index, mask=inside, other=0) != 0)
    return inside


@triton.jit
def valid_entries(mask, head, i, j, row, col):
    """A tile of the mask, and of the bias: zero where masked."""
    valid = row[:, None] & col[None, :]
    if mask.behind is not None:
        valid = valid & ((j + mask.behind)[None, :] <= i[:, None])
    if mask.entries.data is not None:
        at = locate(mask.entries, mask.lead, head) + times(i, mask.entries.row)[:, None]
        valid = valid & (tl.load(at + times(j, mask.entries.col)[None, :], mask=valid, other=0) != 0)
    bias = tl.zeros(valid.shape, tl.float32)
    if mask.bias.data is not None:
        at = locate(mask.bias, mask.lead, head) + times(i, mask.bias.row)[:, None]
        bias = tl.load(at + times(j, mask.bias.col)[None, :], mask=valid, other=0.0).to(tl.float32)
        # Hugging Face writes the lowest finite number for minus infinity; column steps would divide it away.
        masked = bias <= mask.lowest
        valid = valid & (masked == 0)
        bias = tl.where(masked, 0.0, bias)
    return valid, bias


@triton.jit
def score_tile(mask, head, i, j, row, col, q, k, shift, scale, L2: tl.constexpr):
    """Scores in float32 of tokens read with `tokens`, each row less its shift; minus infinity where masked."""
    # The default for float32 is tf32, whose ten bits would be the largest error of all.
    product = tl.dot(q, tl.trans(k), input_precision="ieee")
    squares = tl.zeros(col.shape, tl.float32)
    if L2:
        squares = squared_lengths(k)
    return masked_scores(mask, head, i, j, row, col, product, squares, shift, scale, L2)


@triton.jit
def squared_lengths(k):
    wide = k.to(tl.float32)
    return tl.sum(wide * wide, 1)


@triton.jit
def masked_scores(mask, head, i, j, row, col, product, squares, shift, scale, L2: tl.constexpr):
    """The scores that belong to products of queries and keys."""
    valid, bias = valid_entries(mask, head, i, j, row, col)
    scores = product * scale + bias
    if L2:  # |q|² shifts whole rows, which no weight depends on
        scores -= (0.5 * scale * squares)[None, :]
    return tl.where(valid, scores - shift[:, None], float("-inf"))
