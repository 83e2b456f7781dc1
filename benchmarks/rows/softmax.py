"""SoftMax attention: torch's fused kernel, and the three operations spelt out."""

import math

import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Case, Masks
from benchmarks.rows.row import Row, of_torch, refuse_mask


def sdpa(query: Tensor, key: Tensor, value: Tensor, case: Case, masks: Masks) -> Tensor:
    mask = masks.scores if masks.tokens is None else masks.tokens[:, None, None, :]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=case.is_causal)


def eager(query: Tensor, key: Tensor, value: Tensor, case: Case, masks: Masks) -> Tensor:
    refuse_mask(masks, "eager SoftMax, as timed here,", case)
    return ((query @ key.mT) / math.sqrt(query.shape[-1])).softmax(-1) @ value


ROWS = [
    Row("sdpa", "SDPA, `F.scaled_dot_product_attention`", of_torch(sdpa), formula="softmax"),
    Row("softmax", "eager SoftMax", of_torch(eager), formula="softmax", matrices=4),
]
