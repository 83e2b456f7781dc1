"""What the operator, its limit and its diagnostics must give."""

from typing import Any

import torch
from torch import Tensor

from fuzzing import bounds, causal_bounds, causal_oracle, oracle
from fuzzing.arguments import mask_shape
from fuzzing.bounds import SAFETY
from fuzzing.case import Case
from fuzzing.leaves import Expected, Leaves, Tensors, clean, is_softmax, reduced, tau_of, working
from fuzzing.program import limit_tolerance


def operator(case: Case, tensors: Tensors) -> dict[str, Expected]:
    t = Leaves(tensors, ["scores", "tau"])
    mask = t.get("mask")
    valid = torch.ones(t["scores"].shape, dtype=torch.bool)
    valid = valid if mask is None else valid & mask.reshape(mask_shape(case))
    tau = tau_of(case, t.exact)
    masses = {
        name: x.expand(*case.lead, x.shape[-1]) for name in ("row_mass", "col_mass") if (x := t.get(name)) is not None
    }
    read = valid
    if case.definition == "prefix":  # which has the scores between all of its tokens, those that the mask hides too
        valid = valid.tril() if mask is None else valid
        read = valid.any(-1)[..., None] & valid.any(-2)[..., None, :]
    scores = clean(t["scores"], read)
    if case.function == "sinkhorn_limit" and scores.numel():
        return _limit(case, t, scores, valid, tau, masses)
    run: Any = None
    if case.definition:
        valid = valid.tril() if mask is None else valid
        run, rules = causal_oracle.iterate(scores, valid, case.n_iters, tau, case.definition), causal_bounds
    else:
        run, rules = oracle.iterate(scores, valid, case.n_iters, tau, **masses), bounds
    weights = run.weights
    w_out = clean(t["w_out"], valid & (run.scores != -torch.inf))
    grads = t.gradients([weights], [w_out])
    with torch.no_grad():
        rounding = working(case)
        s_err = rounding.eps * run.scores.abs().nan_to_num(posinf=0)
        known = rules.forward(run, s_err, rounding)
        back = rules.backward(run, known, w_out, w_out.abs(), rounding)
        error = back.scores_error
        if is_softmax(case):  # whose own gradient is taken from the weights as they were rounded
            size = run.weights * w_out.abs()
            unit = torch.finfo(t.given["scores"].dtype).eps
            error = error + 4 * unit * (size + run.weights * size.sum(-1, keepdim=True))
        found = {"out": t.rounded("scores", weights, rules.weight_error(run, known))}
        found["d_scores"] = t.rounded("scores", grads["scores"], error)
        if "tau" in grads:
            found["d_tau"] = t.rounded("tau", grads["tau"], reduced(back.tau_error, t["tau"].shape))
    return found


def _limit(case: Case, t: Leaves, scores: Tensor, valid: Tensor, tau: Tensor, masses: Tensors) -> dict[str, Expected]:
    """The fixed point."""
    with torch.no_grad():
        run = oracle.converge(scores, valid, tau, **masses)
        relative = limit_error(case, run)
        weights = run.weights
        row_mass = run.log_a.exp() if masses else None
        plan, system = oracle.fixed_point_system(weights, tau.clamp_min(1e-12), row_mass)
        w_out = clean(t["w_out"], run.scores != -torch.inf)
        grad = oracle.implicit_gradient(weights, w_out, plan, system)
        local = (weights * w_out.abs()).sum((-2, -1), keepdim=True)
        error = weights * relative
        off = torch.where(run.scores == -torch.inf, 0.0, relative * oracle.condition(system)[..., None, None] * local)
        return {"out": t.rounded("scores", weights, error), "d_scores": t.rounded("scores", grad, off)}


def limit_error(case: Case, run: oracle.Run) -> Tensor:
    """The relative error of weights (…, 1, 1) that a residual within the tolerance allows.

    Two Sinkhorn steps contract by tanh(spread/4)², which turns the residual into an error.
    """
    plain = torch.where(run.scores == -torch.inf, 0.0, run.scores)
    live = run.rows[..., None] & run.cols[..., None, :]
    top, low = torch.where(live, plain, -1e9).amax(-2), torch.where(live, plain, 1e9).amin(-2)
    spread = torch.where(run.cols, top - low, 0.0).amax(-1) * 2
    rate = (spread / 4).tanh().square() * run.tau
    residual = max(limit_tolerance(case), 8 * working(case).eps * max(case.n, case.m) ** 0.5)
    return (4 * residual / (1 - rate).clamp_min(1e-6))[..., None, None]


def marginals(case: Case, tensors: Tensors) -> dict[str, Expected]:
    t = Leaves(tensors, [])
    mask = t.get("mask")
    valid = torch.ones(t["scores"].shape, dtype=torch.bool)
    valid = valid if mask is None else valid & mask.reshape(mask_shape(case))
    weights, rows, cols = clean(t["scores"], valid), valid.any(-1), valid.any(-2)
    ratio = rows.sum(-1).double() / cols.sum(-1).clamp_min(1)
    size = weights.abs().sum((-2, -1)) + 1 + ratio
    eps = torch.finfo(torch.float64 if case.dtype == "float64" else torch.float32).eps
    off = eps * size * max(1, case.n, case.m) ** 0.5
    found = {}
    for name, errors, live in (("rows", weights.sum(-1) - 1, rows), ("cols", weights.sum(-2) - ratio[..., None], cols)):
        largest = clean(errors.abs(), live)
        value = largest.amax(-1) if largest.shape[-1] else largest.new_zeros(largest.shape[:-1])
        found[name] = Expected(value, SAFETY * off)
    return found
