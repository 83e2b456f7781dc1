"""All calls on two, three and four ranks, in other precisions and from other seeds; and a Hugging Face encoder."""

import torch
import torch.distributed as dist

from tests.distributed.model_checks import SLOW_CHECKS
from tests.distributed.one_device import CASES, call, compare, part, tensors
from tests.distributed.short_checks import group_of, some


def half_precision(name, kv, size, dtype):
    """The output is that of one device, rounded to the dtype: within two units in its last place."""

    def check(rank, world):
        group = group_of(size, world)
        if group is None:
            return
        case = CASES[name]
        whole = {
            key: x if key == "tau" else x.to(dtype) if x.is_floating_point() else x
            for key, x in tensors(case, dtype).items()
        }
        expected, grads = call(case, whole, backend="torch")
        out, found = call(case, {key: part(key, x, case, rank, size) for key, x in whole.items()}, group=group, kv=kv)
        for key in ("query", "key", "value"):
            _near(found[key], part(key, grads[key], case, rank, size), grads[key])
        _near(out, part("query", expected, case, rank, size), expected)

    return check


def _near(mine, expected, whole):
    assert mine.dtype == expected.dtype
    unit = torch.finfo(mine.dtype).eps * whole.abs().max().item()
    assert not mine.numel() or (mine.float() - expected.float()).abs().max().item() <= 2 * unit


def other_seeds(name, size):
    def check(_rank, world):
        group = group_of(size, world)
        for seed in range(2, 8):
            if group is not None:
                compare(CASES[name], group, "gather", torch.float64, seed)
        dist.barrier()

    return check


HALF = ("three steps", "masks of tokens", "a bias", "grouped heads", "the L2 cost")
CHECKS = {
    **some(CASES, 2),
    **some(CASES, 4),
    **{key: check for size in (2, 3, 4) for key, check in some(CASES, size, dtype=torch.float32).items()},
    **{
        f"{name}, {kv}, {dtype}": half_precision(name, kv, 3, dtype)
        for name in HALF
        for kv in ("gather", "ring")
        for dtype in (torch.float16, torch.bfloat16)
    },
    **{f"{name}, other seeds": other_seeds(name, 3) for name in CASES},
    **SLOW_CHECKS,
}
