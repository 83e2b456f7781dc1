"""Checks on four ranks, and on groups of two and three of them."""

import torch
import torch.distributed as dist

from tests.distributed import agreement_checks, cost_checks, model_checks, ulysses_checks
from tests.distributed.one_device import CASES, IN_ORDER, compare

GROUPS = {}
IN_ORDER_BIAS = "streaming, a bias for all queries"  # a rank without queries has a contribution to its gradient too


def group_of(size, world):
    """The first so many ranks; None for this rank where it is no member."""
    if size not in GROUPS:
        GROUPS[size] = dist.new_group(list(range(size))) if size < world else dist.group.WORLD
    return GROUPS[size] if dist.get_rank() < size else None


def equality(name, kv, size, dtype=torch.float64):
    def check(_rank, world):
        group = group_of(size, world)
        if group is not None:
            compare(CASES[name], group, kv, dtype)

    return check


def some(names, size, kvs=("gather", "ring"), dtype=torch.float64):
    return {
        f"{name}, {kv}, {size} ranks, {dtype}": equality(name, kv, size, dtype)
        for name in names
        for kv in kvs
        if kv == "gather" or name not in IN_ORDER
    }


CHECKS = {
    **some(CASES, 3),
    **some(["three steps", "a mask of entries", "the relaxed limit", "causal, grouped heads", IN_ORDER_BIAS], 4),
    **some(["a bias", "dropout", "the limit", "streaming"], 2),
    **some(["tau", "grouped heads", "sharp scores", "the limit", "causal"], 3, dtype=torch.float32),
    **agreement_checks.CHECKS,
    **cost_checks.CHECKS,
    **model_checks.CHECKS,
    **ulysses_checks.CHECKS,
}
