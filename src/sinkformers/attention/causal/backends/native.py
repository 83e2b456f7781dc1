"""Causal attention by the compiled CPU kernels; heads whose sums leave their range are recomputed in torch."""

from sinkformers.attention.causal.backends.torch import Torch
from sinkformers.attention.causal.call import CausalAttentionCall


class Native(Torch):
    name = "native"

    def why_not(self, call: CausalAttentionCall) -> str | None:
        return "not yet"
