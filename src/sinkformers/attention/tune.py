"""`tune`: time the backends for a shape on this device, and let `auto` take the winner."""

import math
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sinkformers.attention.functional import plan_attention
from sinkformers.core import checks
from sinkformers.core.agreement import deviation, tolerance
from sinkformers.core.backend import Backend, Backends
from sinkformers.core.description import shape_of
from sinkformers.core.environment import device_name
from sinkformers.core.modes import readable
from sinkformers.core.self_check import LIMIT_STEPS
from sinkformers.core.timing import Call, Seconds, duration, medians, time_in_turn

CALLER = "tune"


class Candidate(NamedTuple):
    """A way to serve the calls, and its time, or the reason why it has none."""

    backend: str
    choice: str  # of tile sizes, where the backend has several
    seconds: Seconds | None
    reason: str = ""

    @property
    def label(self) -> str:
        return f"{self.backend} {self.choice}".rstrip()


class Tuning(NamedTuple):
    """What `tune` found. Printed, it is a table.

    Examples:
        >>> import torch, sinkformers
        >>> found = sinkformers.tune(*torch.randn(3, 1, 2, 9, 4), n_iters=3)
        >>> found.backend in [candidate.backend for candidate in found.candidates]
        True
    """

    backend: str
    """The fastest backend, which `auto` takes for this shape from now on."""
    choice: str
    """Its tile sizes, where it has a choice of them."""
    candidates: tuple[Candidate, ...]
    """All candidates with their median times."""
    shape: str
    device: str
    from_file: bool
    """Whether the times were read from the file instead of measured."""

    def __repr__(self) -> str:
        lines = [f"{self.shape}", f"on {self.device}{', from the file' if self.from_file else ''}", ""]
        width = max(len(candidate.label) for candidate in self.candidates)
        lines.append(f"{'':<{width}}  {'forward':>9}  {'backward':>9}  {'together':>9}")
        for candidate in self.candidates:
            if candidate.seconds is None:
                lines.append(f"{candidate.label:<{width}}  {candidate.reason}")
                continue
            cells = "  ".join(f"{duration(part) if part else '–':>9}" for part in candidate.seconds)
            chosen = (candidate.backend, candidate.choice) == (self.backend, self.choice)
            lines.append(f"{candidate.label:<{width}}  {cells}{'  ← auto' if chosen else ''}")
        return "\n".join(lines)


def tune(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    backward: bool = True,
    seconds: float = 1.0,
    file: str | PathLike[str] | None = None,
    **options: Any,
) -> Tuning:
    """Time the backends for attention of this shape on this device, and let `backend="auto"` take the fastest.

    The winner holds for this process: for eager calls with tensors of these shapes and dtypes on this device, with the
    same masks given and the same settings. Random tokens will do, except at `n_iters=math.inf`, whose time depends on
    the scores. Calls inside `torch.compile` choose as before.

    Args:
        query, key, value, attn_mask: as in `sinkhorn_attention`.
        backward: time the backward pass too, and compare the sum. False is for inference.
        seconds: about how long to time, in all. Compilation, and three rounds at least, come in addition.
        file: remember the result in this file, for the same device and the same versions. A result that is there
            already is used instead of timing again, so that a program may call `tune` whenever it starts.
        options: further arguments of `sinkhorn_attention`: `n_iters`, `query_mask`, `causal`, …, except `backend` and
            `cache`.

    Returns:
        Times and winner; printed, a table. Kernels that fail the self-check on this device are not timed.

    Examples:
        >>> import torch, sinkformers
        >>> q, k, v = torch.randn(3, 2, 4, 64, 16).unbind()
        >>> found = sinkformers.tune(q, k, v, n_iters=5, seconds=0.1)
        >>> sinkformers.backend_for(q, k, v, n_iters=5) == found.backend
        True
    """
    for name in ("backend", "cache"):
        if name in options:
            raise TypeError(f"{CALLER}: {name} is not an argument of tune; leave it out.")
    seconds = checks.positive(CALLER, "seconds", seconds)
    if isinstance(query, Tensor) and not readable(query):
        raise ValueError(
            f"{CALLER}: calls are timed on tokens with numbers, outside of compiled regions and torch.func transforms; "
            f"got {type(query).__name__} on {query.device}. Call tune before, with tensors of the same shapes."
        )
    plan = plan_attention(query, key, value, attn_mask, **options)
    if plan.backends is None:
        raise ValueError(
            f'{CALLER}: there is nothing to choose from: such calls are always served by "{plan.backend}". Pass '
            "n_iters > 1 and tokens that are not empty."
        )
    from sinkformers.core.tuning_file import find_entry, keep_entry

    contest = _Contest(plan.backends, plan.call, (query, key, value, attn_mask), options, backward)
    shape, device = _described(plan.call, backward), device_name(query.device)
    found = None if file is None else _from_entry(find_entry(file, device, shape), shape, device)
    if found is None or not contest.install(found.backend, found.choice):
        candidates = contest.measure(seconds)
        timed = [each for each in candidates if each.seconds is not None]
        if not timed:
            reasons = "; ".join(f"{each.label}: {each.reason}" for each in candidates)
            raise RuntimeError(f"{CALLER}: no backend could be timed. {reasons}.")
        best = min(timed, key=lambda each: each.seconds.together if each.seconds else math.inf)
        contest.install(best.backend, best.choice)
        found = Tuning(best.backend, best.choice, candidates, shape, device, False)
        if file is not None:
            keep_entry(file, device, shape, _entry(found))
    return found


