"""Every Triton kernel compiles for the GPUs it is meant for, as the library itself would launch it.

No GPU is needed: a driver that only names its target stands in for one, the library's own functions are called, and
each launch stops once the kernel is compiled. So the sizes, types and strides are those of real calls.
"""

import os
import re
import subprocess

import pytest
import torch

pytest.importorskip("triton", reason="the triton extra is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles only in a process without TRITON_INTERPRET", allow_module_level=True)

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from sinkformers.attention.call import AttentionCall
from sinkformers.attention.causal.call import CausalAttentionCall
from sinkformers.kernels.triton import (
    attention_backward,
    attention_forward,
    causal_backward,
    causal_forward,
    tiny_backward,
    tiny_forward,
)

pytestmark = pytest.mark.triton

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
PASSES = {"row_step", "col_step", "last_step"}
CAUSAL_PASSES = {"count_keys", "give_uniformly", "causal_row_step", "causal_col_step"}
CAUSAL_PASSES_BACK = {"output_adjoint", "sums_adjoint", "causal_row_adjoint", "causal_query_step", "causal_key_step"}
PASSES_BACK = {"output_adjoint", "value_step", "row_adjoint", "col_adjoint", "query_step", "key_step"}


class Driver:
    """A GPU that can be named but not launched on."""

    def __init__(self, capability):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.target.arch

    def get_current_stream(self, _device):
        return 0


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Call it with a capability; kernels launched from then on are compiled for it and listed by name."""
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    kernels = {}
    run = JITFunction.run

    def compile_only(self, *args, **options):
        kernel = run(self, *args, **{**options, "warmup": True})
        kernels.setdefault(self.fn.__name__, []).append(kernel)
        return kernel

    def choose(capability):
        monkeypatch.setattr(driver, "_active", Driver(capability))
        return kernels

    monkeypatch.setattr(JITFunction, "run", compile_only)
    return choose


def operands(dtype, d, e, full):
    """Tokens; masks, tau and a seed, or None for them. Heads lie beside features, as projections leave them."""
    n, m = 257, 300
    shapes = ((n, d), (m, d), (m, e))
    q, k, v = (torch.zeros(2, rows, 3, width, dtype=dtype).transpose(1, 2) for rows, width in shapes)
    masks = [None] * 6
    if full:
        token_masks = torch.ones(2, 1, n, dtype=torch.bool), torch.ones(2, 1, m, dtype=torch.bool)
        entries = torch.ones(1, 1, n, m, dtype=torch.bool)
        masks = [torch.zeros(1, 3, n, m, dtype=dtype), entries, *token_masks, torch.ones(2, 3), torch.tensor(5)]
    return q, k, v, *masks


def attend(dtype, d, e, n_iters, full):
    """Forward and backward, with every option or with none."""
    call = AttentionCall(*operands(dtype, d, e, full), None, n_iters, 0.1, full, 0.1, False)
    out, f, excess = attention_forward(call, -1e30)
    attention_backward(call, -1e30, d_out=out.to(dtype), out=out, f=f, excess=excess, needs_bias=full)


def attend_causally(dtype, d, n_iters, full):
    """Forward and backward, with every option but the triangle, or with the triangle alone."""
    tokens = operands(dtype, d, d, full)
    call = CausalAttentionCall(*tokens, None, None, None, n_iters, 0.1, full, 0.1, not full, False, 1)
    out, *_, starts = causal_forward(call, -1e30)
    causal_backward(call, -1e30, d_out=out.to(dtype), out=out, starts=starts, needs_bias=full)


def check(kernels, capability):
    for name, versions in kernels.items():
        for kernel in versions:
            assert re.search(rf"\.target sm_{capability}", kernel.asm["ptx"]), name
            assert len(kernel.asm["cubin"]) > 0, name
            # What GPUs since sm_80 grant a block, the small ones of a generation included.
            assert kernel.metadata.shared <= 99 * 1024, name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("capability", [80, 90])
def test_attention_with_every_option(capability, dtype, compiled):
    kernels = compiled(capability)
    attend(dtype, 64, 64, 5, full=True)
    assert kernels.keys() == PASSES | PASSES_BACK | {"find_valid_lines"}
    check(kernels, capability)
    products = "".join(kernels[name][0].asm["ptx"] for name in ("last_step", "query_step", "key_step"))
    # Half precision goes through tensor cores; float32 must not, where they would cut it to ten bits.
    assert ("mma" in products) == (dtype != torch.float32)


@pytest.mark.parametrize("n_iters", [1, 4])
def test_attention_without_options(n_iters, compiled):
    kernels = compiled(80)
    attend(torch.bfloat16, 40, 96, n_iters, full=False)
    assert kernels.keys() >= {"last_step", "output_adjoint", "value_step", "query_step", "key_step"}
    check(kernels, 80)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_wide_heads_fit_shared_memory(dtype, compiled):
    kernels = compiled(80)
    attend(dtype, 256, 256, 1, full=False)
    check(kernels, 80)


@pytest.mark.parametrize(("capability", "dtype"), [(80, torch.bfloat16), (90, torch.float32)])
def test_causal_attention_with_every_option(capability, dtype, compiled):
    kernels = compiled(capability)
    attend_causally(dtype, 64, 5, full=True)
    assert kernels.keys() == CAUSAL_PASSES | CAUSAL_PASSES_BACK
    check(kernels, capability)
    products = "".join(kernels[name][-1].asm["ptx"] for name in ("causal_query_step", "causal_key_step"))
    assert ("mma" in products) == (dtype != torch.float32)


@pytest.mark.parametrize(("dtype", "n_iters"), [(torch.float16, 3), (torch.float32, 1)])
def test_wide_causal_heads_fit_shared_memory(dtype, n_iters, compiled):
    kernels = compiled(90)
    attend_causally(dtype, 256, n_iters, full=False)
    check(kernels, 90)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("capability", [80, 90])
def test_tiny_matrices_stay_in_registers(capability, dtype, compiled, tmp_path):
    kernels = compiled(capability)
    scores = torch.zeros(1000, 4, 4, dtype=dtype)
    tiny_backward(tiny_forward(scores, None, 20), scores, None, 20)
    if dtype == torch.float32:
        scores, tau = torch.zeros(7, 61, 64), torch.zeros(7)
        tiny_backward(tiny_forward(scores, tau, 5), scores, tau, 5)
    assert kernels.keys() == {"_forward", "_backward"}
    check(kernels, capability)
    for kernel in (kernel for versions in kernels.values() for kernel in versions):
        file = tmp_path / "kernel.cubin"
        file.write_bytes(kernel.asm["cubin"])
        usage = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file], capture_output=True, text=True
        )
        stack = re.search(r"STACK:(\d+)", usage.stdout)
        assert stack, usage
        assert int(stack[1]) <= 64  # bytes a thread: a call frame, not a matrix
