"""Causal attention as it is specified: a loop over the queries, in torch's own operations."""

from torch import Tensor

from sinkformers.attention.causal.call import CausalAttentionCall
from sinkformers.attention.causal.visible import valid_rows
from sinkformers.attention.dropout import dropout_mask_operator
from sinkformers.attention.masks import zero_masked
from sinkformers.core.backend import Backend
from sinkformers.core.causal_reference import streaming_reference
from sinkformers.core.modes import without_autocast


class Reference(Backend):
    name = "reference"
    composite = True

    def automatic(self, call: CausalAttentionCall) -> bool:
        return False

    def why_not(self, call: CausalAttentionCall) -> str | None:
        return "it takes all queries at once, without a cache" if call.streams else None

    def rows_per_block(self, call: CausalAttentionCall) -> int:
        return max(1, call.query.shape[-2])

    def forward(self, call: CausalAttentionCall) -> Tensor:
        dtype = call.query.dtype
        with without_autocast(call.query.device):
            valid = valid_rows(call, 0, call.query.shape[-2])
            tokens = call.change(entries=valid).attention().in_working_dtype()
            tokens, masks = tokens.without_masked_tokens()
            weights = streaming_reference(tokens.problem(masks).scores, tokens.tau, call.definition())
            if tokens.seed is not None:
                weights = weights * dropout_mask_operator(tokens.seed, weights.detach(), tokens.dropout_p)
            return zero_masked(weights @ tokens.value, masks.queries).to(dtype)
