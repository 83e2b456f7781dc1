"""Calls of attention on one device, their parts on the ranks of a group, and the comparison of both.

Sizes are distinct primes or small; the parts are uneven, and with four ranks one has no queries and one no keys.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.testing import assert_close

from sinkformers import sinkhorn_attention

N, M, HEADS, D, E, BATCH = 13, 17, 4, 5, 3, 2
ROWS = {1: [13], 2: [9, 4], 3: [7, 2, 4], 4: [6, 0, 3, 4]}
COLUMNS = {1: [17], 2: [2, 15], 3: [3, 3, 11], 4: [5, 8, 0, 4]}


class Case(NamedTuple):
    """A call: its settings, the tensors beside the tokens that it is given, and how many heads keys have."""

    options: dict[str, Any]
    given: tuple[str, ...] = ()
    kv_heads: int = HEADS
    sharpness: float = 1.0

    def is_square(self):
        return bool(self.options.get("is_causal"))


CASES = {
    "three steps": Case({"n_iters": 3}),
    "columns last": Case({"n_iters": 2}),
    "columns last, relaxed": Case({"n_iters": 4}, ("tau",)),
    "SoftMax": Case({"n_iters": 1}, ("query_mask", "key_mask")),
    "many steps": Case({"n_iters": 21}),
    "masks of tokens": Case({"n_iters": 5}, ("query_mask", "key_mask")),
    "a mask of keys alone": Case({"n_iters": 3}, ("key_mask",)),
    "a bias": Case({"n_iters": 5}, ("bias", "key_mask")),
    "a bias for all queries": Case({"n_iters": 3}, ("row_bias", "query_mask")),
    "a bias of keys": Case({"n_iters": 3}, ("key_bias", "key_mask")),
    "a mask of entries": Case({"n_iters": 5}, ("entries", "query_mask")),
    "tau": Case({"n_iters": 5}, ("tau", "bias")),
    "the number tau": Case({"n_iters": 5, "tau": 0.6}, ("query_mask",)),
    "dropout": Case({"n_iters": 3, "dropout_p": 0.3}, ("key_mask",)),
    "the L2 cost": Case({"n_iters": 5, "cost": "l2"}, ("query_mask", "key_mask")),
    "grouped heads": Case({"n_iters": 5, "enable_gqa": True}, ("query_mask", "key_mask"), kv_heads=2),
    "grouped heads, L2": Case({"n_iters": 3, "enable_gqa": True, "cost": "l2"}, kv_heads=1),
    "sharp scores": Case({"n_iters": 5}, sharpness=100.0),
    "sharp scores, columns last": Case({"n_iters": 6}, ("tau",), sharpness=100.0),
    "the implicit gradient": Case({"n_iters": 5, "gradient": "implicit"}, ("tau", "bias")),
    "the limit": Case({"n_iters": math.inf, "tol": 1e-10}, ("query_mask", "key_mask")),
    "the relaxed limit": Case({"n_iters": math.inf, "tol": 1e-10}, ("tau", "bias")),
    "the limit with dropout": Case({"n_iters": math.inf, "tol": 1e-10, "dropout_p": 0.2}),
    "the limit, grouped heads": Case({"n_iters": math.inf, "tol": 1e-10, "enable_gqa": True}, kv_heads=2),
    "causal": Case({"n_iters": 5, "is_causal": True}, ("tau",)),
    "causal, grouped heads": Case(
        {"n_iters": 3, "is_causal": True, "enable_gqa": True, "dropout_p": 0.2}, ("query_mask", "key_mask"), kv_heads=2
    ),
    "causal SoftMax": Case({"n_iters": 1, "is_causal": True}, ("query_mask", "key_mask")),
    "streaming": Case({"n_iters": 3, "causal": "streaming"}, ("bias", "key_mask")),
    "streaming, a bias for all queries": Case({"n_iters": 3, "causal": "streaming"}, ("row_bias", "tau")),
    "streaming, L2": Case({"n_iters": 5, "causal": "streaming", "cost": "l2"}, ("entries", "tau")),
}
IN_ORDER = {name for name, case in CASES.items() if {"is_causal", "causal"} & set(case.options)} - {"causal SoftMax"}


def tensors(case, dtype, seed=1):
    """All tensors of a call on one device, and `d_out`, the gradient of its output."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def keep(*shape):
        return torch.rand(*shape, generator=generator) < 0.7

    m = N if case.is_square() else M
    found = {
        "query": 2 * case.sharpness * randn(BATCH, HEADS, N, D),
        "key": randn(BATCH, case.kv_heads, m, D),
        "value": randn(BATCH, case.kv_heads, m, E),
        "d_out": randn(BATCH, HEADS, N, E),
    }
    others = {
        "bias": randn(BATCH, 1, N, m),
        "row_bias": randn(HEADS, 1, m),
        "key_bias": randn(HEADS, 1, m),  # whose columns are sharded
        "entries": keep(N, m),
        "query_mask": keep(BATCH, N),
        "key_mask": keep(BATCH, m),
        "tau": torch.rand(HEADS, generator=generator, dtype=torch.float64) * 0.8 + 0.1,
    }
    return found | {name: others[name] for name in case.given}


