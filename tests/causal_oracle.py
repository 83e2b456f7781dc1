"""Causal Sinkhorn in loops over rows and numbers, in float64, from the formulas alone. Nothing of the library is used.

Streaming, for row i with visible keys j: `T_j += 1/count`, then for each pair of steps `u = 1/(A_i·v)`,
`s_j += u A_ij`, `v_j = (T_j/s_j)^tau`; the weights are `A_ij v_j` over their sum. Prefix: the row of query i in plain
Sinkhorn on the tokens that it sees and itself, less queries that see no key; columns aim at rows over columns. Both
are written with logarithms, so that no score is too large.
"""

import math

import numpy as np
import torch


def log_sum(values):
    top = max(values)
    return top + math.log(math.fsum(math.exp(value - top) for value in values))


def streaming(scores, mask, n_iters, tau=1.0):
    """Weights (n, m) of one matrix, a numpy array."""
    n, m = scores.shape
    expected, received = [0.0] * m, [[-math.inf] * m for _ in range(n_iters // 2)]
    weights = np.zeros((n, m))
    for i in range(n):
        seen = [j for j in range(m) if mask[i, j] and scores[i, j] > -math.inf]
        if not seen:
            continue
        g = dict.fromkeys(seen, 0.0)
        for j in seen:
            expected[j] += 1 / len(seen)
        for sums in received:
            f = -log_sum([scores[i, j] + g[j] for j in seen])
            for j in seen:
                sums[j] = np.logaddexp(sums[j], scores[i, j] + f)
                g[j] = tau * (math.log(expected[j]) - sums[j])
        f = -log_sum([scores[i, j] + g[j] for j in seen])
        for j in seen:
            weights[i, j] = math.exp(scores[i, j] + f + g[j])
    return weights


def prefix(scores, mask, n_iters, tau=1.0):
    n = len(scores)
    weights = np.zeros((n, n))
    for i in range(n):
        keys = [j for j in range(n) if mask[i, j]]
        queries = sorted(j for j in {*keys, i} if mask[j].any())  # one that sees no key is masked
        if not keys:
            continue
        g, target = dict.fromkeys(keys, 0.0), math.log(len(queries) / len(keys))
        f = {}
        for step in range(n_iters):
            if step % 2 == 0:
                f = {k: -log_sum([scores[k, j] + g[j] for j in keys]) for k in queries}
            else:
                g = {j: tau * (target - log_sum([scores[k, j] + f[k] for k in queries])) for j in keys}
        for j in keys:
            weights[i, j] = math.exp(scores[i, j] + f[i] + g[j])
    return weights


DEFINITIONS = {"streaming": streaming, "prefix": prefix}


def weights(scores, n_iters, tau=1.0, mask=None, definition="streaming"):
    """Weights (…, n, m) in float64 of tensors; `mask` is the lower triangle by default."""
    *lead, n, m = scores.shape
    mask = torch.ones(n, m, dtype=torch.bool).tril() if mask is None else mask
    flat, masks = scores.detach().double().reshape(-1, n, m), mask.expand(*lead, n, m).reshape(-1, n, m)
    taus = torch.as_tensor(tau, dtype=torch.float64).expand(lead).reshape(-1)
    each = [
        DEFINITIONS[definition](flat[at].numpy(), masks[at].numpy(), n_iters, float(taus[at].detach()))
        for at in range(len(flat))
    ]
    return torch.from_numpy(np.stack(each)).reshape(scores.shape)


def attention(
    query, key, value, n_iters, tau=1.0, mask=None, bias=None, cost="dot", scale=None, definition="streaming"
):
    """Attention in float64 over any leading axes. What is masked must be finite here."""
    query, key, value = (x.detach().double() for x in (query, key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if cost == "dot":
        scores = scale * query @ key.mT
    else:
        scores = -0.5 * scale * (query[..., :, None, :] - key[..., None, :, :]).square().sum(-1)
    scores = scores if bias is None else scores + bias.detach().double()
    return weights(scores, n_iters, tau, mask, definition) @ value


def tolerance(scores, mask, n_iters, dtype=None):
    """What rounding may do to a weight: the error of its logarithm, and it is at most 1.

    In the logarithm a step is non-expansive in the largest error, so that errors add up over the steps. A step commits
    the rounding of a sum over m keys and one over n queries, and reads scores that carry eps·|score − row maximum|.
    """
    n, m = scores.shape[-2:]
    visible = scores.detach().double().masked_fill(~mask, math.nan)
    depth = (visible.nan_to_num(-math.inf).amax(-1, keepdim=True) - visible).nan_to_num(0.0, 0.0, 0.0).max().item()
    return (n_iters + 1) * torch.finfo(dtype or scores.dtype).eps * (n + m + depth)
