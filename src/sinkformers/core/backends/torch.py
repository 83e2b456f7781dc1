"""`sinkhorn` in torch's own operations, in the kernel domain: for every device without a kernel."""

import torch
from torch import Tensor

from sinkformers.core import unrolled
from sinkformers.core.call import NormalizeBackend, NormalizeCall, NormalizeResult


class Torch(NormalizeBackend):
    name = "torch"

    def why_not(self, call: NormalizeCall) -> str | None:
        return None

    def forward(self, call: NormalizeCall) -> NormalizeResult:
        weights, state = unrolled.forward(call.problem(), call.working_tau(), call.definition())
        return NormalizeResult(weights.to(call.scores.dtype), *state)

    def backward(
        self, call: NormalizeCall, result: NormalizeResult, d_output: Tensor, needed: dict[str, bool]
    ) -> dict[str, Tensor | None]:
        problem, tau, definition, state = call.problem(), call.working_tau(), call.definition(), result.state()
        weights, kernel = unrolled.recompute_weights(problem, tau, definition, state)
        d_weights = d_output.to(weights.dtype).masked_fill(problem.scores == -torch.inf, 0.0)
        d_scores, d_tau = unrolled.backward(problem, tau, definition, state, kernel, weights, d_weights)
        return {"scores": d_scores, "tau": d_tau}
