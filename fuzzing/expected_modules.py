"""What a module must give.

A module is a composition, so its tolerance is not derived step by step: it is a multiple of the error that the same
mathematics has in torch's own operations in the same dtype, or of what rounded inputs and parameters do to the result.
"""

from typing import Any

import torch
from torch import Tensor

from fuzzing.case import Case
from fuzzing.leaves import Expected
from fuzzing.module_oracles import ORACLES, balance
from fuzzing.modules import takes

TIMES = 16.0  # how much larger an error may be than what it is measured by


def expect_module(case: Case, space: dict[str, Any]) -> dict[str, Expected]:
    layer, results = space["layer"], space["results"]
    inputs = {name: space[name].detach() for name in takes(case)}
    masks = {name: space[name] for name in ("query_mask", "key_mask", "attn_mask") if name in space}
    eps = torch.finfo(getattr(torch, case.dtype)).eps
    if case.function == "InvertibleAttention":
        valid = masks.get("query_mask")
        x = inputs["x"].double()
        seen = x if valid is None else torch.where(valid[..., None], x, 0.0)
        size = seen.norm(dim=(-2, -1), keepdim=True).expand(x.shape)
        tolerance = 8 * eps**0.75 * size + (0 if valid is None else torch.where(valid[..., None], 0.0, torch.inf))
        return {"back": Expected(seen, tolerance)}
    if case.function == "EquilibriumAttention":
        return _equilibrium(case, layer, inputs["x"], masks.get("query_mask"), results, eps)
    exact = _run(case, layer, inputs, masks, space, torch.float64)
    rounded = _run(case, layer, inputs, masks, space, _eager(case))
    by = eps / torch.finfo(_eager(case)).eps
    moved = [_run(case, layer, inputs, masks, space, torch.float64, eps) for _ in range(2)]
    gradients = [x.abs().max().item() for name, x in exact.items() if name.startswith("d_") and x.numel()]
    found = {}
    for name, value in exact.items():
        if not value.numel():
            found[name] = Expected(value, value)
            continue
        own = by * (rounded[name].double() - value).abs().max().nan_to_num(torch.inf).item()
        others = [(each[name] - value).abs().max().item() for each in moved]
        # A gradient that vanishes is a difference of others that do not.
        size = max(gradients) if name.startswith("d_") else value.abs().max().item()
        found[name] = Expected(value, torch.full_like(value, TIMES * (max(own, *others) + eps * size)))
    return _where_promised(case, found, masks)


def _eager(case: Case) -> torch.dtype:
    return torch.float32 if case.dtype == "float64" else getattr(torch, case.dtype)


def _run(
    case: Case,
    layer: Any,
    inputs: dict[str, Tensor],
    masks: dict[str, Tensor],
    space: dict[str, Any],
    dtype: torch.dtype,
    moved: float = 0.0,
) -> dict[str, Tensor]:
    """Outputs and gradients of the oracle in a dtype, with everything moved by a relative amount."""

    def leaf(x: Tensor) -> Tensor:
        x = x.detach().to(dtype)
        return (x * (1 + moved * torch.randn_like(x))).requires_grad_()

    p = {name: leaf(x) for name, x in layer.named_parameters()}
    x = {name: leaf(t) for name, t in inputs.items()}
    outputs = ORACLES[case.function](case, p, x, masks)
    weights = [space[f"w_{name}"].to(dtype) for name in outputs]
    leaves = {**x, **p}
    grads = torch.autograd.grad(
        list(outputs.values()), list(leaves.values()), weights, allow_unused=True, materialize_grads=True
    )
    found = {name: out.detach() for name, out in outputs.items()} | dict(
        zip((f"d_{n}" for n in leaves), grads, strict=True)
    )
    return {name: x for name, x in found.items() if name in space["results"]}


def _where_promised(case: Case, found: dict[str, Expected], masks: dict[str, Tensor]) -> dict[str, Expected]:
    """Nothing is said of outputs at padded queries."""
    name = "key_mask" if case.module.get("self") and case.function == "MultiheadAttention" else "query_mask"
    if name in masks and case.function != "PMA":
        out = found["out"]
        valid = masks[name]
        if case.function == "MultiheadAttention" and not case.module.get("batch_first") and case.lead:
            valid = valid.mT
        loose = torch.where(valid[..., None], out.tolerance, torch.inf)
        found["out"] = Expected(torch.where(valid[..., None], out.value, torch.inf), loose)
    return found


def _equilibrium(
    case: Case, layer: Any, z: Tensor, valid: Tensor | None, results: dict[str, Tensor], eps: float
) -> dict[str, Expected]:
    """At the minimiser, pull·(x − z) balances the attention; |imbalance|/pull bounds the distance to it."""
    with torch.no_grad():
        off, size = balance(case, layer, results["out"].double(), z.double(), valid)
    results["balance"] = off
    return {"balance": Expected(torch.zeros_like(off), 4 * eps**0.5 * size.expand(off.shape))}
