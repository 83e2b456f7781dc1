"""`sinkformers::normalize`: scores to weights as one operator, with its exact gradient as another.

All tensors arrive with the leading axes of the scores or with ones in their place; `sinkhorn` sees to that. The native
kernels serve where they can; a matrix whose scalings leave their range is done again in torch.
"""

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from sinkformers.core import backends, unrolled
from sinkformers.core.kernel_domain import Steps
from sinkformers.core.problem import Problem, pose, working_dtype
from sinkformers.core.registration import differentiable, full_precision, not_differentiable, register_vmap

# torch reads the operators' schemas from these annotations, and older versions know Optional only.
MaybeTensor = Optional[Tensor]  # noqa: UP045


def step_outputs(like: Tensor, lead: Sequence[int], n: int, m: int, n_iters: int) -> tuple[Tensor, ...]:
    """Tensors of the shapes of `Steps`, for tracing."""
    like = like.new_empty(0, dtype=working_dtype(like.dtype))
    n_rows, n_cols = (n_iters + 1) // 2, n_iters // 2
    vectors = [like.new_empty(*lead, *shape) for shape in ((n_rows, n), (n_cols, m), (n,))]
    return (*vectors, like.new_empty(lead, dtype=torch.bool))


def _keeps_nothing(backend: str, scores: Tensor, row_mass: Tensor | None, col_mass: Tensor | None) -> bool:
    """Whether the kernel for tiny matrices serves, which makes the steps again in backward."""
    if backend == "torch" or row_mass is not None or col_mass is not None:
        return False
    return backend == "triton" or max(scores.shape[-2:]) <= backends.native().TINY


class _Case:
    """A call as the native kernels take it; the problem in torch's terms is posed only where something needs it."""

    def __init__(
        self,
        scores: Tensor,
        mask: Tensor | None,
        row_mass: Tensor | None,
        col_mass: Tensor | None,
        tau: Tensor | None,
        n_iters: int,
        tiny: bool,
    ) -> None:
        self.given, self.n_iters, self.tiny = (scores, mask, row_mass, col_mass), n_iters, tiny
        dtype, lead = working_dtype(scores.dtype), scores.shape[:-2]
        self.tau = None if tau is None else tau.to(scores.device, dtype)
        weight = target = None
        if row_mass is not None or col_mass is not None:
            problem = self.problem()
            scores, weight, target = problem.scores, problem.weight, problem.target
        elif mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        each = None if self.tau is None else self.tau.expand(lead)
        self.parts = [None if x is None else x.to(dtype).contiguous() for x in (scores, weight, target, each)]

    def problem(self) -> Problem:
        return pose(*self.given)

    def select(self, which: Tensor) -> tuple[Problem, Tensor | None]:
        return self.problem().select(which), self.tau if self.tau is None else self.tau.expand(which.shape)[which]

    def forward(self) -> tuple[Tensor, Steps]:
        weights, u, s, r, safe = backends.native().operator_forward(*self.parts, self.n_iters, tiny=self.tiny)
        if not safe.all():
            part, tau = self.select(~safe)
            weights[~safe], _ = unrolled.forward(part, tau, self.n_iters)
        return weights, Steps(u, s, r, safe)

    def _flat(self) -> tuple[Tensor, Tensor | None]:
        """Scores (batch, n, m) and tau (batch), as the Triton kernel for small matrices takes them."""
        scores, _, _, tau = self.parts
        assert scores is not None
        return scores.reshape(-1, *scores.shape[-2:]), tau if tau is None else tau.reshape(-1)

    def triton_forward(self) -> tuple[Tensor, Steps]:
        scores, tau = self._flat()
        shape = self.given[0].shape
        weights = backends.triton().tiny_forward(scores, tau, self.n_iters).reshape(shape)
        u, s, r, safe = step_outputs(scores, shape[:-2], shape[-2], shape[-1], self.n_iters)
        return weights, Steps(u[..., :0, :], s[..., :0, :], r[..., :0], torch.ones_like(safe))

    def triton_backward(self, d_weights: Tensor) -> tuple[Tensor, Tensor | None]:
        scores, tau = self._flat()
        grad, d_tau = backends.triton().tiny_backward(d_weights.reshape(scores.shape), scores, tau, self.n_iters)
        shape = self.given[0].shape
        # NaN that takes part must not reach what is masked. Looking whether there is any would mean waiting.
        grad = grad.masked_fill(scores == -torch.inf, 0.0)
        return grad.reshape(shape), d_tau if d_tau is None else d_tau.reshape(shape[:-2])

    def backward(self, d_weights: Tensor, steps: Steps) -> tuple[Tensor, Tensor | None]:
        saved = (steps.u, steps.s, steps.r)
        grad, d_tau, safe = backends.native().operator_backward(
            d_weights.contiguous(), *self.parts, self.n_iters, saved=saved, tiny=self.tiny
        )
        safe = safe & steps.safe
        if not safe.all():
            part, tau = self.select(~safe)
            _, again = unrolled.forward(part, tau, self.n_iters)
            weights, kernel = unrolled.reopen(part, tau, self.n_iters, again)
            silenced = d_weights[~safe].masked_fill(part.scores == -torch.inf, 0.0)
            mended = unrolled.backward(part, tau, self.n_iters, again, kernel, weights, silenced)
            grad[~safe] = mended[0]
            if mended[1] is not None:
                d_tau[~safe] = mended[1]
        return grad, d_tau


