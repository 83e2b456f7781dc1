"""What a call must give: output and every gradient in float64, each with its derived tolerance."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuzzing import bounds, oracle
from fuzzing.arguments import BATCH, mask_shape
from fuzzing.bounds import SAFETY, Rounding
from fuzzing.case import Case
from fuzzing.program import ATTENTION, limit_tolerance, token_mask_shape


class Expected(NamedTuple):
    value: Tensor
    tolerance: Tensor


Tensors = dict[str, Tensor]


def expect(case: Case, tensors: Tensors, dropout: Tensor | None) -> dict[str, Expected]:
    """By name, for the tensors of a program (`results` there)."""
    if not case.transform.startswith("vmap"):
        if case.transform == "jacrev:sum" and case.lead:
            tensors = {**tensors, "w_out": tensors["w_out"][:1].expand(tensors["w_out"].shape)}
        return _one(case, tensors, dropout)
    dims = {name: at for name, at in case.vmap_dims.items() if name in tensors}
    samples = [
        _one(case, {name: x.select(dims[name], i) if name in dims else x for name, x in tensors.items()}, None)
        for i in range(BATCH)
    ]
    joined = {}
    for name in samples[0]:
        values, tolerances = zip(*(sample[name] for sample in samples), strict=True)
        source = name.removeprefix("d_") if name.startswith("d_") else f"w_{name}"
        if source in dims:
            joined[name] = Expected(torch.stack(values, dims[source]), torch.stack(tolerances, dims[source]))
        else:  # the samples' gradients are rounded, then added
            eps = torch.finfo(tensors[source].dtype).eps
            terms = sum(value.abs() for value in values)
            joined[name] = Expected(sum(values), sum(tolerances) + 2 * eps * terms)  # pyright: ignore
    return joined


def _one(case: Case, tensors: Tensors, dropout: Tensor | None) -> dict[str, Expected]:
    if case.function in ATTENTION:
        return _attention(case, tensors, dropout)
    if case.function == "marginal_error":
        return _marginals(case, tensors)
    return _operator(case, tensors)


def _is_softmax(case: Case) -> bool:
    return not isinstance(case.tau, str) and (case.n_iters == 1 or case.tau == 0)


def working(case: Case) -> Rounding:
    """The precision of the iterations: float32 at least, except where torch's own SoftMax attention serves."""
    dtype = getattr(torch, case.dtype)
    if case.function == "sinkhorn_attention" and case.backend == "auto" and _is_softmax(case) and case.cost == "dot":
        return Rounding.of(dtype)._replace(eps=torch.finfo(dtype).eps)
    return Rounding.of(dtype)


def _tau(case: Case, tensors: Tensors) -> Tensor:
    given = tensors["tau"].double() if "tau" in tensors else torch.tensor(float(case.tau), dtype=torch.float64)
    return given


def _clean(x: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid, x, 0.0)


class Leaves:
    """Float64 copies of the tensors, the names of those with a gradient, and how gradients and tolerances are cast."""

    def __init__(self, tensors: Tensors, wanted: list[str]) -> None:
        self.given, self.wanted = tensors, [name for name in wanted if name in tensors]
        self.exact = {k: x.double() if x.is_floating_point() else x for k, x in tensors.items()}
        for name in self.wanted:
            self.exact[name] = self.exact[name].detach().clone().requires_grad_()

    def __getitem__(self, name: str) -> Tensor:
        return self.exact[name]

    def get(self, name: str) -> Tensor | None:
        return self.exact.get(name)

    def gradients(self, outputs: list[Tensor], weights: list[Tensor]) -> Tensors:
        names = [name for name in self.wanted]
        inputs = [self.exact[name] for name in names]
        found = torch.autograd.grad(outputs, inputs, weights, allow_unused=True, materialize_grads=True)
        return dict(zip(names, found, strict=True))

    def rounded(self, name: str, value: Tensor, error: Tensor) -> Expected:
        """The tolerance of a result in the dtype of a tensor: the error, and one rounding."""
        info = torch.finfo(self.given[name].dtype)
        tolerance = SAFETY * error + info.eps * value.abs()
        # Without an error there is nothing to round: what is masked gives exact zeros.
        tolerance = torch.where(tolerance > 0, tolerance + 4 * info.smallest_normal, 0.0)
        return Expected(value.detach(), tolerance.detach())


def reduced(error: Tensor, shape: torch.Size) -> Tensor:
    return error.sum_to_size(shape) if error.shape != shape else error


