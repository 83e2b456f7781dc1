"""Attention as it is specified, in torch's own operations."""

from torch import Tensor

from sinkformers.attention.call import AttentionCall
from sinkformers.attention.dropout import dropout_mask_operator
from sinkformers.attention.masks import zero_masked
from sinkformers.core.backend import Backend
from sinkformers.core.modes import without_autocast
from sinkformers.core.reference import reference_weights


class Reference(Backend):
    name = "reference"
    composite = True

    def automatic(self, call: AttentionCall) -> bool:
        return False

    def why_not(self, call: AttentionCall) -> str | None:
        return "it has the unrolled gradient only" if call.implicit else None

    def forward(self, call: AttentionCall) -> Tensor:
        dtype = call.query.dtype
        with without_autocast(call.query.device):
            call, masks = call.in_working_dtype().without_masked_tokens()
            weights = reference_weights(call.problem(masks), call.tau, call.definition())
            if call.seed is not None:
                weights = weights * dropout_mask_operator(call.seed, weights.detach(), call.dropout_p)
            return zero_masked(weights @ call.value, masks.queries).to(dtype)
