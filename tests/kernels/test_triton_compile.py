"""Every Triton kernel compiles for the GPUs it is meant for, as the library itself would launch it, and fits them.

No GPU is needed; see tests/triton_targets.py. `python -m tests.kernels.test_triton_compile sm_90 …` prints what the
kernels take of each GPU.
"""

import os
import re
import sys
import tempfile

import pytest
import torch

pytest.importorskip("triton", reason="the triton extra is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles only in a process without TRITON_INTERPRET", allow_module_level=True)

from sinkformers.attention.call import AttentionCall
from sinkformers.attention.causal.call import CausalAttentionCall
from sinkformers.kernels.triton import (
    attention_backward,
    attention_forward,
    causal_backward,
    causal_forward,
    sizes,
    tiny_backward,
    tiny_forward,
)
from tests.triton_targets import Compiled, compiling

pytestmark = pytest.mark.triton

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
PASSES = {"row_step", "col_step", "last_step"}
PASSES_BACK = {"output_adjoint", "value_step", "row_adjoint", "col_adjoint", "query_step", "key_step"}
CAUSAL_PASSES = {"count_keys", "give_uniformly", "causal_row_step", "causal_col_step"}
CAUSAL_PASSES_BACK = {"output_adjoint", "sums_adjoint", "causal_row_adjoint", "causal_query_step", "causal_key_step"}