def _attention(case: Case, tensors: Tensors, dropout: Tensor | None) -> dict[str, Expected]:
    wanted = ["query", "key", "value", "tau"] + ["attn_mask"] * (case.attn_mask not in (None, "bool"))
    t = Leaves(tensors, wanted)
    valid, bias = _valid(case, t)
    rows, cols = valid.any(-1), valid.any(-2)
    query = _clean(t["query"], rows[..., None])
    key, value = (_clean(_shared(case, t[name]), cols[..., None]) for name in ("key", "value"))
    scale = 1 / math.sqrt(max(1, case.d)) if case.scale is None else case.scale
    scores = oracle.attention_scores(query, key, scale, case.cost)
    scores = scores if bias is None else scores + bias
    tau = _tau(case, t.exact).expand(case.lead)
    run = oracle.iterate(scores, valid, case.n_iters, tau)
    w_out = _clean(t["w_out"], rows[..., None])
    weights = run.weights if dropout is None else run.weights * dropout
    out = weights @ value
    exact = {"out": out} | ({"weights": weights} if case.function == "attention_with_weights" else {})
    heads = [w_out, *([t["w_weights"]] if "weights" in exact else [])]
    grads = t.gradients(list(exact.values()), heads) if case.gradient == "unrolled" else {}
    with torch.no_grad():
        errors, grads = _attention_errors(case, t, run, (query, key, value, scale, bias, dropout, w_out), grads)
        found = {name: t.rounded("query", x, errors[name]) for name, x in exact.items()}
        for name, x in grads.items():
            found[f"d_{name}"] = t.rounded(name, x, errors[f"d_{name}"])
    return found


def _attention_errors(
    case: Case, t: Leaves, run: oracle.Run, parts: tuple[Any, ...], grads: Tensors
) -> tuple[Tensors, Tensors]:
    """The error of each result, before it is rounded to its dtype; and the gradients, where they are implicit."""
    query, key, value, scale, bias, dropout, w_out = parts
    rounding = working(case)
    eps, size = rounding.eps, abs(scale)
    drop = torch.ones_like(run.weights) if dropout is None else dropout
    left, right, s_err = _score_errors(case, query, key, scale, eps, run.cols)
    s_err = s_err + eps * (run.scores.abs().nan_to_num(posinf=0) + (0 if bias is None else bias.abs().nan_to_num(posinf=0)))
    known = bounds.forward(run, s_err, rounding)
    off = bounds.weight_error(run, known)
    e, m = value.shape[-1], key.shape[-2]
    weights = run.weights * drop
    errors = {"out": (off * drop) @ value.abs() + eps * (m**0.5 + 2) * (weights @ value.abs()), "weights": off * drop}
    d_weights, magnitude = drop * (w_out @ value.mT), drop * (w_out.abs() @ value.abs().mT)
    if case.function == "attention_with_weights":
        d_weights, magnitude = d_weights + drop * t["w_weights"], magnitude + drop * t["w_weights"].abs()
    if case.gradient == "unrolled":
        back = bounds.backward(run, known, d_weights, magnitude * (1 + eps * e**0.5), rounding)
    else:
        back = _implicit(run, known, d_weights, magnitude, case)
    off_scores, d_scores = back.scores_error, back.scores.abs()
    sums = eps * (max(case.n, m) ** 0.5 + 2)
    full = {
        "query": size * ((off_scores + sums * d_scores) @ right),
        "key": size * ((off_scores + sums * d_scores).mT @ left),
        "value": (off * drop).mT @ w_out.abs() + sums * (weights.mT @ w_out.abs()),
    }
    if case.cost == "l2":
        full["key"] = full["key"] + size * (off_scores + sums * d_scores).sum(-2)[..., None] * right
        # The oracle subtracts where the library shifts: its own rounding counts where keys lie close together.
        own = size * torch.finfo(torch.float64).eps / eps * (off_scores + sums * d_scores)
        full["query"] = full["query"] + own @ key.abs() + own.sum(-1)[..., None] * query.abs()
        full["key"] = full["key"] + own.mT @ query.abs() + own.sum(-2)[..., None] * key.abs()
    if case.gradient == "implicit":
        grads = _chain(case, t, back.scores, query, key, weights, w_out, scale)
    # What is shared between heads is rounded for each of them, and then added.
    unit = torch.finfo(t.given["query"].dtype).eps
    for name, error in full.items():
        whole = error if name == "query" else error + unit * _magnitude(name, full, grads)
        errors[f"d_{name}"] = _gathered(case, whole, t[name].shape)
    if "attn_mask" in t.wanted:
        errors["d_attn_mask"] = reduced(off_scores + sums * d_scores, t["attn_mask"].shape)
    if "tau" in t.wanted:
        errors["d_tau"] = reduced(back.tau_error, t["tau"].shape)
    return errors, grads


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
    left, right = (query - centre).abs(), _clean((key - centre).abs(), cols[..., None])
    off_left, off_right = eps * (query.abs() + centre.abs()), eps * (key.abs() + centre.abs())
    moved = off_left @ right.mT + left @ off_right.mT + (right * off_right).sum(-1)[..., None, :]
    return left, right, size * (moved + eps * (d**0.5 + 2) * (left @ right.mT + right.square().sum(-1)[..., None, :]))


