"""Causal Sinkhorn in float64, written from its definitions. Nothing here is imported from the library.

Streaming, with scores C (minus infinity where masked) and T the running sum over rows of 1/(number of visible keys):

    rows     f_i = −LSE_j(C_ij + g_ij)
    columns  g_ij = τ·(log T_ij − LSE_{k ≤ i}(C_kj + f_k))
    weights  exp(C_ij + f_i + g_ij)

Prefix: row i is that of query i in plain Sinkhorn on the tokens that it sees, and itself. Queries that see no key are
left out.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fuzzing import oracle
from fuzzing.oracle import masked_exp, masked_lse


class Streamed(NamedTuple):
    """The iterations: potentials after each step, from f = g = 0."""

    scores: Tensor  # minus infinity where masked
    rows: Tensor  # (…, n) bool: valid
    cols: Tensor  # (…, m)
    f: list[Tensor]  # (…, n)
    g: list[Tensor]  # (…, n, m), 0 where masked
    sums: list[Tensor]  # (…, n, m): LSE_{k ≤ i}(C_kj + f_k) of each column step, 0 before a key is seen
    excess: list[Tensor]  # (…, n, m): sums − log T where valid
    tau: Tensor  # (…)

    @property
    def weights(self) -> Tensor:
        return masked_exp(self.scores + self.f[-1][..., None] + self.g[-1])


class Prefixes(NamedTuple):
    """Plain iterations (…, n, n, n) on each prefix."""

    scores: Tensor  # (…, n, n), all of them
    valid: Tensor
    rows: Tensor
    cols: Tensor
    each: oracle.Run
    tau: Tensor

    @property
    def weights(self) -> Tensor:
        return own_rows(self.each.weights)


CausalRun = Streamed | Prefixes


def iterate(scores: Tensor, valid: Tensor, n_iters: int, tau: Tensor, definition: str) -> CausalRun:
    return (_stream if definition == "streaming" else _prefixes)(scores, valid, n_iters, tau)


def own_rows(each: Tensor) -> Tensor:
    """Row i of prefix i, (…, n, n, m) to (…, n, m)."""
    return each.diagonal(dim1=-3, dim2=-2).movedim(-1, -2)


def _stream(scores: Tensor, valid: Tensor, n_iters: int, tau: Tensor) -> Streamed:
    valid = valid & ~(scores.detach() == -torch.inf)
    rows, cols, seen = valid.any(-1), valid.any(-2), valid.cumsum(-2) > 0
    scores = torch.where(valid, scores, -torch.inf)
    target = (valid.double() / valid.sum(-1, keepdim=True).clamp_min(1)).cumsum(-2)
    log_target = torch.where(seen, target, 1.0).log()
    f, g = [scores.new_zeros(scores.shape[:-1])], [torch.zeros(scores.shape, dtype=scores.dtype)]
    sums, excess = [], []
    for step in range(n_iters):
        if step % 2 == 0:
            f.append(-masked_lse(scores + g[-1], -1, rows))
        else:
            sums.append(_running_lse(scores + f[-1][..., None], seen))
            excess.append(torch.where(valid, sums[-1] - log_target, 0.0))
            g.append(-tau[..., None, None] * excess[-1])
    return Streamed(scores, rows, cols, f, g, sums, excess, tau)


def _running_lse(x: Tensor, seen: Tensor) -> Tensor:
    """Log-sum-exp over each row and those before it; 0 where there is nothing yet."""
    found, total = [], torch.full_like(x[..., 0, :], -torch.inf) if x.shape[-2] else x[..., 0:0, :]
    for row, any_seen in zip(x.unbind(-2), seen.unbind(-2), strict=True):
        top = torch.maximum(row, total).detach()
        top = torch.where(any_seen, top, 0.0)
        total = torch.where(
            any_seen, (masked_exp(row - top) + masked_exp(total - top)).clamp_min(1e-300).log() + top, total
        )
        found.append(torch.where(any_seen, total, 0.0))
    return torch.stack(found, -2) if found else x


def _prefixes(scores: Tensor, valid: Tensor, n_iters: int, tau: Tensor) -> Prefixes:
    n = scores.shape[-1]
    queries = (valid | torch.eye(n, dtype=torch.bool)) & valid.any(-1)[..., None, :]
    inside = queries[..., None] & valid[..., None, :]
    each = oracle.iterate(
        scores[..., None, :, :].expand(inside.shape), inside, n_iters, tau[..., None].expand(inside.shape[:-2])
    )
    return Prefixes(scores, valid, valid.any(-1), valid.any(-2), each, tau)
