"""Causal attention beside causal SDPA: whole sequences forward and backward, and one generated token with a cache."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import agreement
from benchmarks.case import TRIANGLE, Case, draw
from benchmarks.contest import Entry, compete
from benchmarks.measurement import Measurement
from benchmarks.progress import Progress
from benchmarks.settings import Settings
from benchmarks.suites.entries import SECONDS, SHAPES, attention_entries
from sinkformers import SinkhornCache, causal_sinkhorn, sinkhorn_attention

ROWS = ("sdpa", "native", "torch")
LABELS = ("16 × 512", "8 × 1024", "2 × 4096")
COUNTS = (3, 5)
CONTEXT = Case(1, 8, 4096, backward=False)
TOKEN = f"{CONTEXT.label}, one token"
SOFTMAX_CACHE = 1  # n_iters of SoftMax on our cache
TOKEN_SECONDS, MOST_TOKENS = 5.0, 200


def run(settings: Settings, progress: Progress) -> Iterator[Measurement]:
    for label in LABELS[:1] if settings.quick else LABELS:
        case = replace(SHAPES[label], mask=TRIANGLE)
        entries = attention_entries(settings.pick(ROWS), case, COUNTS)
        yield from compete("causal", label, entries, settings.plan(0.5 * SECONDS[case.n]), progress)
    counts = {"sdpa": (SOFTMAX_CACHE,), "native": (SOFTMAX_CACHE, *COUNTS)}
    rows = [row.name for row in settings.pick(tuple(counts))]
    entries = [_token_entry(row, n_iters) for row in rows for n_iters in counts[row]]
    yield from compete("causal", TOKEN, entries, settings.plan(TOKEN_SECONDS, most=MOST_TOKENS), progress)


class Generation:
    """A step that appends one token to a context and attends with it; every call has the context of the one before."""

    def __init__(self, row: str, n_iters: int) -> None:
        tokens = draw(replace(CONTEXT, n=CONTEXT.n + 1))
        self.tokens = [x.contiguous() for x in (tokens.query, tokens.key, tokens.value)]
        self.row, self.n_iters, self.used = row, n_iters, CONTEXT.n
        query, key, value = (x[..., : CONTEXT.n, :] for x in self.tokens)
        self.cache = SinkhornCache()[0]
        with torch.no_grad():
            if row == "sdpa":
                self.memory = [F.pad(x, (0, 0, 0, 2 * MOST_TOKENS)) for x in (key, value)]
            else:
                sinkhorn_attention(query, key, value, is_causal=True, n_iters=n_iters, cache=self.cache)
        self.out = query

    def reset(self) -> None:
        pass

    @torch.no_grad()
    def call(self) -> None:
        query, key, value = (x[..., CONTEXT.n :, :] for x in self.tokens)
        if self.row != "sdpa":
            self.out = sinkhorn_attention(
                query,
                key,
                value,
                is_causal=True,
                n_iters=self.n_iters,
                cache=self.cache,
                backend=_backend(self.n_iters),
            )
            return
        for memory, new in zip(self.memory, (key, value), strict=True):
            memory[..., self.used : self.used + 1, :] = new
        self.used += 1
        keys, values = (x[..., : self.used, :] for x in self.memory)
        self.out = F.scaled_dot_product_attention(query, keys, values)

    def outcome(self) -> Sequence[Tensor]:
        return [self.out]

    def expected(self) -> Sequence[Tensor]:
        """The output of the first call in float64: the last row of attention on all tokens."""
        query, key, value = (x[0].double() for x in self.tokens)
        outputs = []
        for q, k, v in zip(query, key, value, strict=True):
            weights = causal_sinkhorn(q @ k.mT * CONTEXT.d**-0.5, n_iters=self.n_iters)
            outputs.append(weights[-1:] @ v)
        return [torch.stack(outputs)[None]]


def _backend(n_iters: int) -> str:
    return "auto" if n_iters == 1 else "native"


def _token_entry(row: str, n_iters: int) -> Entry:
    def check() -> agreement.Checked:
        step = Generation(row, n_iters)
        return agreement.check(step, step.expected)

    settings = {"n": CONTEXT.n} | ({} if row == "sdpa" else {"n_iters": n_iters})
    return Entry(row, build=lambda: Generation(row, n_iters), check=check, settings=settings)