# What a GPU grants one program of shared memory, and its registers: of 32 bits, per multiprocessor.
SHARED = {"sm_75": 64, "sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}
SHARED |= {"gfx90a": 64, "gfx942": 64, "gfx1100": 64}
# Bytes that a thread spills at most, as the compilers of Triton 3.9 report them; none where nothing is said.
PASSES_SPILL = {"sm_100": 24, "gfx1100": 220}
CAUSAL_SPILL = {"sm_80": 32, "sm_89": 52, "sm_90": 4, "sm_100": 28, "sm_120": 120, "gfx1100": 744}
WIDE_SPILL = {torch.float16: 12, torch.float32: 4}
# A pair for the launch that serves heads whose steps are near the last one, and the launch for the others.
BLOCKS_SPILL = {**dict.fromkeys(["sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942"], (0, 0)), "sm_80": (0, 8)}
# The same in the launch that serves the rare heads which no scalings can hold.
FAR_SPILLS = {"sm_80": 32, "sm_89": 192, "sm_120": 208}
SPILLS = {"sm_75": 4}  # and in that of all others; nothing where nothing is said
# gfx11 gives a program the four units of two cores, each with 1,536 registers of 32 lanes, if it is compiled for that.
REGISTERS = {"sm_": 2**16, "gfx9": 2**17, "gfx11": 4 * 1536 * 32}
TINY_SPILL = {"sm_80": 4}  # a register, in float16


@pytest.fixture
def compiled(tmp_path):
    """Call it with a GPU: kernels launched in that context are compiled for it and listed."""
    return lambda gpu: compiling(gpu, str(tmp_path))


def operands(dtype, n, m, width, full):
    """Tokens; masks, tau and a seed, or None for them. Heads lie beside features, as projections leave them."""
    q, k, v = (torch.zeros(2, rows, 3, width, dtype=dtype).transpose(1, 2) for rows in (n, m, m))
    masks = [None] * 6
    if full:
        token_masks = torch.ones(2, 1, n, dtype=torch.bool), torch.ones(2, 1, m, dtype=torch.bool)
        entries = torch.ones(1, 1, n, m, dtype=torch.bool)
        masks = [torch.zeros(1, 3, n, m, dtype=dtype), entries, *token_masks, torch.ones(2, 3), torch.tensor(5)]
    return q, k, v, *masks


def attend(dtype, width=64, n=1025, m=1100, n_iters=5, full=False, form="passes", ways=("forward", "backward")):
    """Forward and backward, with every option or with none, by the table's plan of that form."""
    call = AttentionCall(*operands(dtype, n, m, width, full), None, n_iters, 0.1, full, 0.1, False)
    plans = sizes.candidates(call)
    plan = plans[-1] if form == "passes" else next(plan for plan in plans if getattr(plan, form) is not None)
    if "forward" in ways:
        attention_forward(call, -1e30, plan)
    if "backward" in ways:
        out, f, excess = (torch.zeros(2, 3, *shape) for shape in ((n, width), (n_iters // 2 + 2, n), (n_iters // 2, m)))
        saved = {"d_out": out.to(dtype), "out": out, "f": f, "excess": excess}
        attention_backward(call, -1e30, **saved, needs_bias=full, plan=plan)


def attend_causally(dtype, width=64, n_iters=5, full=False):
    """Forward and backward, with every option but the triangle, or with the triangle alone."""
    tokens = operands(dtype, 257, 300, width, full)
    call = CausalAttentionCall(*tokens, None, None, None, n_iters, 0.1, full, 0.1, not full, False, 1)
    out, *_, starts = causal_forward(call, -1e30)
    causal_backward(call, -1e30, d_out=out.to(dtype), out=out, starts=starts, needs_bias=full)


def longest(dtype, full, backward):
    """The longest sequences, the two sides alike, of which the table gives a head to one program."""
    for n in (128, 64, 32):
        call = AttentionCall(*operands(dtype, n, n, 64, full), None, 3, 0.1, False, 0.1, False)
        plan = sizes.candidates(call)[0]
        if (plan.head_gradient if backward else plan.head) is not None:
            return n
    raise AssertionError("no head is offered to one program")


def names(kernels):
    return {kernel.name for kernel in kernels}


def check(kernels: list[Compiled], gpu: str, spills: int = 0) -> None:
    """Code for this GPU, that fits its shared memory and its registers with one program at least."""
    assert kernels
    file = next(size for name, size in REGISTERS.items() if gpu.startswith(name))
    for kernel in kernels:
        text = kernel.asm["ptx" if gpu.startswith("sm") else "amdgcn"]
        assert re.search(rf"\.target {gpu}|amdhsa-\w*-{gpu}", text), kernel.name
        assert not gpu.startswith("gfx11") or "workgroup_processor_mode 1" in text, kernel.name
        assert kernel.shared <= SHARED[gpu] * 1024, kernel[:5]
        assert kernel.registers * kernel.threads <= file, kernel[:5]
        assert kernel.spills <= spills, kernel[:5]


def tensor_cores(kernels, *wanted):
    text = "".join(kernel.asm["ptx"] for kernel in kernels if kernel.name in wanted)
    return "mma" in text


@pytest.mark.parametrize("gpu", SHARED)
def test_a_head_in_one_program(gpu, compiled):
    """At the largest sizes that the table offers this GPU."""
    with compiled(gpu) as kernels:
        n = longest(torch.float16, False, backward=False)
        attend(torch.float16, n=n - 3, m=n - 5, form="head", ways=["forward"])
        n = longest(torch.float16, False, backward=True)
        attend(torch.float16, n=n - 3, m=n - 5, form="head_gradient", ways=["backward"])
    forward, near, far = kernels
    assert names(kernels) == {"head_forward", "head_backward"}
    check([forward, near], gpu, SPILLS.get(gpu, 0))
    check([far], gpu, FAR_SPILLS.get(gpu, 0))


@pytest.mark.parametrize("gpu", SHARED)
def test_attention_in_passes(gpu, compiled):
    with compiled(gpu) as kernels:
        attend(torch.bfloat16 if gpu != "sm_75" else torch.float16)
    assert names(kernels) == PASSES | PASSES_BACK
    check(kernels, gpu, PASSES_SPILL.get(gpu, 0))


@pytest.mark.parametrize("gpu", ["sm_80", "sm_90", "gfx942"])
def test_a_row_and_a_column_step_in_one_pass(gpu, compiled):
    with compiled(gpu) as kernels:
        attend(torch.float16, n=197, m=197, form="pair", ways=["forward"])
    found = [kernel.name for kernel in kernels]
    assert found == ["row_and_column_step", "add_up_columns", "row_and_column_step", "last_step"]
    check(kernels, gpu)


@pytest.mark.parametrize("gpu", BLOCKS_SPILL)
def test_a_head_in_blocks_of_rows(gpu, compiled):
    with compiled(gpu) as kernels:
        attend(torch.float16, n=253, m=251, form="blocks", ways=["backward"])
    near, far = kernels
    assert names(kernels) == {"head_backward_in_blocks"}
    check([near], gpu, BLOCKS_SPILL[gpu][0])
    check([far], gpu, BLOCKS_SPILL[gpu][1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["passes", "head_gradient"])
def test_attention_with_every_option(form, dtype, compiled):
    n = 257 if form == "passes" else 61
    with compiled("sm_80") as kernels:
        attend(dtype, n=n, m=n, full=True, form=form)
    wanted = {"passes": PASSES | PASSES_BACK, "head_gradient": {"head_forward", "head_backward"}}[form]
    assert names(kernels) == wanted | {"find_valid_lines"}
    check(kernels, "sm_80", 64)
    # Half precision goes through tensor cores; float32 must not, where they would cut it to ten bits.
    assert tensor_cores(kernels, *wanted) == (dtype != torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_wide_heads_fit(dtype, compiled):
    with compiled("sm_80") as kernels:
        attend(dtype, width=256, n_iters=1)
    check(kernels, "sm_80", WIDE_SPILL[dtype])
    assert max(kernel.shared for kernel in kernels) <= 99 * 1024  # on the small GPUs of a generation too


@pytest.mark.parametrize(("gpu", "dtype"), [("sm_80", torch.bfloat16), ("sm_90", torch.float32)])
def test_causal_attention_with_every_option(gpu, dtype, compiled):
    with compiled(gpu) as kernels:
        attend_causally(dtype, full=True)
    assert names(kernels) == CAUSAL_PASSES | CAUSAL_PASSES_BACK
    check(kernels, gpu, {"sm_80": 16, "sm_90": 40}[gpu])
    assert tensor_cores(kernels, "causal_query_step", "causal_key_step") == (dtype != torch.float32)


@pytest.mark.parametrize("gpu", SHARED)
def test_causal_attention(gpu, compiled):
    with compiled(gpu) as kernels:
        attend_causally(torch.float16, n_iters=3)
    assert names(kernels) == CAUSAL_PASSES | CAUSAL_PASSES_BACK
    check(kernels, gpu, CAUSAL_SPILL.get(gpu, 0))


@pytest.mark.parametrize(("dtype", "n_iters"), [(torch.float16, 3), (torch.float32, 1)])
def test_wide_causal_heads_fit(dtype, n_iters, compiled):
    with compiled("sm_90") as kernels:
        attend_causally(dtype, 256, n_iters)
    check(kernels, "sm_90", {torch.float16: 176, torch.float32: 0}[dtype])


@pytest.mark.parametrize("gpu", ["sm_80", "sm_90", "gfx942"])
def test_tiny_matrices_stay_in_registers(gpu, compiled):
    with compiled(gpu) as kernels:
        for dtype in DTYPES:
            scores = torch.zeros(1000, 4, 4, dtype=dtype)
            tiny_backward(tiny_forward(scores, None, 20), scores, None, 20)
        scores, tau = torch.zeros(7, 61, 64), torch.zeros(7)
        tiny_backward(tiny_forward(scores, tau, 5), scores, tau, 5)
    assert len(kernels) == 8
    check(kernels, gpu, TINY_SPILL.get(gpu, 0))


if __name__ == "__main__":
    for gpu in sys.argv[1:]:
        with compiling(gpu, tempfile.mkdtemp()) as kernels:
            attend(torch.float16)
            attend(torch.float16, n=128, m=128, form="head")
            attend(torch.float16, n=256, m=256)
            attend_causally(torch.float16)
        for kernel in kernels:
            sizes_of = f"{kernel.registers} registers, {kernel.spills} spilled, {kernel.shared} shared"
            print(f"{gpu:8}{kernel.name:24}{sizes_of}, {kernel.threads} threads")
