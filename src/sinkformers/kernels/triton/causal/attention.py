"""Causal attention on the GPU without an n×m matrix, and its exact gradient.

Rows come in blocks. Of each block and column step one vector is saved: `starts`, the logarithms of what the keys have
received before it. The backward pass finds the sums of the rows from them again, by the forward pass's row steps.
Everything runs in float32 and in logarithms, which never leave the floating-point range: there is no fallback.

Sizes are 1 at least, features 256 at most. Tokens are float16, bfloat16 or float32, the three of one call alike.
"""

from typing import Any

import torch
from torch import Tensor

from sinkformers.kernels.triton.backward import output_adjoint
from sinkformers.kernels.triton.causal import backward, forward
from sinkformers.kernels.triton.causal.masks import prepare_causal, received_before
from sinkformers.kernels.triton.dropout import dropout
from sinkformers.kernels.triton.operands import strided
from sinkformers.kernels.triton.sizes import causal_tile, current_gpu, padded_width


def block_rows(element_size: int, d: int, e: int) -> int:
    """How many rows a block has, for tokens of so many bytes per feature; see `causal_forward`."""
    return causal_tile("", element_size, padded_width(max(d, e)), False).rows


def causal_forward(call: Any, masked_bias: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output (*lead, n, e), `received` (*lead, steps, m), `expected` (*lead, m), `starts` (*lead, blocks, steps, m).

    `call` has the attributes of a causal attention call: those that `attention_forward` reads; `received` and
    `expected`, or None; `triangle`; and `block`, which is `block_rows` of its tokens. All results are float32.
    """
    query, key, value, n_iters = call.query, call.key, call.value, call.n_iters
    (*lead, n, d), (m, e) = query.shape, value.shape[-2:]
    tile = _tile(call)
    steps, blocks = n_iters // 2, -(-n // tile["ROWS"])
    out = query.new_empty(*lead, n, e, dtype=torch.float32)
    starts = out.new_empty(*lead, blocks, steps, m)
    shared, sums, expected = prepare_causal(call, masked_bias, starts, tile)
    before = received_before(call, shared.heads, out)
    received = out.new_empty(*lead, steps, m)
    rows = out.new_empty(*lead, 2 * shared.n_rows + 1, n)
    q, k, v = (strided(x, query.shape[:-2]) for x in (query, key, value))
    static = {"L2": call.l2, "D": padded_width(d), **tile}
    numbers, drop = (shared.n_rows, shared.n_cols, call.scale, d), dropout(call.seed, call.dropout_p)
    for half in range(shared.n_rows):
        forward.causal_row_step[shared.over_rows](
            q, k, v, shared.mask, sums, n, m, rows, shared.tau, drop, out, half, *numbers, e,
            FIRST=half == 0, LAST=half == steps, E=padded_width(e), **static,
        )  # fmt: skip
        if half < steps:
            forward.causal_col_step[shared.over_cols](
                q, k, shared.mask, sums, n, m, rows, before, received, half, *numbers, **static
            )
    return out, received, expected.view(*lead, m), starts


def causal_backward(
    call: Any, masked_bias: float, *, d_out: Tensor, out: Tensor, starts: Tensor, needs_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of query, key, value, bias (*lead, n, m) and tau (*lead).

    `out` and `starts` are what the forward pass returned. The gradient of the bias costs a matrix; it is None where it
    is not needed, and that of tau where there is none.
    """
    query, key, value = call.query, call.key, call.value
    (*lead, n, d), (m, e) = query.shape, value.shape[-2:]
    starts = starts.contiguous()
    tile = _tile(call)
    shared, sums, _ = prepare_causal(call, masked_bias, starts, tile)
    steps = shared.n_cols
    rows, df = starts.new_empty(*lead, 2 * shared.n_rows + 1, n), starts.new_empty(*lead, shared.n_rows, n)
    pulls = torch.empty_like(starts)
    d_query, d_key, d_value = (query.new_empty(x.shape) for x in (query, key, value))
    d_bias = starts.new_zeros(*lead, n, m) if needs_bias and call.bias is not None else None
    d_tau = None if call.tau is None else starts.new_empty(*lead, n)
    q, k, v, incoming, given = (strided(x, query.shape[:-2]) for x in (query, key, value, d_out, out))
    static = {"L2": call.l2, "D": padded_width(d), "E": padded_width(e)}
    numbers = (shared.n_rows, shared.n_cols, call.scale, d, e)
    known = (shared.mask, sums, n, m, rows, shared.tau, dropout(call.seed, call.dropout_p))

    for half in range(shared.n_rows):
        forward.causal_row_step[shared.over_rows](
            q, k, v, *known, out, half, *numbers, FIRST=half == 0, LAST=False, **static, **tile
        )
    output_adjoint[shared.over_rows](incoming, given, shared.mask, n, df, shared.n_rows, e, E=static["E"], **tile)
    tokens = (incoming, q, k, v, *known, df, pulls)
    for half in reversed(range(max(1, steps))):
        last = half >= steps - 1
        backward.sums_adjoint[shared.over_cols](
            *tokens, d_value, half if steps else -1, *numbers, LAST=last, HAS_COLS=steps > 0, **static, **tile
        )
        if steps:
            backward.causal_row_adjoint[shared.over_rows](*tokens, half, *numbers, LAST=last, **static, **tile)
    backward.causal_query_step[shared.over_rows](*tokens, d_query, d_bias, d_tau, *numbers, **static, **tile)
    backward.causal_key_step[shared.over_cols](*tokens, d_key, *numbers, **static, **tile)
    d_tau = d_tau if d_tau is None or call.tau is None else d_tau.sum(-1).to(call.tau.dtype)
    return d_query, d_key, d_value, d_bias, d_tau


def _tile(call: Any) -> dict[str, Any]:
    query, value = call.query, call.value
    width, matrices = (
        padded_width(max(query.shape[-1], value.shape[-1])),
        call.bias is not None or call.entries is not None,
    )
    return causal_tile(current_gpu(), query.element_size(), width, matrices).options()