def part(name, whole, case, rank, size):
    """A rank's part of one of the tensors."""
    rows, columns = ROWS[size], ROWS[size] if case.is_square() else COLUMNS[size]
    if name in ("query", "d_out", "bias", "entries"):
        return whole.split(rows, -2)[rank]
    if name in ("query_mask", "key_mask", "key_bias"):
        return whole.split(rows if name == "query_mask" else columns, -1)[rank]
    if name in ("key", "value"):
        return whole.split(columns, -2)[rank]
    return whole


def call(case, given, **options):
    """The output and the gradients of all tensors of a call that have one."""
    given = {name: x.detach().clone().requires_grad_(x.is_floating_point()) for name, x in given.items()}
    masks = [given[name] for name in ("bias", "row_bias", "key_bias", "entries") if name in given]
    rest = {name: given[name] for name in ("query_mask", "key_mask", "tau") if name in given}
    tokens = (given[name] for name in ("query", "key", "value"))
    torch.manual_seed(7)
    out = sinkhorn_attention(*tokens, *masks, allow_one_way_mask=True, **rest, **case.options, **options)
    out.backward(given["d_out"].detach())
    grads = {name: x.grad for name, x in given.items() if x.is_floating_point() and name != "d_out"}
    return out.detach(), grads


def one_device_backend(case):
    """The specification, where it serves the call."""
    has_none = case.options["n_iters"] == math.inf or "gradient" in case.options
    return "torch" if has_none else "reference"


def compare(case, group, kv, dtype=torch.float64, seed=1):
    """Assert that a group computes what one device does, output and every gradient."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    whole = tensors(case, dtype, seed)
    expected, grads = call(case, whole, backend=one_device_backend(case))
    local = {name: part(name, x, case, rank, size) for name, x in whole.items()}
    out, found = call(case, local, group=group, kv=kv)
    check("output", out, part("query", expected, case, rank, size), expected, case, dtype)
    for name, grad in grads.items():
        mine = found[name]
        assert mine is not None
        if name in ("tau", "row_bias"):  # every rank has its contribution
            mine = mine.clone()
            dist.all_reduce(mine, group=group)
        check(name, mine, part(name, grad, case, rank, size), grad, case, dtype)


def check(name, mine, expected, whole, case, dtype):
    n_iters = case.options["n_iters"]
    eps = torch.finfo(dtype).eps  # that of the steps: tau is in float64
    # Each step sums up to n or m numbers, whose rounding depends on the scores' size; a gradient sums over the steps.
    steps, size = (60 if n_iters == math.inf else n_iters + 1), max(1.0, whole.abs().max().item())
    tolerance = steps**2 * (N + M) * eps * size * case.sharpness
    if n_iters == math.inf:
        tolerance += 10 * case.options["tol"] * size
    assert_close(mine, expected, atol=tolerance, rtol=0, msg=lambda message: f"{name}: {message}")
