"""What attention must give, and how far rounding may move each result."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fuzzing import bounds, causal_bounds, causal_oracle, oracle
from fuzzing.arguments import mask_shape, size_of
from fuzzing.case import Case
from fuzzing.expected_operator import limit_error
from fuzzing.leaves import Expected, Leaves, Tensors, clean, reduced, tau_of, working
from fuzzing.program import token_mask_shape


def attention(case: Case, tensors: Tensors, dropout: Tensor | None) -> dict[str, Expected]:
    if not size_of(case):  # without an entry there is no fixed point to differentiate at
        case = replace(case, gradient="unrolled")
    wanted = ["query", "key", "value", "tau"] + ["attn_mask"] * (case.attn_mask not in (None, "bool"))
    t = Leaves(tensors, wanted)
    valid, bias = _valid(case, t)
    rows, cols = valid.any(-1), valid.any(-2)
    query = clean(t["query"], rows[..., None])
    key, value = (clean(_shared(case, t[name]), cols[..., None]) for name in ("key", "value"))
    scale = 1 / math.sqrt(max(1, case.d)) if case.scale is None else case.scale
    scores = oracle.attention_scores(query, key, scale, case.cost)
    scores = scores if bias is None else scores + bias
    tau = tau_of(case, t.exact)
    if case.gradient == "limit":
        with torch.no_grad():
            run = oracle.converge(scores, valid, tau)
    elif case.order:
        run = causal_oracle.iterate(scores, valid, case.n_iters, tau, case.order)
    else:
        run = oracle.iterate(scores, valid, case.n_iters, tau)
    w_out = clean(t["w_out"], rows[..., None])
    weights = run.weights if dropout is None else run.weights * dropout
    out = weights @ value
    exact = {"out": out} | ({"weights": weights} if case.function == "attention_with_weights" else {})
    heads = [w_out, *([t["w_weights"]] if "weights" in exact else [])]
    grads = t.gradients(list(exact.values()), heads) if case.gradient == "unrolled" else {}
    with torch.no_grad():
        errors, grads = _errors(case, t, run, (query, key, value, scale, bias, dropout, w_out), grads)
        found = {name: t.rounded("query", x, errors[name]) for name, x in exact.items()}
        for name, x in grads.items():
            found[f"d_{name}"] = t.rounded(name, x, errors[f"d_{name}"])
    return {"out": found["out"]} if case.chunks else found


def _errors(case: Case, t: Leaves, run: Any, parts: tuple[Any, ...], grads: Tensors) -> tuple[Tensors, Tensors]:
    """The error of each result, before it is rounded to its dtype; and the gradients, where they are implicit."""
    query, key, value, scale, bias, dropout, w_out = parts
    rounding, rules = working(case), causal_bounds if case.order else bounds
    eps, size = rounding.eps, abs(scale)
    drop = torch.ones_like(run.weights) if dropout is None else dropout
    left, right, s_err = _score_errors(case, query, key, scale, eps, run.cols)
    s_err = s_err + eps * (
        run.scores.abs().nan_to_num(posinf=0) + (0 if bias is None else bias.abs().nan_to_num(posinf=0))
    )
    known = rules.forward(run, s_err, rounding)
    if case.gradient == "limit":
        known = known._replace(final=known.final + limit_error(case, run))
    off = rules.weight_error(run, known)
    e, m = value.shape[-1], key.shape[-2]
    weights = run.weights * drop
    errors = {"out": (off * drop) @ value.abs() + eps * (m**0.5 + 2) * (weights @ value.abs()), "weights": off * drop}
    d_weights, magnitude = drop * (w_out @ value.mT), drop * (w_out.abs() @ value.abs().mT)
    if case.function == "attention_with_weights":
        d_weights, magnitude = d_weights + drop * t["w_weights"], magnitude + drop * t["w_weights"].abs()
    if case.gradient == "unrolled":
        back = rules.backward(run, known, d_weights, magnitude * (1 + eps * e**0.5), rounding)
    else:
        back = _implicit(run, known, d_weights, magnitude, case)
    off_scores, d_scores = back.scores_error, back.scores.abs()
    sums = eps * (max(case.n, m) ** 0.5 + 2)
    products = sums + rounding_in_products(case)
    full = {
        "query": size * ((off_scores + products * d_scores) @ right),
        "key": size * ((off_scores + products * d_scores).mT @ left),
        "value": (off * drop).mT @ w_out.abs() + sums * (weights.mT @ w_out.abs()),
    }
    if case.cost == "l2":
        full["key"] = full["key"] + size * (off_scores + sums * d_scores).sum(-2)[..., None] * right
        # The oracle subtracts where the library shifts: its own rounding counts where keys lie close together.
        own = size * torch.finfo(torch.float64).eps / eps * (off_scores + sums * d_scores)
        full["query"] = full["query"] + own @ key.abs() + own.sum(-1)[..., None] * query.abs()
        full["key"] = full["key"] + own.mT @ query.abs() + own.sum(-2)[..., None] * key.abs()
    if case.gradient != "unrolled":
        grads = _chain(case, t, back.scores, query, key, weights, w_out, scale)
    # What is shared between heads is rounded for each of them, and then added.
    unit = torch.finfo(t.given["query"].dtype).eps
    for name, error in full.items():
        whole = error if name == "query" else error + unit * _magnitude(name, full, grads)
        errors[f"d_{name}"] = _gathered(case, whole, t[name].shape)
    if "attn_mask" in t.wanted:
        # A bias that repeats is repeated in its own dtype, in which its gradients are then added.
        each = torch.finfo(t.given["attn_mask"].dtype).eps
        errors["d_attn_mask"] = reduced(off_scores + (sums + each) * d_scores, t["attn_mask"].shape)
    if "tau" in t.wanted:
        errors["d_tau"] = reduced(back.tau_error, t["tau"].shape)
    return errors, grads


def rounding_in_products(case: Case) -> float:
    """What products in bfloat16 round off the gradient of the scores, relative to each entry, on the way to tokens."""
    serves = case.backend in ("auto", "native:avx512_bf16") and case.cost == "dot" and not case.order
    if case.function != "sinkhorn_attention" or case.dtype != "bfloat16" or not serves or case.gradient != "unrolled":
        return 0.0
    return torch.finfo(torch.bfloat16).eps / 2


def _magnitude(name: str, full: Tensors, grads: Tensors) -> Tensor | float:
    """The size of the terms that are added where a key or a value is shared; unknown, so their sum stands for each."""
    shape = full[name].shape
    return 0.0 if grads[name].shape == shape else 4 * grads[name].abs().max().item() if grads[name].numel() else 0.0


def _score_errors(
    case: Case, query: Tensor, key: Tensor, scale: float, eps: float, cols: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The sizes of queries and keys as the library multiplies them, and the error of the scores."""
    d, size = query.shape[-1], abs(scale)
    if case.cost == "dot":
        left, right = query.abs(), key.abs()
        return left, right, eps * (d**0.5 + 2) * size * (left @ right.mT)
    count = cols.sum(-1).clamp_min(1)[..., None, None]
    centre = key.sum(-2, keepdim=True) / count
    left, right = (query - centre).abs(), clean((key - centre).abs(), cols[..., None])
    off_left, off_right = eps * (query.abs() + centre.abs()), eps * (key.abs() + centre.abs())
    moved = off_left @ right.mT + left @ off_right.mT + (right * off_right).sum(-1)[..., None, :]
    return left, right, size * (moved + eps * (d**0.5 + 2) * (left @ right.mT + right.square().sum(-1)[..., None, :]))


