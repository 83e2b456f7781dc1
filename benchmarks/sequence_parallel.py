"""A model of sharded attention on 8 to 1,024 GPUs: bytes by the formula, and the published speeds of GPUs and links.

    python -m benchmarks.sequence_parallel [--fill docs/distributed.md]

Nothing here is measured on a GPU. The bytes are those of `sinkformers.distributed.bytes_sent`, which the tests compare
with the bytes that calls on four processes send. A share of the GPU's peak is assumed for the products, and of the
link's for the messages. Communication can hide behind products where it takes less time.
"""

import argparse
import re
from pathlib import Path
from typing import NamedTuple

from sinkformers.distributed import Workload, bytes_sent


class Machine(NamedTuple):
    """A GPU and its links, by the manufacturer's data sheet: bytes per second and direction."""

    name: str
    flops: float  # dense products of bfloat16 per second
    inside: float  # between the GPUs of a node
    across: float  # of each GPU's network card
    gpus_per_node: int = 8


MACHINES = (
    Machine("A100, NVLink 3, InfiniBand HDR", 312e12, 300e9, 25e9),
    Machine("H100, NVLink 4, InfiniBand NDR", 989e12, 450e9, 50e9),
)
RANKS = (8, 64, 256, 1024)
SHARE_OF_PEAK, SHARE_OF_LINK = 0.4, 0.8
HEADS, HEAD_DIM, KV_HEADS = 32, 128, 8
START = "<!-- python -m benchmarks.sequence_parallel --fill docs/distributed.md -->"
END = "<!-- end of the model -->"


def workload(ranks: int, tokens: float, n_iters: int) -> Workload:
    """One layer of one sequence: tokens in bfloat16, vectors and gradients in float32."""
    return Workload(ranks, int(tokens), HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, n_iters)


def products(work: Workload, kv: str) -> float:
    """The floating-point operations of a rank's products, forward and backward, as the passes of our code need them.

    Every pass computes its scores again. The forward pass has one product with the values, the backward pass four of
    tokens: gradients of values, of weights, of queries and of keys.
    """
    column_steps = work.n_iters // 2
    if kv == "gather":
        forward, back = column_steps + 1, 2 + column_steps
    else:
        forward, back = work.n_iters, 2 + column_steps + max(0, column_steps - 1)
    pairs = work.tokens / work.ranks * work.tokens * work.heads
    return 2 * pairs * ((forward + back + 2) * work.head_dim + 3 * work.value_dim)


def seconds(machine: Machine, work: Workload, kv: str) -> tuple[float, float]:
    """Of the products, and of the communication."""
    link = machine.inside if work.ranks <= machine.gpus_per_node else machine.across
    sending = bytes_sent(work, kv) / (SHARE_OF_LINK * link)
    return products(work, kv) / (SHARE_OF_PEAK * machine.flops), sending


def shortest_hidden(machine: Machine, ranks: int, n_iters: int, kv: str) -> float:
    """The number of tokens from which on communication takes no longer than the products.

    Products grow with the square of the tokens and communication in proportion to them, so that one ratio says it.
    """
    tokens = ranks * 1024
    computing, sending = seconds(machine, workload(ranks, tokens, n_iters), kv)
    return tokens * sending / computing


def gathered(tokens: float) -> float:
    """The bytes of all keys and values on a rank."""
    return tokens * KV_HEADS * 2 * HEAD_DIM * 2


def table() -> str:
    lines = [
        "| | n_iters | kv | " + " | ".join(f"{ranks:,} GPUs" for ranks in RANKS) + " |",
        "| --- | --- | --- |" + " --- |" * len(RANKS),
    ]
    for machine in MACHINES:
        for n_iters in (1, 3, 5):
            for kv in ("gather", "ring"):
                lengths = (shortest_hidden(machine, ranks, n_iters, kv) for ranks in RANKS)
                lines.append(f"| {machine.name} | {n_iters} | {kv} | {' | '.join(map(shown, lengths))} |")
    return "\n".join(lines)


def shown(tokens: float) -> str:
    return f"{tokens / 1e6:.2f} M" if tokens >= 1e6 else f"{tokens / 1e3:.1f} k"


def page() -> str:
    million = bytes_sent(workload(64, 2**20, 3), "gather") / 2**30
    return "\n\n".join(
        (
            f"A model, not a measurement: {HEADS} heads of {HEAD_DIM} features, {KV_HEADS} of keys and values, "
            f"bfloat16, forward and backward of one layer; products at {SHARE_OF_PEAK:.0%} of the peak, messages at "
            f"{SHARE_OF_LINK:.0%} of a link, latency left out; the slowest link counts.\n"
            "The number of tokens in a sequence from which on communication takes no longer than the products:",
            table(),
            f"With `n_iters=3` a rank of 64 sends {million:.1f} GiB for a sequence of 2²⁰ tokens, and holds "
            f"{gathered(2**20) / 2**30:.1f} GiB of gathered keys and values.",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="a model of sharded attention on many GPUs")
    parser.add_argument("--fill", type=Path, help="write it into this page, between its markers")
    options = parser.parse_args()
    if options.fill is None:
        print(page())
        return
    text = options.fill.read_text(encoding="utf-8")
    between = re.compile(f"{re.escape(START)}.*?{re.escape(END)}", re.DOTALL)
    if not between.search(text):
        raise SystemExit(f"{options.fill} has no markers {START} and {END}.")
    options.fill.write_text(between.sub(lambda _: f"{START}\n\n{page()}\n\n{END}", text), encoding="utf-8")


if __name__ == "__main__":
    main()
