"""Doubly stochastic attention on the GPU without an n×m matrix: `out = (D∘P) V`, and its exact gradient.

Between the two passes only vectors are kept: `f`, the rows' maxima and the row potentials of every row step, and
`excess`, by how much the columns' sums missed their target before every column step, both in logarithms and float32
whatever the tokens are.
Logarithms never leave the floating-point range, so no score is too sharp and nothing has to be handed over.

Sizes are 1 at least, features 256 at most. Tokens are float16, bfloat16 or float32, the three of one call alike.
"""

import torch
import triton
from torch import Tensor

from sinkformers.kernels.triton import backward, forward
from sinkformers.kernels.triton.dropout import dropout
from sinkformers.kernels.triton.operands import strided
from sinkformers.kernels.triton.participation import Call, prepare


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    entries: Tensor | None,
    queries: Tensor | None,
    keys: Tensor | None,
    tau: Tensor | None,
    seed: Tensor | None,
    n_iters: int,
    scale: float,
    l2: bool,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output (*lead, n, e) in float32, `f` (*lead, ⌈n_iters/2⌉ + 1, n) and `excess` (*lead, ⌊n_iters/2⌋, m).

    Takes query (*lead, n, d), key (*lead, m, d) and value (*lead, m, e) of any strides; `bias` and the boolean
    `entries` of the scores' rank, axes of size 1 repeated; `queries` (*lead, n) and `keys` (*lead, m), likewise; `tau`
    (*lead); a scalar int64 `seed`, or None for no dropout. An entry is out if any mask says so, or if its bias lies
    below half the lowest finite number. Rows without an entry give zeros.
    """
    *lead, n, d = query.shape
    m, e = value.shape[-2:]
    call = prepare(query, key, bias, entries, queries, keys, tau, n_iters)
    out = query.new_empty(*lead, n, e, dtype=torch.float32)
    f = query.new_empty(*lead, call.n_rows + 1, n, dtype=torch.float32)
    excess = query.new_empty(*lead, call.n_cols, m, dtype=torch.float32)
    tile, _ = _tiles(query, d, e)
    static = {"L2": l2, "D": _width(d), **tile}
    steps = (call.n_rows, call.n_cols, scale, d)
    q, k, v = (strided(x, query.shape[:-2]) for x in (query, key, value))
    for step in range(n_iters - n_iters % 2):
        if step % 2 == 0:
            forward.row_step[call.over_rows](
                q, k, call.mask, n, m, f, excess, call.tau, step // 2, *steps, FIRST=step == 0, **static
            )
        else:
            forward.col_step[call.over_cols](
                q, k, call.mask, n, m, f, excess, call.log_rho, step // 2, *steps, **static
            )
    forward.last_step[call.over_rows](
        q, k, v, call.mask, n, m, f, excess, call.tau, dropout(seed, dropout_p), out, *steps, e,
        FIRST=n_iters == 1, ROWS_LAST=n_iters % 2 == 1, E=_width(e), **static,
    )  # fmt: skip
    return out, f, excess


def attention_backward(
    d_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    bias: Tensor | None,
    entries: Tensor | None,
    queries: Tensor | None,
    keys: Tensor | None,
    tau: Tensor | None,
    seed: Tensor | None,
    f: Tensor,
    excess: Tensor,
    n_iters: int,
    scale: float,
    l2: bool,
    dropout_p: float,
    wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of query, key, value, bias and tau; of the last two None where there is none to be had.

    A bias that wants its gradient costs a matrix (*lead, n, m), summed over the axes along which the bias repeats.
    """
    *lead, n, d = query.shape
    m, e = value.shape[-2:]
    call = prepare(query, key, bias, entries, queries, keys, tau, n_iters)
    f, excess = f.contiguous(), excess.contiguous()
    df, dg = f.new_empty(*lead, call.n_rows, n), torch.empty_like(excess)
    d_query, d_key, d_value = (query.new_empty(x.shape) for x in (query, key, value))
    d_bias = query.new_empty(*lead, n, m, dtype=torch.float32) if wants_bias and bias is not None else None
    tile, small_tile = _tiles(query, d, e)
    static, small = ({"L2": l2, "D": _width(d), **sizes} for sizes in (tile, small_tile))
    steps = (call.n_rows, call.n_cols, scale, d)
    q, k, v, incoming, given = (strided(x, query.shape[:-2]) for x in (query, key, value, d_out, out))
    known = (call.mask, n, m, f, excess, call.tau)
    drop, wide = dropout(seed, dropout_p), _width(e)

    backward.output_adjoint[call.over_rows](incoming, given, call.mask, n, df, call.n_rows, e, E=wide, **tile)
    backward.value_step[call.over_cols](
        incoming, q, k, v, *known, call.log_rho, drop, df, dg, d_value, *steps, e,
        ROWS_LAST=n_iters % 2 == 1, HAS_COLS=n_iters > 1, E=wide, **static,
    )  # fmt: skip
    for half in reversed(range(call.n_cols)):
        # Where columns came last, the adjoint of the last row potentials holds the output's part already.
        add = half == call.n_rows - 1
        backward.row_adjoint[call.over_rows](q, k, *known, call.log_rho, df, dg, half, *steps, ADD=add, **static)
        if half:
            backward.col_adjoint[call.over_cols](q, k, *known, df, dg, half, *steps, **static)
    everything = (incoming, q, k, v, *known, call.log_rho, drop, df, dg, _change(call, f, excess))
    backward.query_step[call.over_rows](*everything, d_query, d_bias, *steps, e, E=wide, **small)
    backward.key_step[call.over_cols](*everything, d_key, *steps, e, E=wide, **small)
    if bias is not None and d_bias is not None:
        d_bias = d_bias.sum_to_size(bias.shape).to(bias.dtype)
    d_tau = None if tau is None else -(dg * excess).sum((-1, -2)).to(tau.dtype)
    return d_query, d_key, d_value, d_bias, d_tau


