"""Attention by the Triton kernels, for GPUs."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from sinkformers.attention.backends.torch import implicit_gradients
from sinkformers.attention.call import AttentionCall, AttentionResult
from sinkformers.core.backend import Backend
from sinkformers.core.backends.triton import is_gpu, launching_on, power_of_two, why_not_on
from sinkformers.core.problem import working_dtype
from sinkformers.core.ranges import masked_bias

MOST_FEATURES = 256
# Up to so many queries and keys one program may hold a whole head, and up to so many keys whole rows; sizes are padded.
WHOLE_HEADS, WHOLE_ROWS = 256, 1024


class Triton(Backend):
    """Taken by `auto` on GPUs after a self-check: nobody has run the kernels on all of them.

    Works in the log domain, whose numbers never leave the floating-point range: all heads are safe.
    """

    name = "triton"

    def automatic(self, call: AttentionCall) -> bool:
        return is_gpu(call.query.device)

    def kind(self, call: AttentionCall) -> Hashable:
        n, m = call.query.shape[-2], call.key.shape[-2]
        rows = power_of_two(n) if n <= WHOLE_HEADS else None
        return kind_of(call), rows, power_of_two(m) if m <= WHOLE_ROWS else None

    def choices(self, call: AttentionCall) -> tuple[str, ...]:
        return tuple(_plans(call))

    def prefer(self, call: AttentionCall, choice: str) -> None:
        from sinkformers.kernels.triton import sizes

        plan = _plans(call)[choice]
        with launching_on(call.query.device):
            sizes.prefer(prepared(call), plan)

    def why_not(self, call: AttentionCall) -> str | None:
        return why_not_tokens(call.query, call.value)

    def forward(self, call: AttentionCall) -> AttentionResult:
        from sinkformers.kernels import triton

        with launching_on(call.query.device):
            out, f, excess = triton.attention_forward(prepared(call), lowest_bias(call))
        safe = torch.ones(f.shape[:-2], dtype=torch.bool, device=f.device)
        return AttentionResult(out, f[..., 1:, :], excess, f[..., 0, :], safe)

    def backward(
        self, call: AttentionCall, result: AttentionResult, d_output: Tensor, needed: dict[str, bool]
    ) -> dict[str, Tensor | None]:
        from sinkformers.kernels import triton

        if call.implicit:
            return implicit_gradients(call, d_output, needed)
        call = prepared(call)
        f = torch.cat([result.shift[..., None, :], result.rows], -2)
        with launching_on(call.query.device):
            grads = triton.attention_backward(
                call,
                lowest_bias(call),
                d_out=d_output.to(call.query.dtype),
                out=result.out,
                f=f,
                excess=result.cols,
                needs_bias=needed["bias"],
            )
        return dict(zip(("query", "key", "value", "bias", "tau"), grads, strict=True))


def _plans(call: AttentionCall) -> dict[str, Any]:
    """The kernels' plans for a call by name, the default first."""
    from sinkformers.kernels.triton import sizes

    with launching_on(call.query.device):
        return {_name(plan): plan for plan in sizes.candidates(prepared(call))}


def _name(plan: Any) -> str:
    """The tiles of a plan, such as `sums 64×64, gradient 32×32`."""
    tiles = ((name.replace("_", " "), tile) for name, tile in plan._asdict().items() if tile is not None)
    return ", ".join(f"{name} {tile.rows}×{tile.cols}" for name, tile in tiles)


def why_not_tokens(query: Tensor, value: Tensor) -> str | None:
    """The reason why the kernels cannot take these tokens, or None where they can."""
    d, e = query.shape[-1], value.shape[-1]
    if query.dtype == torch.float64 or max(d, e) > MOST_FEATURES:
        return (
            f"it takes float16, bfloat16 and float32 with up to {MOST_FEATURES} features, and got "
            f"{query.dtype} with {d} and {e}"
        )
    return why_not_on(query.device)


def kind_of(call: Any) -> Hashable:
    """What the kernels are compiled for: dtype, widths, leading axes, which tensors there are, the end of the steps."""
    query, optional = call.query, (call.bias, call.entries, call.queries, call.keys, call.tau)
    given = tuple([None if tensor is None else tensor.dtype for tensor in optional])
    leading = sum([size > 1 for size in query.shape[:-2]])
    steps = (call.n_iters == 1, call.n_iters % 2)
    return query.dtype, query.shape[-1], call.value.shape[-1], leading, given, call.l2, call.dropout_p > 0, *steps


def prepared(call: Any) -> Any:
    """The call as the kernels take it: they read half precision as it is, except where tokens are centred."""
    if call.l2:
        call = call.in_working_dtype()
    elif call.tau is not None:
        lead, dtype = call.query.shape[:-2], working_dtype(call.query.dtype)
        call = call.change(tau=call.tau.to(call.query.device, dtype).expand(lead))
    return call if call.seed is None else call.change(seed=call.seed.to(call.query.device))


def lowest_bias(call: Any) -> float:
    """The bias at or below which an entry is masked."""
    return 0.0 if call.bias is None else masked_bias(call.bias.dtype)
