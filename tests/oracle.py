"""An independent computation in float64, and the tolerances that follow from it.

Nothing here is imported from the library. Masks are honoured by deletion, entry by entry where they are no product of
rows and columns; gradients come from autograd.
"""

import math

import torch


def weights(scores, n_iters, tau=1.0, mask=None, row_mass=None, col_mass=None, seen=None):
    """Sinkhorn's algorithm on one matrix (n, m). `seen`, a boolean (n, m), collects the entries that ever matter."""
    scores = scores.double()
    alive = scores.detach() > -torch.inf
    if mask is not None:
        alive = alive & mask.expand(scores.shape)
    if row_mass is not None:
        alive = alive & (row_mass > 0)[:, None]
    if col_mass is not None:
        alive = alive & (col_mass > 0)
    rows, cols = alive.any(1), alive.any(0)
    out = torch.zeros_like(scores)
    if not rows.any():
        return out + 0 * scores.masked_fill(~alive, 0).sum()
    small = scores.masked_fill(~alive, -torch.inf)[rows][:, cols]
    n, m = small.shape
    a = torch.full((n,), 1 / n, dtype=torch.float64) if row_mass is None else row_mass.double()[rows]
    b = torch.full((m,), 1 / m, dtype=torch.float64) if col_mass is None else col_mass.double()[cols]
    log_a, log_b = (a / a.sum()).log(), (b / b.sum()).log()
    f, g = torch.zeros(n, dtype=torch.float64), torch.zeros(m, dtype=torch.float64)
    for step in range(n_iters):
        if step % 2 == 0:
            f = -torch.logsumexp(small + g + log_b, 1)
        else:
            g = -tau * torch.logsumexp(small + (f + log_a)[:, None], 0)
        if seen is not None:
            now = torch.zeros_like(alive)
            now[rows.nonzero(), cols.nonzero()[:, 0]] = (small + f[:, None] + g + log_b).detach().exp() > 1e-9
            seen |= now
    return out.index_put((rows.nonzero(), cols.nonzero()[:, 0]), (small + f[:, None] + g + log_b).exp())


def batch_weights(scores, n_iters, tau=1.0, mask=None, row_mass=None, col_mass=None, seen=None):
    """`weights` over any leading axes; `tau` may be a tensor over them."""
    lead, (n, m) = scores.shape[:-2], scores.shape[-2:]
    flat = scores.reshape(-1, n, m)
    taus = torch.as_tensor(tau, dtype=torch.float64).expand(lead).reshape(-1)
    masks = [None] * len(flat) if mask is None else mask.expand(scores.shape).reshape(-1, n, m)
    row = [None] * len(flat) if row_mass is None else row_mass.expand(*lead, n).reshape(-1, n)
    col = [None] * len(flat) if col_mass is None else col_mass.expand(*lead, m).reshape(-1, m)
    marks = [None] * len(flat) if seen is None else seen.view(-1, n, m)
    each = [weights(flat[i], n_iters, taus[i], masks[i], row[i], col[i], marks[i]) for i in range(len(flat))]
    return torch.stack(each).reshape(scores.shape)


def attention(query, key, value, n_iters, tau=1.0, mask=None, bias=None, cost="dot", scale=None):
    """Attention in float64. Masked tokens must be finite here: the oracle multiplies them by zero."""
    query, key, value = query.double(), key.double(), value.double()
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if cost == "dot":
        scores = scale * query @ key.mT
    else:
        scores = -0.5 * scale * (query[..., :, None, :] - key[..., None, :, :]).square().sum(-1)
    if bias is not None:
        scores = scores + bias.double()
    return batch_weights(scores, n_iters, tau, mask) @ value


def eps(tensor):
    return torch.finfo(tensor.dtype).eps


def tolerances(scores, n_iters, d_weights=None, **options):
    """What rounding may do to the weights, and to the gradient of the scores, in the dtype of the scores.

    In the logarithm, a row or column step is non-expansive in the largest error, so errors add up over the steps. A
    step commits the rounding of a sum, taken as √max(n, m)·eps, and reads a kernel whose exponents carry
    eps·|score − row maximum|, counted where a weight ever exceeds 1e-9. Zeroed exponents add max(n, m)·1.6e-8 in
    float32. The gradient is a sum over the steps of products with the weights, so it may err n_iters + 1 times as much,
    times the largest adjoint, which a column sum bounds.
    """
    n, m = scores.shape[-2:]
    seen = torch.zeros(scores.shape, dtype=torch.bool)
    exact = batch_weights(scores.detach(), n_iters, seen=seen, **options)
    finite = scores.detach().double()
    depth = (finite.masked_fill(finite == -torch.inf, 0) - finite.amax(-1, keepdim=True)).abs()
    reach = depth[seen].max().item() if seen.any() else 0.0
    zeroed = max(n, m) * 1.6e-8 if scores.dtype == torch.float32 else 0.0
    per_weight = (n_iters + 1) * eps(scores) * (max(n, m) ** 0.5 + 1 + reach) + zeroed
    if d_weights is None:
        return per_weight
    adjoint = d_weights.abs().max().item() * max(1.0, exact.sum(-2).max().item())
    return per_weight, (n_iters + 1) * per_weight * adjoint
