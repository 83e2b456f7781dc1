"""Checks of what a call costs: bytes sent beside the formula, and the largest tensors in memory."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from sinkformers import sinkhorn_attention
from sinkformers.attention.sharded import call as sharded_call
from sinkformers.distributed import Workload, bytes_sent, count_traffic

HEADER = ("sizes and settings",)


def bytes_beside_the_formula(kv):
    def check(_rank, size):
        for n_iters in (1, 2, 3, 4, 5):
            for backward in (False, True):
                q = torch.randn(2, 4, 6, 8, dtype=torch.float16, requires_grad=backward)
                k, v = (torch.randn(2, 2, 7, width, dtype=torch.float16, requires_grad=backward) for width in (8, 5))
                with count_traffic() as counted:
                    out = sinkhorn_attention(q, k, v, n_iters=n_iters, enable_gqa=True, group=dist.group.WORLD, kv=kv)
                    if backward:
                        out.sum().backward()
                work = Workload(size, 7 * size, 8, 4, 8, 5, n_iters)
                found = sum(sent for what, sent in counted.items() if what not in HEADER)
                assert found == pytest.approx(bytes_sent(work, kv, backward=backward)), (n_iters, backward, counted)

    return check


class LargestTensor(TorchDispatchMode):
    """The bytes of the largest memory that an operation returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, torch.Tensor):
                self.largest = max(self.largest, each.untyped_storage().nbytes())
        return out


def largest_tensor(kv, n, d, n_iters=3, tile=2**10):
    """In numbers of float32, of a call with n tokens on this rank, forward and backward."""
    before, sharded_call.TILE = sharded_call.TILE, tile
    try:
        q, k, v = (torch.randn(1, n, d, requires_grad=True) for _ in range(3))
        with LargestTensor() as seen:
            sinkhorn_attention(q, k, v, n_iters=n_iters, group=dist.group.WORLD, kv=kv).sum().backward()
    finally:
        sharded_call.TILE = before
    return seen.largest // 4


def memory_of_the_ring(_rank, size):
    """No more than this rank's tokens, or a block of scores, or a vector over all columns, at a time."""
    n, d = 128, 192
    rows = sharded_call.FEWEST_ROWS
    assert largest_tensor("ring", n, d) <= max(n * d, rows * n, n * size)
    assert largest_tensor("ring", n // size, d) <= n // size * d  # as 1/ranks, for the same sequence


def memory_of_gathering(_rank, size):
    """The gathered keys or values; never the scores of all this rank's queries."""
    n, d = 256, 16
    assert largest_tensor("gather", n, d) <= max(size * n * d, sharded_call.FEWEST_ROWS * size * n)
    assert n * n * size > 2 * size * n * d


def vectors_between_the_passes(_rank, size):
    """Tokens and output of this rank, and vectors: three of rows or columns per step; nothing gathered."""
    n, d, n_iters, saved = 64, 32, 5, []
    q, k, v = (torch.randn(1, n, d, requires_grad=True) for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        sinkhorn_attention(q, k, v, n_iters=n_iters, group=dist.group.WORLD)
    rows = 3 * (2 * n) + 3 * size * n  # top and total of a row step, and its column potentials
    assert sum(saved) <= 4 * n * d + n + 1 + rows + 2 * 3 * size * n


CHECKS = {
    "bytes beside the formula, gather": bytes_beside_the_formula("gather"),
    "bytes beside the formula, ring": bytes_beside_the_formula("ring"),
    "memory of the ring": memory_of_the_ring,
    "memory of gathering": memory_of_gathering,
    "vectors between the passes": vectors_between_the_passes,
}
