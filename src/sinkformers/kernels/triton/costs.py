"""What a call costs by the code of its kernels, and what that means at best on three GPUs: a model, not a measurement.

Products, exponentials and additions are those of the scores' entries; bytes are those of tokens, each read and written
once per pass. Vectors, masks, addresses and launches are left out. The time of a pass is that of the slowest of its
four parts at the peak that the vendor states, and the time of a call is the sum over its passes.

    python -m sinkformers.kernels.triton.costs docs/kernels.md     # writes the tables of that page
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sinkformers.kernels.triton.sizes import Kind, Plan, padded_width, plans


class Pass(NamedTuple):
    """One launch: what it computes per entry of the scores, and which tokens it reads and writes."""

    products: str  # the features of each product: those of queries and keys (d) or of values (e)
    exponentials: int
    additions: int  # sums, maxima and differences, in float32
    reads: str  # q, k, v, the gradient of the output (o), and the output itself in float32 (O)
    writes: str


class Shape(NamedTuple):
    heads: int
    n: int
    m: int
    d: int
    e: int
    bytes: int  # per feature of the tokens


class Cost(NamedTuple):
    """Of one pass or of a call."""

    multiply_adds: int
    exponentials: int
    additions: int
    bytes: int


def forward_passes(plan: Plan, n_iters: int) -> Iterator[tuple[str, Pass]]:
    """The launches of `attention_forward`, by the name of the kernel."""
    if plan.head is not None:
        yield "head_forward", Pass("de", 1, n_iters + 4, "qkv", "O")
        return
    for step in range(n_iters - n_iters % 2):
        if plan.pair is None:
            yield "col_step" if step % 2 else "row_step", Pass("d", 1, 4, "qk", "")
        elif step % 2 == 0:
            yield "row_and_column_step", Pass("d", 1, 5, "qk", "")
    yield "last_step", Pass("de", 1, 4, "qkv", "O")


def backward_passes(plan: Plan, n_iters: int) -> Iterator[tuple[str, Pass]]:
    """The launches of `attention_backward`, where no step needs an exponential of its own."""
    odd, n_cols = n_iters % 2, n_iters // 2
    if plan.head_gradient is not None:
        yield "head_backward", Pass("deedd", 1, 2 * n_iters + 3, "qkvo", "qkv")
        return
    if plan.blocks is not None:
        # One launch, but its sweeps follow one another; what one has read is in the cache for the next.
        yield "head_backward_in_blocks", Pass("de", 1, 1 + odd, "qkvoO", "v")
        for _ in range(n_cols):
            yield "head_backward_in_blocks", Pass("d", 1, 3, "", "")
        yield "head_backward_in_blocks", Pass("dedd", 1, n_iters + 1, "", "qk")
        return
    yield "output_adjoint", Pass("", 0, 0, "oO", "")
    yield "value_step", Pass("de", 1, 1 + odd, "qko" + "v" * (n_cols > 0), "v")
    for half in reversed(range(n_cols)):
        yield "row_adjoint", Pass("d", 1, 3, "qk", "")
        if half:
            yield "col_adjoint", Pass("d", 1, 2, "qk", "")
    yield "query_step", Pass("ded", 1, n_iters + 2, "qkvo", "q")
    yield "key_step", Pass("ded", 1, n_iters + 2, "qkvo", "k")


def cost(one: Pass, shape: Shape) -> Cost:
    """What one pass costs for all heads."""
    heads, n, m, d, e, size = shape
    entries, widths = heads * n * m, {"d": d, "e": e}
    tokens = {"q": n * d * size, "k": m * d * size, "v": m * e * size, "o": n * e * size, "O": n * e * 4}
    moved = heads * sum(tokens[which] for which in one.reads + one.writes)
    multiply_adds = entries * sum(widths[which] for which in one.products)
    return Cost(multiply_adds, entries * one.exponentials, entries * one.additions, moved)


class Gpu(NamedTuple):
    """Peak rates per second, as the vendor states them; exponentials by units, lanes and clock."""

    name: str
    target: str
    multiply_adds: dict[int, float]  # by bytes per feature
    exponentials: float
    additions: float
    bytes: float

    def seconds(self, one: Cost, size: int) -> float:
        """The time of a pass at the peak of what it needs most of."""
        return max(
            one.multiply_adds / self.multiply_adds[size],
            one.exponentials / self.exponentials,
            one.additions / self.additions,
            one.bytes / self.bytes,
        )


GPUS = (
    Gpu("A100", "sm_80", {2: 156e12, 4: 9.75e12}, 108 * 16 * 1.41e9, 9.75e12, 2.04e12),
    Gpu("H100", "sm_90", {2: 495e12, 4: 33.5e12}, 132 * 16 * 1.83e9, 33.5e12, 3.35e12),
    Gpu("MI300X", "gfx942", {2: 654e12, 4: 81.7e12}, 304 * 16 * 2.1e9, 81.7e12, 5.3e12),
)
# SoftMax attention in one kernel each way, as libraries have it: the yardstick.
SOFTMAX = [Pass("de", 1, 4, "qkv", "o"), Pass("deedd", 1, 2, "qkvo", "qkv")]


def plan_on(gpu: Gpu, shape: Shape) -> Plan:
    """The plan that the table chooses for a call without matrices of masks."""
    width = padded_width(max(shape.d, shape.e))
    return plans(Kind(gpu.target, shape.bytes, False, width, shape.n, shape.m))[0]


def both_ways(plan: Plan, n_iters: int) -> list[Pass]:
    """All passes of a training step."""
    return [one for _, one in (*forward_passes(plan, n_iters), *backward_passes(plan, n_iters))]


def seconds(gpu: Gpu, passes: list[Pass], shape: Shape) -> float:
    return sum(gpu.seconds(cost(one, shape), shape.bytes) for one in passes)


SHAPES = (
    ("768 × 64", Shape(768, 64, 64, 64, 64, 2)),
    ("768 × 128", Shape(768, 128, 128, 64, 64, 2)),
    ("768 × 197", Shape(768, 197, 197, 64, 64, 2)),
    ("384 × 512", Shape(384, 512, 512, 64, 64, 2)),
    ("96 × 2048", Shape(96, 2048, 2048, 64, 64, 2)),
)
STEPS = (3, 5, 21)


def tables() -> str:
    """The tables of docs/kernels.md: products of tokens, and the modelled time beside that of SoftMax."""
    h100 = GPUS[1]
    lines = [
        "| batch·heads × n | kernels | n_iters | products, forward | products, backward |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, shape in SHAPES:
        plan = plan_on(h100, shape)
        for n_iters in STEPS:
            counts = [
                sum(len(one.products) for _, one in passes(plan, n_iters))
                for passes in (forward_passes, backward_passes)
            ]
            lines.append(f"| {name} | {form(plan)} | {n_iters} | {counts[0]} | {counts[1]} |")
    lines += ["", "| batch·heads × n | n_iters | " + " | ".join(gpu.name for gpu in GPUS) + " |", "| --- " * 5 + "|"]
    for name, shape in SHAPES:
        cells = [_microseconds(seconds(gpu, SOFTMAX, shape)) for gpu in GPUS]
        lines.append(f"| {name} | SoftMax | " + " | ".join(cells) + " |")
        for n_iters in STEPS:
            cells = []
            for gpu in GPUS:
                ours = seconds(gpu, both_ways(plan_on(gpu, shape), n_iters), shape)
                cells.append(f"{_microseconds(ours)} ({ours / seconds(gpu, SOFTMAX, shape):.1f} ×)")
            lines.append(f"| {name} | {n_iters} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def form(plan: Plan) -> str:
    """What the plan consists of, in words."""
    if plan.head is not None and plan.head_gradient is not None:
        return "a head in one program"
    if plan.head is None and plan.pair is None:
        return "passes"
    forward = "two steps in a pass" if plan.head is None else "a head in one program"
    return f"{forward}, backward in " + ("passes" if plan.blocks is None else "blocks of rows")


def _microseconds(time: float) -> str:
    return f"{time * 1e6:,.0f} µs"


PLACE = re.compile(r"(<!-- model of the kernels -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str) -> str:
    """The page with its tables written again."""
    if PLACE.search(page) is None:
        raise ValueError("the page has no place for the tables: <!-- model of the kernels --> … <!-- end -->")
    return PLACE.sub(lambda found: f"{found[1]}\n{tables()}\n\n{found[2]}", page)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m sinkformers.kernels.triton.costs PAGE")
    target = Path(sys.argv[1])
    target.write_text(filled(target.read_text()))
