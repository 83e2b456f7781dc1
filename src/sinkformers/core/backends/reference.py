"""`sinkhorn` as it is specified, in torch's own operations."""

from torch import Tensor

from sinkformers.core.call import NormalizeBackend, NormalizeCall
from sinkformers.core.reference import reference_weights


class Reference(NormalizeBackend):
    name = "reference"
    composite = True

    def automatic(self, call: NormalizeCall) -> bool:
        return False

    def why_not(self, call: NormalizeCall) -> str | None:
        return None

    def forward(self, call: NormalizeCall) -> Tensor:
        return reference_weights(call.problem(), call.working_tau(), call.definition()).to(call.scores.dtype)
