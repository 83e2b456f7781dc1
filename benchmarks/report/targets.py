"""What the library sets out to reach, as data, and whether the records show it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from benchmarks.measurement import Measurement
from benchmarks.units import size

Suites = dict[str, list[Measurement]]
OURS = "native"
GROUPS = {
    ("256 × 64", "64 × 128"): {3: 0.70, 5: 0.75, 21: 0.90},
    ("128 × 197",): {3: 0.80, 5: 0.80, 21: 0.95},
    ("16 × 512",): {3: 0.85, 5: 0.90, 21: 1.05},
    ("8 × 1024",): {3: 1.00, 5: 1.05, 21: 1.20},
    ("2 × 4096",): {3: 1.05, 5: 1.10, 21: 1.40},
}
UNCOMPILED = ("log-loop", "pot-log", "pot-kernel", "geomloss", "keops", "ott")


@dataclass(frozen=True)
class Target:
    """`value` is None where the records do not say. `show` writes value and bound alike."""

    text: str
    bound: float
    value: float | None
    at_most: bool = True
    show: Callable[[float], str] = "{:.3f}".format

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        return "met" if (self.value <= self.bound if self.at_most else self.value >= self.bound) else "**missed**"

    @property
    def wanted(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {self.show(self.bound)}"

    @property
    def measured(self) -> str:
        return "–" if self.value is None else self.show(self.value)


def targets(suites: Suites) -> list[Target]:
    return [
        *_attention(suites),
        *_peers(suites),
        *_inference(suites),
        *_variants(suites),
        *_memory(suites),
        *_growth(suites),
        *_training(suites),
        *_operator(suites),
    ]


def find(
    found: Iterable[Measurement], row: str, shape: str, n_iters: int | None = None, variant: str = ""
) -> Measurement | None:
    """The measurement of a row that has a number to show."""
    for m in found:
        if (m.row, m.shape, m.variant) == (row, shape, variant) and n_iters in (None, m.n_iters) and not m.reason:
            return m
    return None


def quotient(above: Measurement | None, below: Measurement | None) -> float | None:
    """Times as ratios to the same baseline, so that what disturbed a round cancels; plain medians without one."""
    if above is None or below is None:
        return None
    if above.ratio and below.ratio and above.baseline == below.baseline:
        return above.ratio.median / below.ratio.median
    return above.seconds.median / below.seconds.median if above.seconds and below.seconds else None


def _ratio(m: Measurement | None) -> float | None:
    return m.ratio.median if m and m.ratio else None


def _attention(suites: Suites) -> Iterator[Target]:
    found = suites.get("attention", [])
    for shapes, bounds in GROUPS.items():
        for shape in shapes:
            for n_iters, bound in bounds.items():
                value = _ratio(find(found, OURS, shape, n_iters))
                yield Target(f"{shape}, n_iters {n_iters}: time ÷ SDPA", bound, value)
    one_head = suites.get("one-head", [])
    value = quotient(find(one_head, OURS, "2 × 4096", 5, "one head"), find(one_head, OURS, "2 × 4096", 5))
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


def _inference(suites: Suites) -> Iterator[Target]:
    found = suites.get("inference", [])
    for shape in (shape for shapes in GROUPS for shape in shapes):
        bound = 0.90 if int(shape.split()[-1]) <= 512 else 1.15
        yield Target(
            f"{shape}, forward without gradient, n_iters 5: time ÷ SDPA", bound, _ratio(find(found, OURS, shape))
        )


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


def _training(suites: Suites) -> Iterator[Target]:
    found = suites.get("training", [])
    for shape, n_iters in (("ViT", 3), ("text encoder", 5)):
        value = _ratio(find(found, OURS, shape, n_iters))
        yield Target(f"{shape}, n_iters {n_iters}: whole training step ÷ SDPA", 1.0, value)


def _operator(suites: Suites) -> Iterator[Target]:
    found, tiny = suites.get("operator", []), "(65536, 4, 4)"
    value = quotient(find(found, "divisions", tiny), find(found, OURS, tiny))
    yield Target(f"`sinkhorn` on {tiny}, 20 iterations: compiled divisions ÷ us", 10.0, value, at_most=False)
