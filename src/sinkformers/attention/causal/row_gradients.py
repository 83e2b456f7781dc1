"""The exact gradient of causal attention by blocks of rows, in torch's own operations.

It is written out and not left to autograd, which records nothing inside an operator.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sinkformers.attention.causal.call import CausalAttentionCall
from sinkformers.attention.causal.rows import Block, Sums, normalise_rows
from sinkformers.attention.masks import zero_masked


class BlockGradients(NamedTuple):
    """The gradients of a block of rows; keys, values and sums are those of its visible columns."""

    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor  # (..., rows, columns), and of a bias
    received: Tensor  # (..., column steps, columns), of the sums before the block
    tau: Tensor | None  # (...)


def row_gradients(
    call: CausalAttentionCall,
    start: int,
    stop: int,
    before: Sums,
    d_out: Tensor,
    d_after: Tensor,
    first_row: int = 0,
) -> BlockGradients:
    """The gradients of a block, whose rows have the gradient `d_out`, and the sums after it `d_after`."""
    block = normalise_rows(call, start, stop, before, first_row)
    columns = block.weights.shape[-1]
    query, key, value = call.query[..., start:stop, :], call.key[..., :columns, :], call.value[..., :columns, :]
    d_out = zero_masked(d_out, block.valid.any(-1))
    kept = block.weights if block.dropout is None else block.weights * block.dropout
    d_weights = d_out @ value.mT
    d_weights = d_weights if block.dropout is None else d_weights * block.dropout
    d_scores = block.weights * (d_weights - (block.weights * d_weights).sum(-1, keepdim=True))
    d_scores, d_before, d_tau = _through_steps(call, block, before, d_scores, d_after)
    d_key = call.scale * (d_scores.mT @ query)
    if call.l2:
        d_key = d_key - call.scale * d_scores.sum(-2)[..., None] * key
    return BlockGradients(call.scale * (d_scores @ key), d_key, kept.mT @ d_out, d_scores, d_before, d_tau)


def _through_steps(
    call: CausalAttentionCall, block: Block, before: Sums, d_scores: Tensor, d_after: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """From the gradient of the last row step back through all steps: of scores, of the sums before, and of tau."""
    d_before, d_g, tau = torch.zeros_like(before.received), d_scores, call.tau
    d_tau = None if tau is None else torch.zeros_like(tau)
    for step in reversed(range(len(block.received))):
        received, attention = block.received[step], block.attention[step]
        if d_tau is not None:
            d_tau = d_tau - (d_g * block.excess(step)).sum((-2, -1))
        d_received = -d_g if tau is None else -tau[..., None, None] * d_g
        d_received = torch.cat([d_received[..., :-1, :], d_received[..., -1:, :] + d_after[..., step, None, :]], -2)
        later = _sum_of_later(d_received, received)
        d_before[..., step, :] = (before.received[..., step, :] - received[..., 0, :]).exp() * later[..., 0, :]
        d_attention = ((attention - received).exp() * later).masked_fill(~block.valid, 0.0)
        normalised = (attention + block.potential(step, tau)).exp()
        d_g = -normalised * d_attention.sum(-1, keepdim=True)
        d_scores = d_scores + d_attention + d_g
    return d_scores, d_before, d_tau


def _sum_of_later(gradients: Tensor, sums: Tensor) -> Tensor:
    """Of row k: the sum of `gradients` over the rows i ≥ k, each times e^(sums_k − sums_i), which is at most 1.

    Sums over 1, 2, 4, … rows are made of one another, so that nothing leaves the floating-point range however much the
    sums grow.
    """
    width, rows = 1, gradients.shape[-2]
    while width < rows:
        decay = (sums[..., :-width, :] - sums[..., width:, :]).exp()
        head = gradients[..., :-width, :] + decay * gradients[..., width:, :]
        gradients, width = torch.cat([head, gradients[..., -width:, :]], -2), 2 * width
    return gradients