class _Contest:
    """The calls that are timed."""

    def __init__(
        self, table: Backends, call: Any, tensors: tuple[Any, ...], options: dict[str, Any], backward: bool
    ) -> None:
        self.table, self.described, self.options, self.backward = table, call, options, backward
        *self.tokens, self.attn_mask = tensors

    def install(self, backend: str, choice: str) -> bool:
        """Let `auto` take a backend for this shape; False where it cannot serve."""
        chosen = self.table.by_name.get(backend)
        if chosen is None or chosen.why_not(self.described) is not None:
            return False
        if choice and choice not in chosen.choices(self.described):
            return False
        if choice:
            chosen.prefer(self.described, choice)
        if not self.table.trusts(chosen, self.described):
            return False
        self.table.winners[shape_of(self.described)] = backend
        return True

    def measure(self, seconds: float) -> tuple[Candidate, ...]:
        """Time the candidates in turn. Modes and the generator of the user's are left as they are."""
        found: dict[tuple[str, str], Candidate] = {}
        with torch.inference_mode(False), torch.set_grad_enabled(self.backward), torch.random.fork_rng(devices=[]):
            tokens = [x.detach().clone().requires_grad_(self.backward) for x in self.tokens]
            others = (self.attn_mask, self.options.get("tau"))
            learned = [x for x in others if isinstance(x, Tensor) and x.requires_grad]
            inputs, device = [*tokens, *learned] if self.backward else [], tokens[0].device
            calls: dict[tuple[str, str], Call] = {}
            known: dict[str, Tensor] | None = None
            for backend in self.table.by_name.values():
                if not backend.automatic(self.described):
                    continue
                for choice in backend.choices(self.described) or ("",):
                    call = self._call(backend, choice, tokens)
                    reason, outcome = self._try(backend, call, inputs, known)
                    if reason is None:
                        known = outcome if known is None else known
                        calls[backend.name, choice] = call
                    found[backend.name, choice] = Candidate(backend.name, choice, None, reason or "")
            times = time_in_turn(calls, inputs, device, seconds)
        for way in calls:
            found[way] = found[way]._replace(seconds=medians(times[way]))
        return tuple(found.values())

    def _try(
        self, backend: Backend, call: Call, inputs: list[Tensor], known: dict[str, Tensor] | None
    ) -> tuple[str | None, dict[str, Tensor]]:
        """The reason why a candidate is not timed, or None; and what it computes, which has to be what others do."""
        reason = backend.why_not(self.described)
        if reason is None and not self.table.trusts(backend, self.described):
            reason = "it failed its self-check on this device"
        if reason is not None:
            return reason, {}
        try:
            call()  # compiles what is to be compiled
            torch.default_generator.manual_seed(0)  # dropout has its seeds from the CPU
            outcome = _outcome(call, inputs)
        except Exception as error:
            return f"it raised {type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}", {}
        allowed = self._tolerance()
        off = deviation(outcome, outcome if known is None else known)
        if off.exceeds(allowed):
            return f"it disagrees: {off.name} deviates by {off.size:.1e}, where rounding explains {allowed:.1e}", {}
        return None, outcome

    def _tolerance(self) -> float:
        """How far two backends may be apart on the user's tokens."""
        query, key, *_ = described = self.described
        norms = [x.detach().float().norm(dim=-1).nan_to_num(0.0).amax().item() for x in (query, key)]
        steps, score = getattr(described, "n_iters", LIMIT_STEPS), abs(described.scale) * norms[0] * norms[1]
        rounding = tolerance(query.dtype, query.shape[-2], key.shape[-2], steps, score)
        return 2 * rounding + 10 * getattr(described, "tol", 0.0)

    def _call(self, backend: Backend, choice: str, tokens: list[Tensor]) -> Call:
        def call() -> Tensor:
            if choice:
                backend.prefer(self.described, choice)
            plan = plan_attention(*tokens, self.attn_mask, **self.options, backend=backend.name)
            return plan.function(*plan.arguments)

        return call


def _outcome(call: Call, inputs: list[Tensor]) -> dict[str, Tensor]:
    """The output, and the gradients of its sum of squares."""
    out = call()
    found = {"the output": out.detach()}
    if inputs:
        grads = torch.autograd.grad(out, inputs, out.detach(), allow_unused=True)
        found |= {f"gradient {number}": grad for number, grad in enumerate(grads) if grad is not None}
    return found


def _described(call: Any, backward: bool) -> str:
    """The shape of a call as people read it, and as the file finds it again."""
    parts = [type(call).__name__]
    for name, part in zip(call._fields, call, strict=True):
        if isinstance(part, Tensor):
            parts.append(f"{name} {str(part.dtype).removeprefix('torch.')} {tuple(part.shape)}")
        elif part is True or (isinstance(part, int) and not isinstance(part, bool) and name != "block"):
            parts.append(name if part is True else f"{name} {part}")
        elif name == "dropout_p" and part > 0:
            parts.append("dropout")
    return ", ".join([*parts, "forward and backward" if backward else "forward alone"])


def _entry(found: Tuning) -> dict[str, Any]:
    """A result as the file keeps it."""
    candidates = [
        {**each._asdict(), "seconds": None if each.seconds is None else list(each.seconds)} for each in found.candidates
    ]
    return {"backend": found.backend, "choice": found.choice, "candidates": candidates}


def _from_entry(entry: dict[str, Any] | None, shape: str, device: str) -> Tuning | None:
    if entry is None:
        return None
    candidates = tuple(
        Candidate(**{**each, "seconds": None if each["seconds"] is None else Seconds(*each["seconds"])})
        for each in entry["candidates"]
    )
    winner = entry["backend"], entry["choice"]
    if all(each.seconds is None or (each.backend, each.choice) != winner for each in candidates):
        return None  # nothing says why this one
    return Tuning(entry["backend"], entry["choice"], candidates, shape, device, True)
