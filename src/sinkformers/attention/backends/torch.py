"""Attention in torch's own operations: for every device without a kernel, and what `torch.compile` sees."""

from torch import Tensor

from sinkformers.attention import kernel_domain, log_domain
from sinkformers.attention.call import AttentionCall, AttentionResult
from sinkformers.core.backend import Backend


class Torch(Backend):
    name = "torch"

    def why_not(self, call: AttentionCall) -> str | None:
        return None

    def forward(self, call: AttentionCall) -> AttentionResult:
        call = call.in_working_dtype()
        out, state = kernel_domain.forward(call)
        log_domain.recompute_output(call, out, state.safe)
        return AttentionResult(out, *state)

    def backward(
        self, call: AttentionCall, result: AttentionResult, d_output: Tensor, needed: dict[str, bool]
    ) -> dict[str, Tensor | None]:
        call = call.in_working_dtype()
        d_out = d_output.to(call.query.dtype)
        if call.implicit:
            grads = log_domain.implicit_gradients(call, result.state(), d_out, needs_bias=needed["bias"])
        else:
            grads, safe = kernel_domain.backward(call, result.out, result.state(), d_out, needs_bias=needed["bias"])
            log_domain.recompute_gradients(call, d_out, grads, safe)
        return grads._asdict()

    def traced(self, call: AttentionCall) -> Backend | None:
        """The same without branches on values; the solver of the implicit gradient has some, and stays an operator."""
        from sinkformers.attention.backends.traced import Traced

        return None if call.implicit else Traced()

    def revision(self) -> str:
        import sinkformers.attention.backends.traced  # noqa: F401 — a graph from the disk needs its operators

        return super().revision()


def implicit_gradients(call: AttentionCall, d_output: Tensor, needed: dict[str, bool]) -> dict[str, Tensor | None]:
    """The implicit gradient for backends without one: it needs the weights, which are computed again."""
    call = call.in_working_dtype()
    _, state = kernel_domain.forward(call)
    d_out = d_output.to(call.query.dtype)
    return log_domain.implicit_gradients(call, state, d_out, needs_bias=needed["bias"])._asdict()
