"""The peak of the products: the best rate of a large `torch.mm` in each precision, on the same threads.

Attention is made of products, so no kernel can be faster than this rate allows.
"""

from collections.abc import Iterator

import torch

from benchmarks.case import Case
from benchmarks.measurement import MEASURED, Measurement
from benchmarks.progress import Progress
from benchmarks.settings import Settings
from benchmarks.steps import TorchStep
from benchmarks.summary import spread
from benchmarks.timing import interleave

N = 2048
DTYPES = ("float32", "float64", "bfloat16")
RATE = "GFLOP/s"
PRODUCTS = 7  # two forward: scores, output; five backward: scores again, and the gradients of weights, q, k and v
SECONDS = 10.0


def run(settings: Settings, progress: Progress) -> Iterator[Measurement]:
    generator = torch.Generator().manual_seed(0)
    factors = torch.randn(2, N, N, generator=generator)
    steps = {dtype: TorchStep(torch.mm, factors.to(getattr(torch, dtype)).unbind(), None) for dtype in DTYPES}
    times = interleave(steps, settings.plan(SECONDS), on_round=progress.rounds("peak"))
    for dtype, by_round in times.items():
        seconds = list(by_round.values())
        rate = {RATE: 2e-9 * N**3 / min(seconds)}
        measurement = Measurement("peak", dtype, "torch.mm", MEASURED, n=N, seconds=spread(seconds), fit=rate)
        progress.show(measurement)
        yield measurement


def flops(case: Case) -> int:
    """Return the operations that the products of forward and backward need."""
    return 2 * PRODUCTS * case.entries * case.d
