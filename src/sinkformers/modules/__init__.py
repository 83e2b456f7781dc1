"""`nn.Module`s for the operator and for attention."""

from sinkformers.modules.equilibrium import EquilibriumAttention, EquilibriumInfo
from sinkformers.modules.invertible import InvertibleAttention
from sinkformers.modules.multihead import MultiheadAttention
from sinkformers.modules.offset_attention import OffsetAttention
from sinkformers.modules.self_attention import SelfAttention
from sinkformers.modules.set_blocks import ISAB, MAB, PMA, SAB
from sinkformers.modules.sinkhorn import Sinkhorn

__all__ = [
    "ISAB",
    "MAB",
    "PMA",
    "SAB",
    "EquilibriumAttention",
    "EquilibriumInfo",
    "InvertibleAttention",
    "MultiheadAttention",
    "OffsetAttention",
    "SelfAttention",
    "Sinkhorn",
]
