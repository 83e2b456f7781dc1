"""Doubly stochastic attention on the GPU without an n×m matrix: `out = (D∘P) V`, and its exact gradient.

Between the two passes only vectors are saved: `f`, the rows' maxima and the row potentials of every row step, and
`excess`, by how much the columns' sums missed their target before every column step, both in logarithms and float32
whatever the tokens are.
Logarithms never leave the floating-point range, so no score is too sharp and there is no fallback.

Sizes are 1 at least, features 256 at most. Tokens are float16, bfloat16 or float32, the three of one call alike.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from sinkformers.kernels.triton import backward, forward
from sinkformers.kernels.triton.dropout import dropout
from sinkformers.kernels.triton.masks import Shared, prepare
from sinkformers.kernels.triton.operands import strided


def attention_forward(call: Any, masked_bias: float) -> tuple[Tensor, Tensor, Tensor]:
    """Output (*lead, n, e) in float32, `f` (*lead, ⌈n_iters/2⌉ + 1, n) and `excess` (*lead, ⌊n_iters/2⌋, m).

    `call` has the attributes of an attention call: query (*lead, n, d), key (*lead, m, d) and value (*lead, m, e) of
    any strides; `bias` and the boolean `entries` of the scores' rank, axes of size 1 repeated; `queries` (*lead, n) and
    `keys` (*lead, m), likewise; `tau` (*lead); a scalar int64 `seed`, or None for no dropout; n_iters, scale, l2 and
    dropout_p. An entry is masked if any mask says so, or if its bias is `masked_bias` or less. Empty rows give zeros.
    """
    query, key, value, n_iters = call.query, call.key, call.value, call.n_iters
    *lead, n, d = query.shape
    m, e = value.shape[-2:]
    shared = prepare(call, masked_bias)
    out = query.new_empty(*lead, n, e, dtype=torch.float32)
    f = query.new_empty(*lead, shared.n_rows + 1, n, dtype=torch.float32)
    excess = query.new_empty(*lead, shared.n_cols, m, dtype=torch.float32)
    tile, _ = tile_sizes(query.element_size(), d, e)
    static = {"L2": call.l2, "D": padded_width(d), **tile}
    steps = (shared.n_rows, shared.n_cols, call.scale, d)
    q, k, v = (strided(x, query.shape[:-2]) for x in (query, key, value))
    for step in range(n_iters - n_iters % 2):
        if step % 2 == 0:
            forward.row_step[shared.over_rows](
                q, k, shared.mask, n, m, f, excess, shared.tau, step // 2, *steps, FIRST=step == 0, **static
            )
        else:
            forward.col_step[shared.over_cols](
                q, k, shared.mask, n, m, f, excess, shared.log_rho, step // 2, *steps, **static
            )
    forward.last_step[shared.over_rows](
        q, k, v, shared.mask, n, m, f, excess, shared.tau, dropout(call.seed, call.dropout_p), out, *steps, e,
        FIRST=n_iters == 1, ROWS_LAST=n_iters % 2 == 1, E=padded_width(e), **static,
    )  # fmt: skip
    return out, f, excess


def attention_backward(
    call: Any, masked_bias: float, *, d_out: Tensor, out: Tensor, f: Tensor, excess: Tensor, needs_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of query, key, value, bias (*lead, n, m) and tau (*lead).

    `out`, `f` and `excess` are what the forward pass returned. The gradient of the bias costs a matrix; it is None
    where it is not needed, and that of tau where there is none.
    """
    query, key, value, n_iters = call.query, call.key, call.value, call.n_iters
    *lead, n, d = query.shape
    m, e = value.shape[-2:]
    shared = prepare(call, masked_bias)
    f, excess = f.contiguous(), excess.contiguous()
    df, dg = f.new_empty(*lead, shared.n_rows, n), torch.empty_like(excess)
    d_query, d_key, d_value = (query.new_empty(x.shape) for x in (query, key, value))
    d_bias = query.new_empty(*lead, n, m, dtype=torch.float32) if needs_bias and call.bias is not None else None
    tile, small_tile = tile_sizes(query.element_size(), d, e)
    static, small = ({"L2": call.l2, "D": padded_width(d), **sizes} for sizes in (tile, small_tile))
    steps = (shared.n_rows, shared.n_cols, call.scale, d)
    q, k, v, incoming, given = (strided(x, query.shape[:-2]) for x in (query, key, value, d_out, out))
    known = (shared.mask, n, m, f, excess, shared.tau)
    drop, wide = dropout(call.seed, call.dropout_p), padded_width(e)

    backward.output_adjoint[shared.over_rows](incoming, given, shared.mask, n, df, shared.n_rows, e, E=wide, **tile)
    backward.value_step[shared.over_cols](
        incoming, q, k, v, *known, shared.log_rho, drop, df, dg, d_value, *steps, e,
        ROWS_LAST=n_iters % 2 == 1, HAS_COLS=n_iters > 1, E=wide, **static,
    )  # fmt: skip
    for half in reversed(range(shared.n_cols)):
        # Where columns came last, the adjoint of the last row potentials holds the output's part already.
        add = half == shared.n_rows - 1
        backward.row_adjoint[shared.over_rows](q, k, *known, shared.log_rho, df, dg, half, *steps, ADD=add, **static)
        if half:
            backward.col_adjoint[shared.over_cols](q, k, *known, df, dg, half, *steps, **static)
    everything = (incoming, q, k, v, *known, shared.log_rho, drop, df, dg, _change(shared, f, excess))
    backward.query_step[shared.over_rows](*everything, d_query, d_bias, *steps, e, E=wide, **small)
    backward.key_step[shared.over_cols](*everything, d_key, *steps, e, E=wide, **small)
    d_tau = None if call.tau is None else -(dg * excess).sum((-1, -2)).to(call.tau.dtype)
    return d_query, d_key, d_value, d_bias, d_tau


