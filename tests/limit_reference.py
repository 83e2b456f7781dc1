"""Attention at the limit, by thousands of log-domain steps in float64, the last of them differentiated by autograd.

Nothing here is imported from the library. Masks are honoured by leaving entries out of every sum.
"""

import math

import torch

BACKENDS = ["torch", "native"]
STEPS = 3001  # scores of standard deviation 1 converge to rounding in some hundred
UNROLLED = 601  # the steps that are differentiated; those before them start them at the limit


def weights(scores, valid, tau=1.0, steps=STEPS, unrolled=UNROLLED):
    """Weights (…, n, m) after an odd number of steps; zero where not `valid`, a boolean (…, n, m)."""
    scores, valid = scores.double(), valid.expand(scores.shape)
    rows, cols = valid.any(-1), valid.any(-2)
    target = (rows.sum(-1, keepdim=True) / cols.sum(-1, keepdim=True).clamp_min(1)).double().clamp_min(1e-300).log()
    tau = torch.as_tensor(tau, dtype=torch.float64)[..., None]
    scores = scores.masked_fill(~valid, -torch.inf)
    f, g = torch.zeros_like(scores[..., 0]), torch.zeros_like(scores[..., 0, :])
    for step in range(steps):
        with torch.set_grad_enabled(steps - step <= unrolled):
            if step % 2 == 0:
                f = -(scores + g[..., None, :]).masked_fill(~rows[..., None], 0.0).logsumexp(-1)
                f = f.masked_fill(~rows, 0.0)
            else:
                sums = (scores + f[..., None]).masked_fill(~cols[..., None, :], 0.0).logsumexp(-2)
                g = (-tau * (sums - target)).masked_fill(~cols, 0.0)
    return (scores + f[..., None] + g[..., None, :]).exp()


def attention(query, key, value, bias=None, tau=1.0, *, valid=None, cost="dot", kept=None, dropout_p=0.0, **steps):
    """Attention (…, n, e) of tokens whose masked ones are finite; `kept` are the weights that dropout leaves."""
    query, key, value = query.double(), key.double(), value.double()
    scores = query @ key.mT
    if cost == "l2":
        scores = -0.5 * (query[..., :, None, :] - key[..., None, :, :]).square().sum(-1)
    scores = scores / math.sqrt(query.shape[-1])
    valid = torch.ones(scores.shape, dtype=torch.bool) if valid is None else valid
    if bias is not None:
        bias = bias.double()
        valid = valid & (bias.detach() > -torch.inf)
        scores = scores + bias.masked_fill(bias.detach() == -torch.inf, 0.0)
    dropped = weights(scores, valid, tau, **steps)
    if kept is not None:
        dropped = dropped * kept / (1 - dropout_p)
    return dropped @ value


def tokens(*lead, n=7, m=11, d=5, e=3, dtype=torch.float64):
    """Query, key and value; scores have a standard deviation of about 1."""
    return [torch.randn(*lead, *shape, dtype=torch.float64).to(dtype) for shape in ((n, d), (m, d), (m, e))]
