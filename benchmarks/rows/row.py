"""What a row is, and when it is left out for lack of memory."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from torch import Tensor

from benchmarks.case import TRAINED_BIAS, Case, Inputs, Masks
from benchmarks.steps import Step, TorchStep, Unavailable
from benchmarks.units import size

Attention = Callable[[Tensor, Tensor, Tensor, Case, Masks], Tensor]
FLOAT32_BYTES = 4
SHARE_OF_MEMORY = 0.7


@dataclass(frozen=True)
class Row:
    """A way to compute attention.

    `prepare` makes a step on given inputs, or raises `Unavailable`. `matrices` and `matrices_per_step` say roughly how
    many n×n matrices a call holds at its peak, so that a row that would not fit is left out instead of killed.
    """

    name: str
    title: str
    prepare_step: Callable[[Inputs], Step]
    formula: str = "sinkhorn"
    matrices: float = 0.0
    matrices_per_step: float = 0.0
    compiled: bool = False

    def prepare(self, inputs: Inputs) -> Step:
        needed, free = self.bytes_needed(inputs.case), SHARE_OF_MEMORY * available_bytes()
        if needed > free:
            raise Unavailable(f"would need about {size(needed)} of memory, more than the {size(free)} it may take here")
        return self.prepare_step(inputs)

    def bytes_needed(self, case: Case) -> float:
        per_step = self.matrices_per_step * case.n_iters if case.backward else 0.0
        return FLOAT32_BYTES * case.entries * (self.matrices + per_step)


def of_torch(attention: Attention) -> Callable[[Inputs], Step]:
    """Return what makes steps of a function `attention(query, key, value, case, masks)` of torch tensors."""

    def prepare(inputs: Inputs) -> Step:
        case, masks, tokens = inputs.case, inputs.masks, (inputs.query, inputs.key, inputs.value)
        if case.mask == TRAINED_BIAS and masks.scores is not None:
            return TorchStep(
                lambda q, k, v, bias: attention(q, k, v, case, Masks(masks.tokens, bias)),
                (*tokens, masks.scores),
                inputs.grad,
            )
        return TorchStep(lambda q, k, v: attention(q, k, v, case, masks), tokens, inputs.grad)

    return prepare


def peer(module: str, extra: str) -> ModuleType:
    """A peer's module, or the reason it is not there."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Unavailable(f"{module} cannot be imported ({error}); pip install '.[{extra}]' in your clone") from None


def refuse_mask(masks: Masks, name: str, case: Case | None = None) -> None:
    if masks.tokens is not None or masks.scores is not None or (case is not None and case.is_causal):
        raise Unavailable(f"{name} has no mask")


def available_bytes() -> float:
    """Memory that may still be taken; without an answer from the system, as much as anyone asks for."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return float("inf")
    found = [line.split()[1] for line in text.splitlines() if line.startswith("MemAvailable:")]
    return 1024.0 * float(found[0]) if found else float("inf")
