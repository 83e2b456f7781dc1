"""Every suite by name, in the order in which a full run takes them."""

from collections.abc import Callable, Iterator

from benchmarks.measurement import Measurement
from benchmarks.progress import Progress
from benchmarks.settings import Settings
from benchmarks.suites import (
    attention,
    bias,
    causal,
    conversion,
    half,
    inference,
    limit,
    long,
    masks,
    memory,
    one_head,
    operator,
    peak,
    peers,
    scaling,
    sharp,
    small,
    threads,
    training,
)

SUITES: dict[str, Callable[[Settings, Progress], Iterator[Measurement]]] = {
    "peak": peak.run,
    "attention": attention.run,
    "inference": inference.run,
    "masks": masks.run,
    "bias": bias.run,
    "causal": causal.run,
    "half": half.run,
    "sharp": sharp.run,
    "one-head": one_head.run,
    "threads": threads.run,
    "long": long.run,
    "scaling": scaling.run,
    "memory": memory.run,
    "training": training.run,
    "conversion": conversion.run,
    "operator": operator.run,
    "small": small.run,
    "limit": limit.run,
    "peers": peers.run,
}
QUICK = ("attention", "inference", "training", "operator")

__all__ = ["QUICK", "SUITES"]
