"""`sinkhorn` by the compiled CPU kernels; matrices whose scalings leave their range are recomputed in torch."""

from typing import Any

import torch
from torch import Tensor

from sinkformers.core import unrolled
from sinkformers.core.call import NormalizeBackend, NormalizeCall, NormalizeResult
from sinkformers.core.problem import working_dtype
from sinkformers.core.ranges import SAFE_PRODUCT


class Native(NormalizeBackend):
    name = "native"

    def why_not(self, call: NormalizeCall) -> str | None:
        return why_not_on(call.scores.device)

    def warning(self, call: NormalizeCall) -> str | None:
        return missing_warning(call.scores.device)

    def keeps_state(self, call: NormalizeCall) -> bool:
        from sinkformers.kernels import native

        return call.has_masses() or max(call.scores.shape[-2:]) > native.TINY

    def forward(self, call: NormalizeCall) -> NormalizeResult:
        from sinkformers.kernels import native

        weights, u, s, r, safe = native.operator_forward(**self._operands(call))
        if not safe.all():
            part, tau = unrolled.select_part(call.problem(), call.working_tau(), ~safe)
            weights[~safe], _ = unrolled.forward(part, tau, call.definition())
        return NormalizeResult(weights.to(call.scores.dtype), u, s, r, safe)

    def backward(
        self, call: NormalizeCall, result: NormalizeResult, d_output: Tensor, needed: dict[str, bool]
    ) -> dict[str, Tensor | None]:
        from sinkformers.kernels import native

        state = result.state()
        d_weights = d_output.to(working_dtype(d_output.dtype))
        saved = {"u": state.rows, "s": state.cols, "r": state.shift}
        d_scores, d_tau, safe = native.operator_backward(d_weights=d_weights, saved=saved, **self._operands(call))
        safe = safe & state.safe
        if not safe.all():
            part, tau = unrolled.select_part(call.problem(), call.working_tau(), ~safe)
            definition = call.definition()
            _, again = unrolled.forward(part, tau, definition)
            weights, kernel = unrolled.recompute_weights(part, tau, definition, again)
            d_part = d_weights[~safe].masked_fill(part.scores == -torch.inf, 0.0)
            d_scores[~safe], d_part_tau = unrolled.backward(part, tau, definition, again, kernel, weights, d_part)
            if d_part_tau is not None:
                d_tau[~safe] = d_part_tau
        return {"scores": d_scores, "tau": d_tau}

    def _operands(self, call: NormalizeCall) -> dict[str, Any]:
        """The arguments of the kernels. With masses, these are those of the problem in its general form."""
        scores, weight, target, dtype = call.scores, None, None, working_dtype(call.scores.dtype)
        if call.has_masses():
            problem = call.problem()
            scores, weight, target = problem.scores, problem.weight, problem.target
        elif call.mask is not None:
            scores = scores.masked_fill(~call.mask, -torch.inf)
        tau = call.working_tau()
        return {
            "scores": scores.to(dtype),
            "row_weight": weight,
            "col_target": target,
            "tau": None if tau is None else tau.expand(call.scores.shape[:-2]),
            "n_iters": call.n_iters,
            "tiny": not self.keeps_state(call),
            "safe_product": SAFE_PRODUCT[dtype],
        }


def why_not_on(device: torch.device) -> str | None:
    """The reason why the compiled kernels cannot be used on a device, or None where they can."""
    if device.type not in ("cpu", "meta"):
        return f"the compiled kernels are for the CPU, and the tensors are on {device}"
    from sinkformers.kernels import native

    return native.missing()


def missing_warning(device: torch.device) -> str | None:
    """What to warn of where torch serves on the CPU because the compiled kernels are missing."""
    from sinkformers.kernels import native

    reason = native.missing()
    if reason is None or device.type != "cpu":
        return None
    return f"the compiled CPU kernels are not used, and torch computes instead, which is slower: {reason}."
