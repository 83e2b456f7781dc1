"""`causal_sinkhorn`: weights that are normalised in both directions without a look at later queries."""

import torch
from torch import Tensor

from sinkformers.core import checks
from sinkformers.core.arguments import empty_weights, relaxation_tensor, with_rank
from sinkformers.core.causal_reference import only_seen, prefix_queries, prefix_reference
from sinkformers.core.definition import Definition
from sinkformers.core.modes import autocasts, readable, without_autocast
from sinkformers.core.problem import working_dtype
from sinkformers.core.ranges import SAFE_PRODUCT

DEFINITIONS = ("streaming", "prefix")


def causal_sinkhorn(
    scores: Tensor,
    *,
    n_iters: int = 3,
    tau: float | Tensor = 1.0,
    mask: Tensor | None = None,
    definition: str = "streaming",
) -> Tensor:
    """Normalise rows and columns of `exp(scores)` so that no row depends on a later query.

    Sinkhorn's algorithm under a triangular mask leaks, since a key's column sum runs over later queries, and tends to
    the identity, the only triangular matrix that is doubly stochastic. There are two definitions that do neither.

    `"streaming"`: each query divides out the attention that every key has received so far, relative to what uniform
    attention under the same mask would have given it. It costs about n_iters/2 times SoftMax, and a generated token
    needs (n_iters − 1)/2 numbers per key. Columns are balanced approximately: the past cannot be changed.

    `"prefix"`: row i is the last row of plain Sinkhorn on the tokens up to i. Columns are balanced within each prefix.
    It costs n_iters − 1 products of n×n matrices, and is for square scores only. Scores above the diagonal are read,
    with the earlier tokens of a prefix as queries and the later ones as keys; nothing of later prefixes is.

    Args:
        scores: (…, n, m). For `"streaming"` minus infinity means masked.
        n_iters: how many normalisations; odd, so that rows sum to 1. 1 is SoftMax under the mask.
        tau: relaxes the column steps, from 0 (SoftMax) to 1, as in `sinkhorn`.
        mask: boolean, broadcasts to the scores, `True` where a query sees a key. By default the lower triangle, which
            needs n = m. With a mask of its own, `"streaming"` takes any n and m: windows, packed documents, blocks, or
            the cross-attention of a decoder, in which every key is visible and queries come one after the other.
        definition: `"streaming"` or `"prefix"`.

    Returns:
        weights (…, n, m) in the dtype of the scores. Rows sum to 1, those without a visible key to 0.

    Examples:
        >>> import torch, sinkformers
        >>> scores = torch.randn(2, 6, 6)
        >>> weights = sinkformers.causal_sinkhorn(scores)
        >>> first = sinkformers.causal_sinkhorn(scores[:, :4, :4])  # what follows changes nothing
        >>> torch.allclose(weights[:, :4, :4], first), weights.triu(1).abs().max().item()
        (True, 0.0)

    The paper has no causal attention: both definitions are ours.
    """
    caller = "causal_sinkhorn"
    checks.tensor(caller, "scores", scores, min_dim=2)
    checks.one_of(caller, "definition", definition, DEFINITIONS)
    steps = Definition(causal_iterations(caller, n_iters))
    relaxation = checks.relaxation(caller, tau, "scores", scores)
    *_, n, m = scores.shape
    if mask is None and n != m:
        raise ValueError(
            f"{caller}: without a mask the scores must be square, for the lower triangle; got {tuple(scores.shape)}. "
            "Pass a mask that says which keys each query sees; all of them in the cross-attention of a decoder."
        )
    if definition == "prefix" and n != m:
        raise ValueError(
            f'{caller}: definition="prefix" is for square scores, whose queries and keys are the same tokens; got '
            f'{tuple(scores.shape)}. definition="streaming" takes any shape.'
        )
    if mask is None:
        mask = torch.ones(n, m, dtype=torch.bool, device=scores.device).tril()
    checks.one_device(caller, "scores", scores, mask=mask)
    checks.mask(caller, "mask", mask, scores.shape, "scores")
    if scores.numel() == 0:
        return empty_weights(scores, relaxation)
    dtype = torch.float32 if autocasts(scores.device) and scores.dtype != torch.float64 else scores.dtype
    with without_autocast(scores.device):
        wide = scores.to(working_dtype(scores.dtype))
        by_matrix = relaxation_tensor(relaxation, wide)
        by_matrix = None if by_matrix is None else by_matrix.to(wide)
        if definition == "streaming":
            wide = wide.masked_fill(~with_rank(mask, wide.dim()), -torch.inf)
            return streaming_weights(wide, by_matrix, steps).to(dtype)
        return prefix_weights(wide, with_rank(mask, wide.dim()).expand(wide.shape), by_matrix, steps).to(dtype)


