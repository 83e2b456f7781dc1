"""How many bytes a rank sends: counted, and by a formula."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

_counters: list[Counter[str]] = []


@contextmanager
def count_traffic() -> Iterator[Counter[str]]:
    """Count the bytes that this rank sends inside a `with` block, by what they are.

    A collective operation counts by the least that its usual algorithms send: an all-reduce of b bytes over R ranks
    2·b·(R − 1)/R, a gathering (R − 1) times this rank's part, and a reduce-scatter of b bytes b·(R − 1)/R.
    """
    counter: Counter[str] = Counter()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters[:] = [each for each in _counters if each is not counter]  # others may have counted the same


def record(what: str, size: float) -> None:
    """Count bytes under a name."""
    for counter in _counters:
        counter[what] += size  # pyright: ignore[reportArgumentType] — a half of an odd number of bytes


class Workload(NamedTuple):
    """A call of attention as the formula needs it, with as many tokens on every rank and no masks."""

    ranks: int
    tokens: int  # keys of all ranks together
    heads: int  # batch · heads, of queries
    kv_heads: int  # batch · heads, of keys and values
    head_dim: int  # of queries and keys
    value_dim: int
    n_iters: int
    element_size: int = 2  # bytes of a number in the tokens
    working_size: int = 4  # and in the vectors and gradients, which are never below float32


def bytes_sent(work: Workload, kv: str = "gather", *, backward: bool = True) -> float:
    """The bytes that a rank sends in a call of attention: keys and values, their gradients, and column vectors.

    The few numbers of the header are left out.
    """
    share = (work.ranks - 1) / work.ranks
    features = work.tokens * work.kv_heads
    keys, values = (features * width for width in (work.head_dim, work.value_dim))
    column_steps = work.n_iters // 2
    vectors = 2 * share * column_steps * work.heads * work.tokens * work.working_size
    if kv == "gather":
        tokens = share * (keys + values) * work.element_size
        sums = share * (keys + values) * work.working_size
        return tokens + vectors + backward * (sums + tokens + vectors)
    # A pass for every normalisation, and one for the output where columns come last; then one for the gradients of
    # values, one back through each step between the first and the last, and one for those of queries and keys.
    even, back = 1 - work.n_iters % 2, 2 + column_steps + max(0, column_steps - 1)
    forward = share * ((work.n_iters + even) * keys + values) * work.element_size
    around = share * (back * keys + 2 * values) * work.element_size
    sums = (keys + values) * work.working_size
    return forward + vectors + backward * (around + sums + vectors)
