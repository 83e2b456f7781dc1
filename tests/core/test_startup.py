"""What the first calls import, and how long they take beyond `import torch`."""

import subprocess
import sys

import pytest

FIRST_CALLS = """
import sys, time, torch
start = time.perf_counter()
import sinkformers
tokens = torch.randn(2, 3, 20, 8, requires_grad=True)
for backend in ("auto", "torch"):
    out = sinkformers.sinkhorn_attention(tokens, tokens, tokens, tau=torch.tensor(0.5), backend=backend)
    out.square().sum().backward()
    sinkformers.sinkhorn(tokens, backend=backend).square().sum().backward()
sinkformers.sinkhorn_attention(tokens, tokens, tokens, n_iters=1).sum().backward()
sinkformers.sinkhorn_limit(tokens).square().sum().backward()
sinkformers.MultiheadAttention(8, 2, n_iters=3)(tokens[0], tokens[0], tokens[0])
print(time.perf_counter() - start)
print(*sys.modules)
"""


def first_calls():
    done = subprocess.run([sys.executable, "-c", FIRST_CALLS], capture_output=True, text=True, check=True)
    seconds, modules = done.stdout.splitlines()
    return float(seconds), set(modules.split())


def test_no_compiler_is_imported_before_the_user_compiles():
    _, modules = first_calls()
    assert "sinkformers.attention.attend" in modules
    assert not {"torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd", "triton"} & modules
    assert "sinkformers.attention.backends.traced" not in modules
    assert not any(name.startswith(("sinkformers.conversion", "sinkformers.lab")) for name in modules)


@pytest.mark.slow
def test_the_first_calls_take_little_time():
    """The best of five: what else the machine does only adds."""
    assert min(first_calls()[0] for _ in range(5)) < 0.15