def _valid(case: Case, t: Leaves) -> tuple[Tensor, Tensor | None]:
    """Which entries (…, n, m) take part, and the bias, 0 where they do not."""
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


def _implicit(run: oracle.Run, known: bounds.Forward, d_weights: Tensor, magnitude: Tensor, case: Case) -> bounds.Backward:
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


def _operator(case: Case, tensors: Tensors) -> dict[str, Expected]:
    t = Leaves(tensors, ["scores", "tau"])
    mask = t.get("mask")
    valid = torch.ones(t["scores"].shape, dtype=torch.bool)
    valid = valid if mask is None else valid & mask.reshape(mask_shape(case))
    tau = _tau(case, t.exact).expand(case.lead)
    masses = {name: x.expand(*case.lead, x.shape[-1]) for name in ("row_mass", "col_mass") if (x := t.get(name)) is not None}
    scores = _clean(t["scores"], valid)
    if case.function == "sinkhorn_limit" and scores.numel():
        return _limit(case, t, scores, valid, tau, masses)
    run = oracle.iterate(scores, valid, case.n_iters, tau, **masses)
    weights = run.weights
    w_out = _clean(t["w_out"], (run.scores != -torch.inf))
    grads = t.gradients([weights], [w_out])
    with torch.no_grad():
        rounding = working(case)
        s_err = rounding.eps * run.scores.abs().nan_to_num(posinf=0)
        known = bounds.forward(run, s_err, rounding)
        # The gradient of the last row step is taken from rounded weights where torch's own SoftMax serves.
        unit = torch.finfo(t.given["scores"].dtype).eps if case.n_iters == 1 else rounding.eps
        back = bounds.backward(run, known, w_out, w_out.abs() * (1 + unit), rounding)
        error = back.scores_error + (4 * unit * run.weights * (w_out.abs() + (run.weights * w_out.abs()).sum(-1, keepdim=True)) if case.n_iters == 1 or case.tau == 0 else 0)
        found = {"out": t.rounded("scores", weights, bounds.weight_error(run, known))}
        found["d_scores"] = t.rounded("scores", grads["scores"], error)
        if "tau" in grads:
            found["d_tau"] = t.rounded("tau", grads["tau"], reduced(back.tau_error, t["tau"].shape))
    return found


def _limit(case: Case, t: Leaves, scores: Tensor, valid: Tensor, tau: Tensor, masses: Tensors) -> dict[str, Expected]:
    """The fixed point. Two Sinkhorn steps contract by tanh(spread/4)², which turns the residual into an error."""
    with torch.no_grad():
        run = oracle.converge(scores, valid, tau, **masses)
        plain = torch.where(run.scores == -torch.inf, 0.0, run.scores)
        live = run.rows[..., None] & run.cols[..., None, :]
        top, low = torch.where(live, plain, -1e9).amax(-2), torch.where(live, plain, 1e9).amin(-2)
        spread = torch.where(run.cols, top - low, 0.0).amax(-1) * 2
        rate = (spread / 4).tanh().square() * tau
        residual = max(limit_tolerance(case), 8 * working(case).eps * max(case.n, case.m) ** 0.5)
        relative = (4 * residual / (1 - rate).clamp_min(1e-6))[..., None, None]
        weights = run.weights
        row_mass = run.log_a.exp() if masses else None
        plan, system = oracle.fixed_point_system(weights, tau.clamp_min(1e-12), row_mass)
        w_out = _clean(t["w_out"], run.scores != -torch.inf)
        grad = oracle.implicit_gradient(weights, w_out, plan, system)
        local = (weights * w_out.abs()).sum((-2, -1), keepdim=True)
        error = weights * relative
        off = torch.where(run.scores == -torch.inf, 0.0, relative * oracle.condition(system)[..., None, None] * local)
        return {"out": t.rounded("scores", weights, error), "d_scores": t.rounded("scores", grad, off)}


def _marginals(case: Case, tensors: Tensors) -> dict[str, Expected]:
    t = Leaves(tensors, [])
    mask = t.get("mask")
    valid = torch.ones(t["scores"].shape, dtype=torch.bool)
    valid = valid if mask is None else valid & mask.reshape(mask_shape(case))
    weights, rows, cols = _clean(t["scores"], valid), valid.any(-1), valid.any(-2)
    ratio = rows.sum(-1).double() / cols.sum(-1).clamp_min(1)
    size = weights.abs().sum((-2, -1)) + 1 + ratio
    eps = torch.finfo(torch.float64 if case.dtype == "float64" else torch.float32).eps
    off = eps * size * max(1, case.n, case.m) ** 0.5
    found = {}
    for name, errors, live in (("rows", weights.sum(-1) - 1, rows), ("cols", weights.sum(-2) - ratio[..., None], cols)):
        largest = _clean(errors.abs(), live)
        value = largest.amax(-1) if largest.shape[-1] else largest.new_zeros(largest.shape[:-1])
        found[name] = Expected(value, SAFETY * off)
    return found
