"""What causal attention saves for backward: its inputs and output, and one vector per block of rows and column step."""

import pytest
import torch

from sinkformers.attention.causal import BACKENDS as TABLE
from sinkformers.attention.causal import CausalAttentionCall
from tests.causal_cases import BACKENDS, attend, tokens
from tests.saved import saved_bytes


def rows_per_block(backend, query, key, value, n_iters):
    settings = (n_iters, 0.5, False, 0.0, True, False, 1)
    return TABLE[backend].rows_per_block(CausalAttentionCall(query, key, value, *[None] * 9, *settings))


@pytest.mark.parametrize("n_iters", [3, 7])
@pytest.mark.parametrize("n", [100, 700])
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
def test_one_vector_per_block_and_column_step(backend, n, n_iters):
    given = tokens(torch.ones(n, n), 2, 3, d=4, e=4, dtype=torch.float32)
    attend(*given, is_causal=True, n_iters=n_iters, backend=backend)
    found = saved_bytes(lambda: attend(*given, is_causal=True, n_iters=n_iters, backend=backend))
    blocks = -(-n // rows_per_block(backend, *given, n_iters))
    tokens_and_output, vectors = 4 * (2 * 3 * n * 4) * 4, blocks * (n_iters // 2) * (2 * 3 * n) * 4
    assert found <= tokens_and_output + vectors + 2 * 3  # and a flag per head
    assert rows_per_block(backend, *given, n_iters) >= min(n, 32)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
def test_nothing_is_saved_without_gradients(backend):
    given = [x.detach() for x in tokens(torch.ones(50, 50), 2)]
    assert saved_bytes(lambda: attend(*given, is_causal=True, backend=backend)) == 0
