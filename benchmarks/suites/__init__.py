"""Every suite by name, in the order in which a full run takes them."""

from collections.abc import Callable, Iterator

from benchmarks.measurement import Measurement
from benchmarks.progress import Progress
from benchmarks.settings import Settings
from benchmarks.suites import (
    attention,
    conversion,
    inference,
    masks,
    memory,
    one_head,
    operator,
    peers,
    scaling,
    sharp,
    training,
)

SUITES: dict[str, Callable[[Settings, Progress], Iterator[Measurement]]] = {
    "attention": attention.run,
    "inference": inference.run,
    "masks": masks.run,
    "sharp": sharp.run,
    "one-head": one_head.run,
    "scaling": scaling.run,
    "memory": memory.run,
    "training": training.run,
    "conversion": conversion.run,
    "operator": operator.run,
    "peers": peers.run,
}
QUICK = ("attention", "inference", "training", "operator")

__all__ = ["QUICK", "SUITES"]