def _change(call: Call, f: Tensor, excess: Tensor) -> Tensor:
    """By how much a step's log-kernel may exceed that of the last weights (heads, n_iters), row steps first."""
    f, excess = (x.reshape(call.heads, *x.shape[-2:]) for x in (f[..., 1:, :], excess))
    strength = 1.0 if call.tau is None else call.tau[:, None, None]
    g = torch.cat([excess.new_zeros(call.heads, 1, excess.shape[-1]), -strength * excess], 1)
    across = (f - f[:, -1:]).amax(-1).clamp_min(0)
    row = across + (g[:, : call.n_rows] - g[:, -1:]).amax(-1).clamp_min(0)
    col = across[:, : call.n_cols] + (-excess - call.log_rho[:, None, None] - g[:, -1:]).amax(-1).clamp_min(0)
    return torch.cat([row, col], 1).contiguous()


def _width(features: int) -> int:
    """Feature axes are padded to a power of two, 16 at least, as tensor cores want them."""
    return max(16, triton.next_power_of_2(features))


def _tiles(query: Tensor, d: int, e: int) -> tuple[dict[str, int | bool], dict[str, int | bool]]:
    """Tiles of the passes that sum, and smaller ones for those that hold the gradient of the scores as well.

    The sizes keep shared memory below the 99 KiB that every GPU since sm_80 grants, and spill few registers.
    """
    width = max(_width(d), _width(e))
    if query.element_size() == 2:
        size, stages = 64 if width <= 128 else 32, 2
    else:
        size, stages = 32 if width <= 128 else 16, 1
    how = {"num_warps": 4 if width <= 64 else 8, "num_stages": stages, "enable_fp_fusion": True}
    return {"ROWS": size, "COLS": size, **how}, {"ROWS": min(size, 32), "COLS": min(size, 32), **how}