def _valid(case: Case, t: Leaves) -> tuple[Tensor, Tensor | None]:
    """Which entries (…, n, m) are valid, and the bias, 0 where they are not."""
    valid = torch.ones(*case.lead, case.n, case.m, dtype=torch.bool)
    valid = valid.tril() if case.causal else valid
    for name, size, axis in (("query_mask", case.n, -1), ("key_mask", case.m, -2)):
        mask = t.get(name)
        if mask is not None:
            axes = getattr(case, name).partition(":")[2]
            valid = valid & mask.reshape(token_mask_shape(case, axes, size)).unsqueeze(axis)
    if case.attn_mask is None:
        return valid, None
    mask = t["attn_mask"].reshape(mask_shape(case))
    if case.attn_mask == "bool":
        return valid & mask, None
    valid = valid & ~(mask.detach() <= torch.finfo(getattr(torch, case.attn_mask)).min / 2)
    return valid, torch.where(valid, mask, 0.0)


def _shared(case: Case, tokens: Tensor) -> Tensor:
    """Keys or values for every query head."""
    if case.groups > 1:
        tokens = tokens.repeat_interleave(case.groups, -3)
    return tokens.expand(*case.lead, *tokens.shape[-2:])


def _gathered(case: Case, error: Tensor, shape: torch.Size) -> Tensor:
    if case.groups > 1 and error.shape != shape:
        return error.unflatten(-3, (-1, case.groups)).sum(-3)
    return reduced(error, shape)


def _implicit(
    run: oracle.Run, known: bounds.Forward, d_weights: Tensor, magnitude: Tensor, case: Case
) -> bounds.Backward:
    """Conjugate gradients stop at a relative residual; a small system multiplies it by its condition."""
    plan, system = oracle.fixed_point_system(run.weights, run.tau)
    grad = oracle.implicit_gradient(run.weights, d_weights, plan, system)
    stops = 1e-12 if case.dtype == "float64" else 4e-6
    local = (run.weights * magnitude).sum((-2, -1), keepdim=True)
    cond = oracle.condition(system)[..., None, None]
    worst = (known.final * (run.weights > 0)).amax((-2, -1), keepdim=True)
    valid = run.scores != -torch.inf
    error = torch.where(valid, (stops + 4 * worst) * cond * local, 0.0)
    return bounds.Backward(grad, error, torch.zeros_like(run.tau))


def _chain(
    case: Case, t: Leaves, d_scores: Tensor, query: Tensor, key: Tensor, weights: Tensor, w_out: Tensor, scale: float
) -> Tensors:
    """From the gradient of the scores to those of the tokens."""
    d_query, d_key = scale * d_scores @ key, scale * d_scores.mT @ query
    if case.cost == "l2":
        d_query = d_query - scale * d_scores.sum(-1)[..., None] * query
        d_key = d_key - scale * d_scores.sum(-2)[..., None] * key
    full = {"query": d_query, "key": d_key, "value": weights.mT @ w_out}
    found = {name: _gathered(case, x, t[name].shape) for name, x in full.items()}
    if "attn_mask" in t.wanted:
        found["attn_mask"] = reduced(d_scores, t["attn_mask"].shape)
    return found
