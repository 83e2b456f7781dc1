"""Doubly stochastic attention on the GPU without an n×m matrix: `out = (D∘P) V`, and its exact gradient.

Between the two passes only vectors are saved: `f`, the rows' maxima and the row potentials of every row step, and
`excess`, by how much the columns' sums missed their target before every column step, both in logarithms and float32
whatever the tokens are.
Logarithms never leave the floating-point range, so no score is too sharp and there is no fallback.

Sizes are 1 at least, features 256 at most. Tokens are float16, bfloat16 or float32, the three of one call alike.
"""

from typing import Any

import torch
from torch import Tensor

from sinkformers.kernels.triton import backward, blocks, forward, head, pairs
from sinkformers.kernels.triton.dropout import dropout
from sinkformers.kernels.triton.masks import Shared, prepare
from sinkformers.kernels.triton.operands import Strided, strided
from sinkformers.kernels.triton.sizes import Plan, Tile, choose, padded_width


def attention_forward(call: Any, masked_bias: float, plan: Plan | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Output (*lead, n, e) in float32, `f` (*lead, ⌈n_iters/2⌉ + 1, n) and `excess` (*lead, ⌊n_iters/2⌋, m).

    `call` has the attributes of an attention call: query (*lead, n, d), key (*lead, m, d) and value (*lead, m, e) of
    any strides; `bias` and the boolean `entries` of the scores' rank, axes of size 1 repeated; `queries` (*lead, n) and
    `keys` (*lead, m), likewise; `tau` (*lead); a scalar int64 `seed`, or None for no dropout; n_iters, scale, l2 and
    dropout_p. An entry is masked if any mask says so, or if its bias is `masked_bias` or less. Empty rows give zeros.
    `plan` is one of `sizes.candidates(call)`, by default `sizes.choose(call)`; what is saved does not depend on it.
    """
    query, key, value, n_iters = call.query, call.key, call.value, call.n_iters
    *lead, n, d = query.shape
    m, e = value.shape[-2:]
    plan, shared = choose(call) if plan is None else plan, prepare(call, masked_bias)
    out = query.new_empty(*lead, n, e, dtype=torch.float32)
    f = query.new_empty(*lead, shared.n_rows + 1, n, dtype=torch.float32)
    excess = query.new_empty(*lead, shared.n_cols, m, dtype=torch.float32)
    q, k, v = (strided(x, query.shape[:-2]) for x in (query, key, value))
    drop, steps = dropout(call.seed, call.dropout_p), (shared.n_rows, shared.n_cols, call.scale, d)
    if plan.head is not None:
        head.head_forward[shared.over_heads](
            q, k, v, shared.mask, n, m, f, excess, shared.tau, shared.log_rho, drop, out, *steps, e,
            **_of_heads(call, plan.head),
        )  # fmt: skip
        return out, f, excess
    static = {"L2": call.l2, "D": padded_width(d), **plan.sums.options()}
    known = (shared.mask, n, m, f, excess)
    for step in range(n_iters - n_iters % 2):
        if plan.pair is not None:
            if step % 2 == 0:
                _row_and_column_step(call, shared, plan.pair, q, k, f, excess, step // 2)
        elif step % 2 == 0:
            forward.row_step[shared.over_rows](q, k, *known, shared.tau, step // 2, *steps, FIRST=step == 0, **static)
        else:
            forward.col_step[shared.over_cols](q, k, *known, shared.log_rho, step // 2, *steps, **static)
    forward.last_step[shared.over_rows](
        q, k, v, *known, shared.tau, drop, out, *steps, e,
        FIRST=n_iters == 1, ROWS_LAST=n_iters % 2 == 1, E=padded_width(e), **static,
    )  # fmt: skip
    return out, f, excess


def _row_and_column_step(
    call: Any, shared: Shared, tile: Tile, q: Strided, k: Strided, f: Tensor, excess: Tensor, half: int
) -> None:
    """Row step `half` and the column step after it, in one pass over the scores and one over the columns' sums."""
    n, m, d = shared.n, shared.m, call.query.shape[-1]
    blocks = -(-n // tile.rows)
    shares = f.new_empty(shared.heads, blocks, m)
    steps = (shared.n_rows, shared.n_cols, call.scale, d)
    pairs.row_and_column_step[shared.over_rows](
        q, k, shared.mask, n, m, f, excess, shares, shared.tau, half, *steps,
        FIRST=half == 0, L2=call.l2, FEATURES=head.FEATURES, **tile.options(),
    )  # fmt: skip
    pairs.add_up_columns[shared.over_cols](
        shares,
        shared.mask,
        excess,
        shared.log_rho,
        half,
        shared.n_cols,
        blocks,
        m,
        COLS=128,
        num_warps=4,
        enable_fp_fusion=True,
    )


def attention_backward(
    call: Any,
    masked_bias: float,
    *,
    d_out: Tensor,
    out: Tensor,
    f: Tensor,
    excess: Tensor,
    needs_bias: bool,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of query, key, value, bias (*lead, n, m) and tau (*lead).

    `out`, `f` and `excess` are what the forward pass returned, by whatever plan. The gradient of the bias costs a
    matrix; it is None where it is not needed, and that of tau where there is none.
    """
    query, key, value = call.query, call.key, call.value
    (*lead, n, _), m = query.shape, key.shape[-2]
    plan, shared = choose(call) if plan is None else plan, prepare(call, masked_bias)
    f, excess = f.contiguous(), excess.contiguous()
    d_query, d_key, d_value = (query.new_empty(x.shape) for x in (query, key, value))
    d_bias = query.new_empty(*lead, n, m, dtype=torch.float32) if needs_bias and call.bias is not None else None
    gradients = (d_query, d_key, d_value, d_bias)
    if plan.head_gradient is not None:
        d_tau = None if call.tau is None else f.new_empty(lead)
        _head_backward(call, shared, plan.head_gradient, d_out, f, excess, (*gradients, d_tau))
    elif plan.blocks is not None:
        d_tau = _backward_in_blocks(call, shared, plan.blocks, d_out, out, f, excess, gradients)
    else:
        d_tau = _backward_in_passes(call, shared, plan, d_out, out, f, excess, gradients)
    return *gradients, None if d_tau is None or call.tau is None else d_tau.to(call.tau.dtype)


def _head_backward(
    call: Any, shared: Shared, tile: Tile, d_out: Tensor, f: Tensor, excess: Tensor, gradients: tuple[Any, ...]
) -> None:
    """Write the gradients with a head in one program."""
    (*_, n, d), (m, e) = call.query.shape, call.value.shape[-2:]
    tokens = [strided(x, call.query.shape[:-2]) for x in (d_out, call.query, call.key, call.value)]
    known = (shared.mask, n, m, f, excess, shared.tau, shared.log_rho, dropout(call.seed, call.dropout_p))
    steps = (shared.n_rows, shared.n_cols, call.scale, d, e)
    for serves in tile.launches():
        head.head_backward[shared.over_heads](*tokens, *known, *gradients, *steps, **serves, **_of_heads(call, tile))


def _backward_in_blocks(
    call: Any,
    shared: Shared,
    tile: Tile,
    d_out: Tensor,
    out: Tensor,
    f: Tensor,
    excess: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor, Tensor | None],
) -> Tensor | None:
    """Write the gradients with a head in one program, a block of rows at a time, and return that of tau."""
    (*lead, n, d), (m, e) = call.query.shape, call.value.shape[-2:]
    df, dg = f.new_empty(*lead, shared.n_rows + 1, n), torch.empty_like(excess)
    tokens = [strided(x, call.query.shape[:-2]) for x in (d_out, call.query, call.key, call.value, out)]
    known = (shared.mask, n, m, f, excess, shared.tau, shared.log_rho, dropout(call.seed, call.dropout_p))
    steps = (shared.n_rows, shared.n_cols, call.scale, d, e)
    widths = {"D": padded_width(d), "E": padded_width(e), "LINES": padded_width(n)}
    for near in (True, False):
        blocks.head_backward_in_blocks[shared.over_heads](
            *tokens, *known, df, dg, *gradients, *steps, NEAR_ONES=near, **widths, **_of_heads(call, tile)
        )
    return None if call.tau is None else -(dg * excess).sum((-1, -2))


def _of_heads(call: Any, tile: Tile) -> dict[str, Any]:
    """The compile-time arguments of a kernel with a head in one program."""
    rows_last = call.n_iters % 2 == 1
    return {"ROWS_LAST": rows_last, "L2": call.l2, "FEATURES": head.FEATURES, **tile.options()}


def _backward_in_passes(
    call: Any,
    shared: Shared,
    plan: Plan,
    d_out: Tensor,
    out: Tensor,
    f: Tensor,
    excess: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor, Tensor | None],
) -> Tensor | None:
    """Write the gradients of query, key, value and bias by passes over tiles, and return that of tau."""
    query, key, value, n_iters = call.query, call.key, call.value, call.n_iters
    (*lead, n, d), (m, e) = query.shape, value.shape[-2:]
    d_query, d_key, d_value, d_bias = gradients
    df, dg = f.new_empty(*lead, shared.n_rows, n), torch.empty_like(excess)
    static, small = ({"L2": call.l2, "D": padded_width(d), **tile.options()} for tile in (plan.sums, plan.gradient))
    steps = (shared.n_rows, shared.n_cols, call.scale, d)
    q, k, v, incoming, given = (strided(x, query.shape[:-2]) for x in (query, key, value, d_out, out))
    known = (shared.mask, n, m, f, excess, shared.tau)
    drop, wide = dropout(call.seed, call.dropout_p), padded_width(e)

    backward.output_adjoint[shared.over_rows](
        incoming, given, shared.mask, n, df, shared.n_rows, e, E=wide, **plan.sums.options()
    )
    # Beside the addresses of a bias or a mask, registers are left for a small tile of it.
    of_values = static if call.bias is None and call.entries is None else small
    backward.value_step[shared.over_cols](
        incoming, q, k, v, *known, shared.log_rho, drop, df, dg, d_value, *steps, e,
        ROWS_LAST=n_iters % 2 == 1, HAS_COLS=n_iters > 1, E=wide, **of_values,
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
    return None if call.tau is None else -(dg * excess).sum((-1, -2))


def _change(shared: Shared, f: Tensor, excess: Tensor) -> Tensor:
    """By how much a step's log-kernel may exceed that of the last weights (heads, n_iters), row steps first."""
    f, excess = (x.reshape(shared.heads, *x.shape[-2:]) for x in (f[..., 1:, :], excess))
    strength = 1.0 if shared.tau is None else shared.tau[:, None, None]
    g = torch.cat([excess.new_zeros(shared.heads, 1, excess.shape[-1]), -strength * excess], 1)
    across = (f - f[:, -1:]).amax(-1).clamp_min(0)
    row = across + (g[:, : shared.n_rows] - g[:, -1:]).amax(-1).clamp_min(0)
    col = across[:, : shared.n_cols] + (-excess - shared.log_rho[:, None, None] - g[:, -1:]).amax(-1).clamp_min(0)
    return torch.cat([row, col], 1).contiguous()