def causal_iterations(caller: str, n_iters: object) -> int:
    """Check the number of normalisations of causal attention: odd and finite."""
    found = checks.iterations(caller, n_iters)
    if isinstance(found, float) or found % 2 == 0:
        raise ValueError(
            f"{caller}: causal attention needs an odd, finite n_iters, so that rows sum to 1 without a look at later "
            f"queries; got {n_iters}. n_iters=3 is the usual choice."
        )
    return found


def streaming_weights(scores: Tensor, tau: Tensor | None, definition: Definition) -> Tensor:
    """`streaming_reference`, all rows at once; composed of torch's own operations."""
    lowest = torch.finfo(scores.dtype).min / 4
    valid = scores != -torch.inf
    scores = shifted(scores, lowest)
    log_expected = expected_share(valid, scores.dtype).clamp_min(torch.finfo(scores.dtype).tiny).log()
    g = torch.zeros_like(scores)
    for _ in range(definition.col_steps()):
        attention = (scores - (scores + g).logsumexp(-1, keepdim=True)).masked_fill(~valid, lowest)
        g = (log_expected - attention.logcumsumexp(-2)).masked_fill(~valid, 0.0)
        g = g if tau is None else tau[..., None, None] * g
    return (scores + g).softmax(-1).masked_fill(~valid, 0.0)


def shifted(scores: Tensor, lowest: float) -> Tensor:
    """The scores, each row less its maximum, which no weight depends on; `lowest` where masked."""
    top = scores.detach().amax(-1, keepdim=True)
    return (scores - top.masked_fill(top == -torch.inf, 0.0)).clamp_min(lowest)


def expected_share(valid: Tensor, dtype: torch.dtype) -> Tensor:
    """What uniform attention under a mask has given each key by each row, (..., n, m)."""
    wide = valid.double() if valid.device.type != "mps" else valid.float()
    return (wide / wide.sum(-1, keepdim=True).clamp_min(1)).cumsum(-2).to(dtype)


def prefix_weights(scores: Tensor, valid: Tensor, tau: Tensor | None, definition: Definition) -> Tensor:
    """`prefix_reference` by matrix products: row i of `v` holds the column scalings of prefix i, and so for `u`.

    Where the scalings leave the floating-point range, the reference computes all matrices. Where values cannot be read
    (traced, or inside `torch.func`) the rows of such prefixes are NaN, and never finite and wrong.
    """
    lowest, dtype = torch.finfo(scores.dtype).min / 4, scores.dtype
    rows = prefix_queries(valid)
    target = rows.sum(-1, keepdim=True).to(dtype) / valid.sum(-1, keepdim=True).clamp_min(1)
    kernel = shifted(only_seen(scores, valid), lowest).exp()
    v, unsafe = valid.to(dtype), torch.zeros_like(valid[..., 0])
    # Entries of the kernel that were rounded to zero must not have mattered: a smaller range than usual.
    largest = SAFE_PRODUCT[dtype] ** 0.5
    for _ in range(definition.col_steps()):
        sums = v @ kernel.mT
        vanishes = rows & ~(sums.detach() > 0)  # NaN of a later token is not for earlier prefixes: it falls back too
        u = torch.where(rows, 1 / torch.where(rows & (sums > 0), sums, 1.0), 0.0)
        sums = u @ kernel
        v = target / torch.where(valid & (sums > 0), sums, 1.0)
        # Before the power, which brings a scaling back into the range that its gradient has left.
        top_u, top_v = u.detach().amax(-1).clamp_min(1), torch.where(valid, v.detach(), 0.0).amax(-1).clamp_min(1)
        unsafe = unsafe | ~(top_u * top_v <= largest)
        v = torch.where(valid, v if tau is None else v.pow(tau[..., None, None]), 0.0)
        vanishes = vanishes | (valid & ~(sums.detach() > 0))
        unsafe = unsafe | vanishes.any(-1)
    weights = kernel * v
    total = weights.sum(-1, keepdim=True)
    unsafe = unsafe | (valid.any(-1) & ~(v.detach().amax(-1) < largest * total.detach()[..., 0]))
    if readable(scores) and bool(unsafe.any()):
        return prefix_reference(scores, valid, tau, definition)
    weights = weights / torch.where(total > 0, total, 1.0)
    return weights.masked_fill(unsafe[..., None] & valid, torch.nan)
