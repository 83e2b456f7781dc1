"""Every test starts from the same seed and reads NaN wherever it forgets to write."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_allocations():
    """In deterministic mode torch fills fresh memory with NaN, so that nothing can live on what it did not compute."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
