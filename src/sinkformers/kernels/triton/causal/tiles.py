"""The running sums inside a tile of scores, whose rows are one block: forward, and walked back.

What a key has received by row i is a sum over the rows up to i. Its logarithm at the start of each block is in a
table, so that a tile needs the scores of its own rows only: tiles are computed in any order, and in parallel.

Both scans have two forms. The short one sums exponentials relative to one row of the block. That is exact enough while
the sums of a block differ by less than a factor of e⁴⁰; for entries beyond, logarithms are added row by row instead,
which no scores are too sharp for. Forward, which form serves an entry depends on the rows above it only, as does its
value, down to the last bit.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from sinkformers.kernels.triton.forward import vector

FAR = tl.constexpr(40.0)


class Sums(NamedTuple):
    """Running sums of every column at the start of each block of rows, and the uniform weights of the rows."""

    starts: Any  # (heads, blocks, column steps, m): logarithms of what keys have received
    expected: Any  # (heads, blocks, m): what uniform attention would have given them
    uniform: Any  # (heads, n): 1 over the number of keys that a row sees, 0 where it sees none


@triton.jit
def row_shift(rows, head, n_rows, i, n):
    """The rows' maxima: the first row of a table (heads, 2·row steps + 1, n)."""
    return vector(rows, head, 2 * n_rows + 1, 0, i, n)


@triton.jit
def row_sum(rows, head, n_rows, half, i, n):
    """The largest exponent in a row of row step `half`, and the sum of exponentials relative to it."""
    total = vector(rows, head, 2 * n_rows + 1, 2 * half + 2, i, n)
    return vector(rows, head, 2 * n_rows + 1, 2 * half + 1, i, n), tl.where(total == 0, 1.0, total)


@triton.jit
def row_potential(rows, head, n_rows, half, i, n):
    """The potentials f that row step `half` found."""
    top, total = row_sum(rows, head, n_rows, half, i, n)
    return -top - tl.log(total)


@triton.jit
def columns_in_sight(mask, number, m, ROWS: tl.constexpr):
    """How many of the first columns the rows of a block see."""
    seen = m
    if mask.behind is not None:
        seen = tl.minimum(m, (number + 1) * ROWS - mask.behind)
    return seen


@triton.jit
def first_block(mask, j, ROWS: tl.constexpr):
    """The first block of rows that sees one of these columns."""
    start = 0
    if mask.behind is not None:
        start = tl.maximum(tl.min(j, 0) + mask.behind, 0) // ROWS
    return start


@triton.jit
def start_of(sums, head, number, step, n_cols, j, n, m, ROWS: tl.constexpr):
    """What these keys have received before a block."""
    return vector(sums.starts, head * tl.cdiv(n, ROWS) + number, n_cols, step, j, m)


@triton.jit
def expected_tile(sums, valid, head, number, i, j, n, m, ROWS: tl.constexpr):
    """The logarithm of what uniform attention has given each key by each row."""
    own = tl.where(valid, vector(sums.uniform, head, 1, 0, i, n)[:, None], 0.0)
    before = vector(sums.expected, head, tl.cdiv(n, ROWS), number, j, m)
    given = tl.cumsum(own, 0) + before[None, :]
    return tl.log(tl.where(valid, given, 1.0))


@triton.jit
def received_tile(sums, rows, scores, head, number, step, i, j, n, m, n_rows, n_cols, ROWS: tl.constexpr):
    """The logarithm of what each key has received by each row in column step `step`; of valid entries only."""
    given = scores + row_potential(rows, head, n_rows, step, i, n)[:, None]
    valid = given != float("-inf")
    start = start_of(sums, head, number, step, n_cols, j, n, m, ROWS)
    row = tl.arange(0, ROWS)[:, None]
    first = row == tl.min(tl.where(valid, row, ROWS), 0)[None, :]
    base = tl.maximum(start, tl.max(tl.where(first, given, float("-inf")), 0))  # of any sum down here the least
    above = given - base[None, :]
    above = tl.where(above > 80.0, 80.0, above)  # far enough, and no infinity
    total = tl.exp(start - base)[None, :] + tl.cumsum(tl.exp(above), 0)
    near = (total < tl.exp(FAR)) | (valid == 0)
    received = base[None, :] + tl.log(tl.where(valid, total, 1.0))
    if tl.min(near.to(tl.int32)) == 0:
        received = tl.where(near, received, add_up_logarithms(given, start, ROWS))
    return received


@triton.jit
def column_step_tile(sums, rows, scores, head, number, half, i, j, n, m, n_rows, n_cols, strength, ROWS: tl.constexpr):
    """What each key has received by each row in column step `half`, and the potentials that follow from it."""
    valid = scores != float("-inf")
    expected = expected_tile(sums, valid, head, number, i, j, n, m, ROWS)
    received = received_tile(sums, rows, scores, head, number, half, i, j, n, m, n_rows, n_cols, ROWS)
    return received, potential_tile(expected, received, valid, strength)


@triton.jit
def add_up_logarithms(given, start, ROWS: tl.constexpr):
    """`log(exp(start) + Σ exp(given))` down the rows, one after the other."""
    row = tl.arange(0, ROWS)
    running = start
    sums = tl.zeros_like(given)
    for at in range(ROWS):
        here = (row == at)[:, None]
        own = tl.sum(tl.where(here, given, 0.0), 0)
        top = tl.maximum(running, own)
        running = top + tl.log(tl.exp(running - top) + tl.exp(own - top))
        sums = tl.where(here, running[None, :], sums)
    return sums


@triton.jit
def potential_tile(expected, received, valid, strength):
    """The column potentials g = τ·log(expected/received)."""
    return tl.where(valid, strength * (expected - received), 0.0)


@triton.jit
def spread_tile(scores, f, received, start, pull, after, ROWS: tl.constexpr):
    """Walk back over the running sums of a tile.

    `pull` is the adjoint of `received`, zero where masked. `after` is what later blocks pull at the sum with which this
    block ends. Returns the adjoint of each row's own part, and what is pulled at the sum with which the block starts.
    """
    given = scores + f[:, None]
    valid = given != float("-inf")
    end = tl.maximum(start, tl.max(tl.where(valid, received, float("-inf")), 0))
    rise = tl.where(valid, end[None, :] - received, 0.0)
    if tl.max(rise) <= FAR:
        pulled = pull * tl.exp(rise)
        below = after[None, :] + tl.cumsum(pulled, 0, reverse=True)
        spread = tl.exp(given - end[None, :]) * below
        before = tl.exp(start - end) * (after + tl.sum(pulled, 0))
    else:
        spread, before = spread_row_by_row(given, received, valid, start, end, pull, after, ROWS)
    return tl.where(valid, spread, 0.0), before


@triton.jit
def spread_row_by_row(given, received, valid, start, end, pull, after, ROWS: tl.constexpr):
    """The same from the last row up: the sum never falls down the rows, so no factor exceeds 1."""
    row = tl.arange(0, ROWS)
    part = tl.exp(tl.where(valid, given - received, float("-inf")))
    spread = tl.zeros_like(given)
    running, level = after, end
    for back in range(ROWS):
        here = (row == ROWS - 1 - back)[:, None]
        drop = tl.sum(tl.where(here & valid, level[None, :] - received, 0.0), 0)
        running = running * tl.exp(-drop) + tl.sum(tl.where(here, pull, 0.0), 0)
        level -= drop
        spread = tl.where(here, part * running[None, :], spread)
    return spread, running * tl.exp(start - level)
