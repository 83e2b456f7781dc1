"""What the library sets out to reach, and whether the records show it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from benchmarks.case import BAND_WINDOW
from benchmarks.measurement import Measurement
from benchmarks.report import bounds
from benchmarks.report.bounds import Bounds
from benchmarks.report.limit import limit_targets
from benchmarks.report.target import OURS, Suites, Target, find, quotient, ratio
from benchmarks.suites.bias import UNMASKED
from benchmarks.suites.conversion import CONVERTED
from benchmarks.suites.small import SOFTMAX
from benchmarks.units import size

UNCOMPILED = ("log-loop", "pot-log", "pot-kernel", "geomloss", "keops", "ott")
TO_SDPA = "n_iters {n_iters}: time ÷ SDPA"


def targets(suites: Suites) -> list[Target]:
    return [
        *_ratios(suites, "attention", bounds.ATTENTION),
        *_one_head(suites),
        *_peers(suites),
        *_ratios(suites, "inference", bounds.INFERENCE, f"forward without gradient, {TO_SDPA}"),
        *_variants(suites),
        *_ratios(suites, "bias", bounds.MASKED, f"{TO_SDPA} with the same mask"),
        *_band_window(suites),
        *_ratios(suites, "causal", bounds.CAUSAL, "causal, n_iters {n_iters}: time ÷ causal SDPA"),
        *_ratios(suites, "causal", bounds.TOKEN, "n_iters {n_iters}: time ÷ SDPA on cached keys"),
        *_ratios(suites, "half", bounds.HALF, f"{TO_SDPA} in this precision"),
        *_ratios(suites, "long", bounds.LONG),
        *_threads(suites),
        *_memory(suites),
        *_growth(suites),
        *_ratios(suites, "training", bounds.TRAINING, "n_iters {n_iters}: whole training step ÷ SDPA"),
        *_ratios(suites, "conversion", bounds.CONVERSION, "n_iters {n_iters}: time ÷ original", row=CONVERTED),
        *limit_targets(suites.get("limit", [])),
        *_ratios(suites, "limit", bounds.LIMIT_MODEL, row=CONVERTED),
        *_operator(suites),
        *_ratios(suites, "small", bounds.CALL),
        *_ratios(suites, "small", bounds.OPERATOR, f"n_iters {{n_iters}}: `sinkhorn` ÷ `{SOFTMAX}`"),
    ]


def _ratios(suites: Suites, suite: str, limits: Bounds, what: str = TO_SDPA, *, row: str = OURS) -> Iterator[Target]:
    """Yield a target for every bound of a ratio to the baseline; `what` may contain `{n_iters}`."""
    for shape, by_count in limits.items():
        for n_iters, bound in by_count.items():
            value = ratio(find(suites.get(suite, []), row, shape, n_iters))
            yield Target(f"{shape}, {what.format(n_iters=n_iters)}", bound, value)


def _one_head(suites: Suites) -> Iterator[Target]:
    found = suites.get("one-head", [])
    value = quotient(find(found, OURS, "2 × 4096", 5, "one head"), find(found, OURS, "2 × 4096", 5))
    yield Target("one head at n = 4096: time ÷ half the time of two", 1.15, None if value is None else 2 * value)


def _worst(found: list[Measurement], peers: Iterable[str], fits: Callable[[int], bool]) -> float | None:
    """How many times longer the nearest of the peers takes than we do, over all shapes and n_iters."""
    peers = set(peers)
    factors = [
        quotient(m, find(found, OURS, m.shape, m.n_iters)) for m in found if m.row in peers and m.n and fits(m.n)
    ]
    known = [factor for factor in factors if factor is not None]
    return min(known) if known else None


def _peers(suites: Suites) -> Iterator[Target]:
    contests = [suites.get(name, []) for name in ("attention", "peers")]
    rules: list[tuple[str, float, Iterable[str], Callable[[int], bool]]] = [
        ("the ten compiled lines ÷ us, at worst", 1.0, ["ten-lines"], lambda n: True),
        ("every uncompiled peer ÷ us, at worst, n < 512", 2.0, UNCOMPILED, lambda n: n < 512),
        ("every uncompiled peer ÷ us, at worst, n ≥ 512", 3.0, UNCOMPILED, lambda n: n >= 512),
        ("the compiled log loop ÷ us, at worst, n ≤ 512", 1.5, ["log-loop-compiled"], lambda n: n <= 512),
        ("the compiled log loop ÷ us, at worst, n ≥ 1024", 3.0, ["log-loop-compiled"], lambda n: n >= 1024),
    ]
    for text, bound, peers, fits in rules:
        known = [worst for found in contests if (worst := _worst(found, peers, fits)) is not None]
        yield Target(text, bound, min(known) if known else None, at_most=False)


def _variants(suites: Suites) -> Iterator[Target]:
    """Worst over the shapes: a variant's time over the plain one's."""
    rules = [
        ("masks", "0 % padding", 1.10),
        ("masks", "25 % padding", 1.10),
        ("masks", "50 % padding", 1.0),
        ("sharp", "std 30", 1.15),
    ]
    for suite, variant, bound in rules:
        found = suites.get(suite, [])
        ours = [m for m in found if m.row == OURS and m.variant == variant]
        values = [quotient(m, find(found, OURS, m.shape, m.n_iters)) for m in ours]
        known = [value for value in values if value is not None]
        plain = "unmasked" if suite == "masks" else "std 1"
        yield Target(f"{variant}: time ÷ {plain}, at worst", bound, max(known) if known else None)


def _memory(suites: Suites) -> Iterator[Target]:
    found = suites.get("memory", [])
    ours, sdpa = find(found, OURS, "16 × 2048", 21), find(found, "sdpa", "16 × 2048")
    extra = None
    if ours and sdpa and ours.peak_bytes is not None and sdpa.peak_bytes is not None:
        extra = float(ours.peak_bytes - sdpa.peak_bytes)
    yield Target("16 × 2048, n_iters 21: peak memory of a step − SDPA's", 64 * 2.0**20, extra, show=size)
    large = find(found, OURS, "1 × 32768")
    value = float(large.peak_bytes) if large and large.peak_bytes is not None else None
    yield Target("1 × 32768, n_iters 5: peak memory of a step", 2.0**30, value, show=size)


def _growth(suites: Suites) -> Iterator[Target]:
    fits = {m.row: m.fit for m in suites.get("scaling", []) if m.fit}
    for name, bound in (("time exponent", 2.15), ("memory exponent", 1.15)):
        yield Target(f"one head: fitted {name}", bound, fits.get(OURS, {}).get(name))


def _operator(suites: Suites) -> Iterator[Target]:
    found, tiny = suites.get("operator", []), "(65536, 4, 4)"
    value = quotient(find(found, "divisions", tiny), find(found, OURS, tiny))
    yield Target(f"`sinkhorn` on {tiny}, 20 iterations: compiled divisions ÷ us", 12.0, value, at_most=False)


def _band_window(suites: Suites) -> Iterator[Target]:
    found, shape = suites.get("bias", []), f"16 × 512, {BAND_WINDOW}"
    value = quotient(find(found, OURS, shape, 5), find(found, OURS, shape, 5, UNMASKED))
    yield Target(f"{shape}, n_iters 5: time ÷ unmasked", 0.6, value)


def _threads(suites: Suites) -> Iterator[Target]:
    found = suites.get("threads", [])
    value = quotient(find(found, OURS, "16 × 512", 5, "1 thread"), find(found, OURS, "16 × 512", 5))
    yield Target("16 × 512, n_iters 5: time of one thread ÷ time of two", 1.8, value, at_most=False)
