"""Ranks that do not answer, and one that dies; in a world of their own, which does not survive it."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from sinkformers import sinkhorn_attention


def attend(group):
    query = torch.randn(1, 2, 4, 5, requires_grad=True)
    return sinkhorn_attention(query, query, query, n_iters=3, group=group)


def a_rank_that_is_stuck(rank, size):
    group = dist.new_group(timeout=timedelta(seconds=3))
    if rank == size - 1:
        time.sleep(8)
        return
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"the exchange of sizes and settings failed on rank {rank} of {size}"):
        attend(group)
    assert time.monotonic() - started < 7


def a_rank_that_dies(rank, size):
    """Between the passes; the gradient of the values comes first in the backward pass."""
    out = attend(dist.group.WORLD)
    if rank == size - 1:
        os._exit(0)
    with pytest.raises(RuntimeError, match=rf"the \S+ of .* failed on rank {rank} of {size}. Another process"):
        out.sum().backward()


CHECKS = {check.__name__: check for check in (a_rank_that_is_stuck, a_rank_that_dies)}