def _change(shared: Shared, f: Tensor, excess: Tensor) -> Tensor:
    """By how much a step's log-kernel may exceed that of the last weights (heads, n_iters), row steps first."""
    f, excess = (x.reshape(shared.heads, *x.shape[-2:]) for x in (f[..., 1:, :], excess))
    strength = 1.0 if shared.tau is None else shared.tau[:, None, None]
    g = torch.cat([excess.new_zeros(shared.heads, 1, excess.shape[-1]), -strength * excess], 1)
    across = (f - f[:, -1:]).amax(-1).clamp_min(0)
    row = across + (g[:, : shared.n_rows] - g[:, -1:]).amax(-1).clamp_min(0)
    col = across[:, : shared.n_cols] + (-excess - shared.log_rho[:, None, None] - g[:, -1:]).amax(-1).clamp_min(0)
    return torch.cat([row, col], 1).contiguous()


def padded_width(features: int) -> int:
    """Feature axes are padded to a power of two, 16 at least, as tensor cores need them."""
    return max(16, triton.next_power_of_2(features))


def tile_sizes(element_size: int, d: int, e: int) -> tuple[dict[str, int], dict[str, int]]:
    """Tiles of the passes that sum, and smaller ones for those that hold the gradient of the scores as well.

    The sizes keep shared memory below the 99 KiB that every GPU since sm_80 grants, and spill few registers.
    """
    width = max(padded_width(d), padded_width(e))
    if element_size == 2:
        size, stages = 64 if width <= 128 else 32, 2
    else:
        size, stages = 32 if width <= 128 else 16, 1
    how = {"num_warps": 4 if width <= 64 else 8, "num_stages": stages, "enable_fp_fusion": True}
    return {"ROWS": size, "COLS": size, **how}, {"ROWS": min(size, 32), "COLS": min(size, 32), **how}
