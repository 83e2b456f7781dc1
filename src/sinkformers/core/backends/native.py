"""`sinkhorn` by the compiled CPU kernels; matrices whose scalings leave their range are recomputed in torch."""

from typing import Any

import torch
from torch import Tensor

from sinkformers.core import unrolled
from sinkformers.core.call import NormalizeBackend, NormalizeCall, NormalizeResult
from sinkformers.core.modes import CPU
from sinkformers.core.problem import working_dtype
from sinkformers.core.ranges import SAFE_PRODUCT
from sinkformers.core.state import no_state


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

        weights, state, safe = native.operator_forward(**self._operands(call))
        assert safe is not None
        u, s, r = state
        return NormalizeResult(_recomputed(call, weights, safe).to(call.scores.dtype), u, s, r, safe)

    def forward_eager(self, call: NormalizeCall) -> NormalizeResult:
        """The result with all vectors in the place of the first, and None for `safe` where all matrices are."""
        from sinkformers.kernels import native

        operands = self._operands(call)
        weights, (state,), safe = native.operator_forward(packed=True, **operands)
        if safe is not None:
            weights = _recomputed(call, weights, safe)
        if weights.dtype != call.scores.dtype:
            weights = weights.to(call.scores.dtype)
        return NormalizeResult._make((weights, None if operands["tiny"] else state, None, None, safe))

    def described(self, call: NormalizeCall, result: NormalizeResult) -> NormalizeResult:
        from sinkformers.kernels import native

        *lead, n, m = call.scores.shape
        if result.rows is not None:
            return NormalizeResult(result.weights, *native.state_sizes(n, m, call.n_iters).unpack(result.rows, lead))
        state = no_state(call.scores.new_empty(0, dtype=working_dtype(call.scores.dtype)), lead, n, m)
        return NormalizeResult(result.weights, *(state if result.safe is None else state._replace(safe=result.safe)))

    def backward(
        self, call: NormalizeCall, result: NormalizeResult, d_output: Tensor, needed: dict[str, bool]
    ) -> dict[str, Tensor | None]:
        from sinkformers.kernels import native

        dtype = working_dtype(d_output.dtype)
        d_weights = d_output if d_output.dtype == dtype else d_output.to(dtype)
        state = [part for part in (result.rows, result.cols, result.shift) if part is not None]
        d_scores, d_tau, safe = native.operator_backward(d_weights=d_weights, state=state, **self._operands(call))
        safe = both_safe(safe, result.safe)
        if safe is not None and not safe.all():
            part, tau = unrolled.select_part(call.problem(), call.working_tau(), ~safe)
            definition = call.definition()
            _, again = unrolled.forward(part, tau, definition)
            weights, kernel = unrolled.recompute_weights(part, tau, definition, again)
            d_part = d_weights[~safe].masked_fill(part.scores == -torch.inf, 0.0)
            d_scores[~safe], d_part_tau = unrolled.backward(part, tau, definition, again, kernel, weights, d_part)
            if d_tau is not None and d_part_tau is not None:
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
            "scores": scores if scores.dtype == dtype else scores.to(dtype),
            "row_weight": weight,
            "col_target": target,
            "tau": None if tau is None else tau.expand(call.scores.shape[:-2]),
            "n_iters": call.n_iters,
            "tiny": not self.keeps_state(call),
            "safe_product": SAFE_PRODUCT[dtype],
        }


def _recomputed(call: NormalizeCall, weights: Tensor, safe: Tensor) -> Tensor:
    """The weights, with those of the matrices that are not safe overwritten."""
    if not safe.all():
        part, tau = unrolled.select_part(call.problem(), call.working_tau(), ~safe)
        weights[~safe], _ = unrolled.forward(part, tau, call.definition())
    return weights


def both_safe(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Where two passes are safe, (...); None means everywhere."""
    if one is None or other is None:
        return other if one is None else one
    return one & other


def why_not_on(device: torch.device) -> str | None:
    """The reason why the compiled kernels cannot be used on a device, or None where they can."""
    if device != CPU and device.type != "meta":
        return f"the compiled kernels are for the CPU, and the tensors are on {device}"
    from sinkformers.kernels import native

    return native.missing()


def instruction_set() -> tuple[str | None, str | None]:
    """The instruction set that the compiled kernels use, or None and the reason why they are not used."""
    from sinkformers.kernels import native

    reason = native.missing()
    return (native.instruction_set(), None) if reason is None else (None, reason)


def missing_warning(device: torch.device) -> str | None:
    """What to warn of where torch serves on the CPU because the compiled kernels are missing."""
    from sinkformers.kernels import native

    reason = native.missing()
    if reason is None or device.type != "cpu":
        return None
    return f"the compiled CPU kernels are not used, and torch computes instead, which is slower: {reason}."
