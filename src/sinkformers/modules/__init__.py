"""`nn.Module` shells of the operator and the attention."""

from sinkformers.modules.equilibrium import EquilibriumAttention, EquilibriumInfo
from sinkformers.modules.invertible import InvertibleAttention
from sinkformers.modules.multihead import MultiheadAttention
from sinkformers.modules.self_attention import SelfAttention
from sinkformers.modules.sinkhorn import Sinkhorn

__all__ = [
    "EquilibriumAttention",
    "EquilibriumInfo",
    "InvertibleAttention",
    "MultiheadAttention",
    "SelfAttention",
    "Sinkhorn",
]
