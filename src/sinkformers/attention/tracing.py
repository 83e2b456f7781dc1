"""What `torch.compile` sees of the torch backend: torch's own operations, and three small operators it cannot open.

The attention operators are taken apart when a graph is made functional, which is below autograd: what they save for
backward stays what their formulas save. Two things must not be taken apart. Handing over to the log domain depends on
values, so it is an operator that does nothing where all heads are safe. And what backward makes again must not be found
to be what forward made, or it would be kept: matrices, where vectors were.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode

from sinkformers.attention import hand_over, plain
from sinkformers.attention.participants import Masks
from sinkformers.attention.plain import Gradients, Settings, Tokens
from sinkformers.core.kernel_domain import Steps
from sinkformers.core.operators import MaybeTensor

_ROOM = Path(__file__).parent
_SOURCES = sorted([*_ROOM.glob("*.py"), *(_ROOM.parent / "core").glob("*.py")])
# The backend's name as graphs hold it. torch keeps compiled graphs on disk and knows them by the operators' arguments,
# so that what these stand for has to be among them: other sources, another graph.
TORCH = "torch:" + hashlib.sha256(b"".join(source.read_bytes() for source in _SOURCES)).hexdigest()[:16]


@torch.library.custom_op("sinkformers::mend_output", mutates_args=("out",))
def mend_output(
    out: Tensor,
    safe: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: MaybeTensor,
    entries: MaybeTensor,
    queries: MaybeTensor,
    keys: MaybeTensor,
    tau: MaybeTensor,
    seed: MaybeTensor,
    heads: MaybeTensor,
    n_iters: int,
    scale: float,
    l2: bool,
    dropout_p: float,
) -> None:
    tokens = Tokens(query, key, value, Masks(bias, entries, queries, keys), tau, seed, heads)
    hand_over.mend_forward(out, safe, tokens, Settings(n_iters, scale, l2, dropout_p))


@torch.library.custom_op(
    "sinkformers::mend_gradients", mutates_args=("d_query", "d_key", "d_value", "d_scores", "d_tau")
)
def mend_gradients(
    d_query: Tensor,
    d_key: Tensor,
    d_value: Tensor,
    d_scores: MaybeTensor,
    d_tau: MaybeTensor,
    safe: Tensor,
    d_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: MaybeTensor,
    entries: MaybeTensor,
    queries: MaybeTensor,
    keys: MaybeTensor,
    tau: MaybeTensor,
    seed: MaybeTensor,
    heads: MaybeTensor,
    n_iters: int,
    scale: float,
    l2: bool,
    dropout_p: float,
) -> None:
    tokens = Tokens(query, key, value, Masks(bias, entries, queries, keys), tau, seed, heads)
    grads = Gradients(d_query, d_key, d_value, d_scores, d_tau)
    hand_over.mend_backward(grads, safe, d_out, tokens, Settings(n_iters, scale, l2, dropout_p))


@torch.library.custom_op("sinkformers::again", mutates_args=())
def again(number: Tensor, gradient: Tensor) -> Tensor:
    """The number, in a way that no compiler sees through; it takes part in backward only."""
    return number.clone()


@again.register_fake
def _(number, gradient):
    return torch.empty_like(number)


def forward(tokens: Tokens, settings: Settings) -> tuple[Tensor, Steps]:
    out, steps = plain.forward(tokens, settings)
    out = out.contiguous()
    mend_output(out, steps.safe, *_flat(tokens), *settings)
    return out, steps


def backward(
    d_out: Tensor, out: Tensor, tokens: Tokens, settings: Settings, steps: Steps, wants_bias: bool
) -> Gradients:
    one = again(d_out.new_ones(()), d_out)
    seed = None if tokens.seed is None else again(tokens.seed, d_out)
    apart = tokens._replace(query=tokens.query * one, seed=seed)
    grads, safe = plain.backward(d_out, out, apart, settings, steps, wants_bias=wants_bias, traced=True)
    mend_gradients(*grads, safe, d_out, *_flat(tokens), *settings)
    return grads


def _flat(tokens: Tokens) -> tuple[Any, ...]:
    query, key, value, masks, tau, seed, heads = tokens
    return query, key, value, *masks, tau, seed, heads


def take_apart(operator: Any, function: Callable[..., Any], backend: int) -> None:
    """Let graphs hold the operations of a function instead of the operator, where the argument `backend` is `TORCH`.

    An exported program keeps the operator, and so does the implicit gradient, whose solver stops by values.
    """

    def rule(mode: Any, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        implicitly = args[backend - 1]
        if mode.export or implicitly or args[backend] != TORCH:
            return mode.__torch_dispatch__(op, types, args, kwargs)
        with mode:
            return function(*args[:backend], "traced", *args[backend + 1 :], **kwargs)

    operator.register_torch_dispatch(FunctionalTensorMode, rule)