@torch.library.custom_op("sinkformers::normalize", mutates_args=())
@full_precision
def normalize_operator(
    scores: Tensor,
    mask: MaybeTensor,
    row_mass: MaybeTensor,
    col_mass: MaybeTensor,
    tau: MaybeTensor,
    n_iters: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if backend != "torch":
        tiny = _keeps_nothing(backend, scores, row_mass, col_mass)
        case = _Case(scores, mask, row_mass, col_mass, tau, n_iters, tiny)
        weights, steps = case.forward() if backend == "native" else case.triton_forward()
    else:
        problem = pose(scores, mask, row_mass, col_mass)
        weights, steps = unrolled.forward(problem, tau if tau is None else tau.to(problem.scores), n_iters)
    # In order whatever the layout of the scores: tracing was told so.
    weights, u, s, r, safe = (part.contiguous() for part in (weights.to(scores.dtype), *steps))
    return weights, u, s, r, safe


@normalize_operator.register_fake
def _(scores, mask, row_mass, col_mass, tau, n_iters, backend):
    *lead, n, m = scores.shape
    weights = torch.empty_like(scores, memory_format=torch.contiguous_format)
    steps = step_outputs(scores, lead, n, m, n_iters)
    if _keeps_nothing(backend, scores, row_mass, col_mass):
        u, s, r, safe = steps
        steps = (u[..., :0, :], s[..., :0, :], r[..., :0], safe)
    return weights, *(part.contiguous() for part in steps)


@torch.library.custom_op("sinkformers::normalize_backward", mutates_args=())
@full_precision
def normalize_backward_operator(
    d_weights: Tensor,
    scores: Tensor,
    mask: MaybeTensor,
    row_mass: MaybeTensor,
    col_mass: MaybeTensor,
    tau: MaybeTensor,
    u: Tensor,
    s: Tensor,
    r: Tensor,
    safe: Tensor,
    n_iters: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    steps = Steps(u, s, r, safe)
    d_weights = d_weights.to(r.dtype)
    if backend != "torch":
        tiny = _keeps_nothing(backend, scores, row_mass, col_mass)
        case = _Case(scores, mask, row_mass, col_mass, tau, n_iters, tiny)
        grad, d_tau = case.backward(d_weights, steps) if backend == "native" else case.triton_backward(d_weights)
    else:
        problem = pose(scores, mask, row_mass, col_mass)
        tau = tau if tau is None else tau.to(problem.scores)
        weights, kernel = unrolled.reopen(problem, tau, n_iters, steps)
        d_weights = d_weights.masked_fill(problem.scores == -torch.inf, 0.0)
        grad, d_tau = unrolled.backward(problem, tau, n_iters, steps, kernel, weights, d_weights)
    return grad.to(scores.dtype).contiguous(), r.new_zeros(safe.shape) if d_tau is None else d_tau


@normalize_backward_operator.register_fake
def _(d_weights, scores, mask, row_mass, col_mass, tau, u, s, r, safe, n_iters, backend):
    return torch.empty_like(scores, memory_format=torch.contiguous_format), r.new_empty(safe.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.n_iters, ctx.backend = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_weights: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if d_weights is None:
        return (None,) * 7
    scores, mask, row_mass, col_mass, tau, *steps = ctx.saved_tensors
    settings = (ctx.n_iters, ctx.backend)
    d_scores, d_tau = normalize_backward(d_weights, scores, mask, row_mass, col_mass, tau, *steps, *settings)
    return d_scores, None, None, None, reduce_to(d_tau, tau, ctx.needs_input_grad[4]), None, None


def reduce_to(gradient: Tensor, tensor: Tensor | None, wanted: bool) -> Tensor | None:
    """The gradient of a tensor that was broadcast, in its own shape and dtype and on its device.

    None where it is not wanted: a `tau` on the CPU beside scores on an accelerator would cost a wait.
    """
    return gradient.sum_to_size(tensor.shape).to(tensor) if wanted and tensor is not None else None


register_vmap(normalize_operator)
register_vmap(normalize_backward_operator)
normalize = differentiable(normalize_operator, _save, _backward)
normalize_backward = not_differentiable(normalize_backward_operator)
