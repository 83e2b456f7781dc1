"""Causal attention by the compiled CPU kernels; heads whose sums leave their range are recomputed in torch."""

from typing import Any

import torch
from torch import Tensor

from sinkformers.attention.backends.native import arguments_of, gradients_by_kernels, unread_tensors
from sinkformers.attention.call import AttentionCall
from sinkformers.attention.causal.backends import torch as in_torch
from sinkformers.attention.causal.call import CausalAttentionCall, CausalAttentionResult
from sinkformers.attention.causal.rows import expected_in, sums_before
from sinkformers.attention.causal.visible import tokens_that_count, valid_rows
from sinkformers.core.arguments import with_rank
from sinkformers.core.backend import Backend
from sinkformers.core.backends.native import missing_warning, why_not_on

FEWEST_ROWS, MOST_ROWS = 32, 256
MOST_STARTS = 2**20  # entries of the saved sums of one head, beyond which blocks grow up to MOST_ROWS


class Native(Backend):
    name = "native"

    def why_not(self, call: CausalAttentionCall) -> str | None:
        return why_not_on(call.query.device) or unread_tensors(call.attention())

    def warning(self, call: CausalAttentionCall) -> str | None:
        return missing_warning(call.query.device)

    def rows_per_block(self, call: CausalAttentionCall) -> int:
        n, entries = call.query.shape[-2], call.key.shape[-2] * call.definition().col_steps()
        rows = FEWEST_ROWS
        while rows < MOST_ROWS and n * entries > rows * MOST_STARTS:
            rows *= 2
        return min(n, rows)

    def forward(self, call: CausalAttentionCall) -> CausalAttentionResult:
        return self.described(call, self._attend(call, needs_sums=True))

    def forward_eager(self, call: CausalAttentionCall) -> CausalAttentionResult:
        """The result with None for `safe` where all heads are, and without sums where no queries follow."""
        return self._attend(call, needs_sums=call.streams)

    def described(self, call: CausalAttentionCall, result: CausalAttentionResult) -> CausalAttentionResult:
        safe = torch.ones(call.query.shape[:-2], dtype=torch.bool) if result.safe is None else result.safe
        return result._replace(safe=safe)

    def _attend(self, call: CausalAttentionCall, *, needs_sums: bool) -> CausalAttentionResult:
        from sinkformers.kernels import native

        call = call.in_working_dtype()
        query, lead, m = call.query, call.query.shape[:-2], call.key.shape[-2]
        steps, blocks = call.definition().col_steps(), len(call.blocks())
        arguments, expected = _arguments(call)
        written: dict[str, Any] = {"starts": query.new_empty(*lead, blocks, steps, m)}
        if needs_sums:
            written["received_after"] = query.new_empty(*lead, steps, m)
        if needs_sums and expected is None:
            written["expected_after"] = query.new_empty(*lead, m)
        out, _, safe = native.attention_forward(**arguments, keeps_state=False, packed=True, **written)
        if needs_sums and expected is None:
            expected = written["expected_after"]
        result = CausalAttentionResult._make((out, written.get("received_after"), expected, written["starts"], safe))
        if safe is not None:
            again = in_torch.attend(call.select(~safe))
            for whole, piece in zip(result[:3], again[:3], strict=True):
                if whole is not None:
                    whole[~safe] = piece
        return result

    def backward(
        self, call: CausalAttentionCall, result: CausalAttentionResult, d_output: Tensor, needed: dict[str, bool]
    ) -> dict[str, Tensor | None]:
        call = call.in_working_dtype()
        d_out = d_output.to(call.query.dtype)
        arguments = {**_arguments(call)[0], "d_out": d_out, "out": result.out, "state": (), "starts": result.starts}
        grads, safe = gradients_by_kernels(arguments, call.bias if needed["bias"] else None, result.safe)
        found = grads._asdict()
        if safe is not None:
            part = call.select(~safe)
            starts = in_torch.attend(part).starts
            again = in_torch.gradients(part, starts, d_out[~safe], needs_bias=grads.bias is not None)
            for name, whole in found.items():
                if whole is not None:
                    whole[~safe] = again[name]
        return found


def _tokens(call: CausalAttentionCall) -> AttentionCall:
    """The call of plain attention, whose token masks name all tokens that take no part, so that they are not read."""
    rank, (queries, keys) = call.query.dim() - 1, tokens_that_count(call)
    if queries is None or keys is None:
        return call.attention()
    return call.attention().change(queries=with_rank(queries, rank), keys=with_rank(keys, rank))


def _arguments(call: CausalAttentionCall) -> tuple[dict[str, Any], Tensor | None]:
    """The arguments of the kernels; and what uniform attention gives each key in all (…, m), where it is known here.

    Without masks of entries the kernels count the keys that each query sees. Otherwise they are given what uniform
    attention under the mask would have given by each row.
    """
    tokens, after = _tokens(call), None
    given = {
        name: part for name, part in (("received", call.received), ("expected", call.expected)) if part is not None
    }
    triangle = call.triangle
    if call.entries is not None or call.bias is not None:
        (*lead, n, _), m = call.query.shape, call.key.shape[-2]
        valid = valid_rows(call, 0, n)
        target = expected_in(valid, sums_before(call).expected)
        after = target[..., -1, :].expand(*lead, m).clone()
        given = {**given, "target": with_rank(target, len(lead) + 2)}
        if triangle:
            entries = valid_rows(call.change(queries=None, keys=None, bias=None), 0, n)
            tokens, triangle = tokens.change(entries=with_rank(entries, len(lead) + 2)), False
    arguments = arguments_of(tokens)
    settings = (*arguments["settings"], ("block", call.block), ("triangle", triangle))
    return {**arguments, "tensors": {**arguments["tensors"], **given}, "settings": settings}, after
