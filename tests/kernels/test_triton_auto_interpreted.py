"""`auto` with the Triton kernels themselves, in Triton's interpreter: they pass their self-check."""

import os
import warnings

import pytest
import torch

pytest.importorskip("triton", reason="the triton extra is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("test_triton_numerics.py runs this file with TRITON_INTERPRET set", allow_module_level=True)

import sinkformers
from sinkformers import sinkhorn
from sinkformers.attention import attend
from sinkformers.attention.backends import triton as attention_triton
from sinkformers.attention.call import AttentionCall
from sinkformers.attention.causal import operator as causal_operator
from sinkformers.attention.causal.backends import triton as causal_triton
from sinkformers.core import normalize, sample
from sinkformers.core.backends import triton as core_triton
from tests.triton_case import bfloat16_as_hardware_has_it

pytestmark = pytest.mark.triton


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    bfloat16_as_hardware_has_it(monkeypatch)
    monkeypatch.setattr(sample, "ROWS", (19, 67))
    monkeypatch.setattr(sample, "COLUMNS", (23, 71))
    for module in (attention_triton, causal_triton, core_triton):
        monkeypatch.setattr(module, "is_gpu", lambda _: True)
    for table in (attend.BACKENDS, causal_operator.BACKENDS, normalize.BACKENDS):
        others = {name: backend for name, backend in table.by_name.items() if name != "native"}
        monkeypatch.setattr(table, "by_name", others)


def tokens(n, m, dtype):
    return [torch.randn(1, 2, size, 8, dtype=dtype) for size in (n, m, m)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_iters": 4, "attn_mask": torch.randn(1, 20, 24), "tau": torch.tensor(0.5), "dropout_p": 0.2},
        {"causal": "streaming", "key_mask": torch.arange(24) < 20},
    ],
    ids=["plain", "masked", "streaming"],
)
def test_they_agree(options, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sinkformers.backend_for(*tokens(20, 24, dtype), **options) == "triton"


@pytest.mark.parametrize("gpu", ["sm_75", "sm_80", "sm_90", "sm_100", "gfx942", "gfx1100"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_calls_of_one_kind_have_one_plan(monkeypatch, gpu, dtype):
    """So that what was checked is what is taken."""
    from sinkformers.kernels.triton import sizes

    monkeypatch.setattr(sizes, "current_gpu", lambda: gpu)
    backend, plans = attend.BACKENDS["triton"], {}
    lengths = (1, 5, 16, 17, 37, 64, 65, 128, 131, 256, 257, 300, 512, 513, 1024, 1025, 1031, 5000)
    for n in lengths:
        for m in lengths:
            for bias in (None, torch.empty(1, 1, 1, dtype=dtype).expand(1, n, m)):
                query, key = (torch.empty(1, 1, 1, dtype=dtype).expand(1, size, 64) for size in (n, m))
                call = AttentionCall(query, key, key, bias, *[None] * 6, 3, 0.1, False, 0.0, False)
                plans.setdefault(backend.kind(call), set()).add(sizes.choose(call))
    assert {len(found) for found in plans.values()} == {1}
    assert len({plan for found in plans.values() for plan in found}) > 5


def test_small_matrices_agree():
    for dtype in (torch.float32, torch.bfloat16):
        sinkhorn(torch.randn(3, 5, 7, dtype=dtype), n_iters=5)
    verdicts = normalize.BACKENDS.checks.verdicts
    assert [verdict.agrees for (name, *_), verdict in verdicts.items() if name == "triton"] == [True] * 2


def test_they_are_found_out(monkeypatch):
    """A kernel that forgets a scale is not taken."""
    from sinkformers.kernels import triton

    right = triton.attention_backward
    monkeypatch.setattr(triton, "attention_backward", lambda *a, **k: _halved(right(*a, **k)))
    with pytest.warns(RuntimeWarning, match="the gradient of query deviates by 0.5"):
        assert sinkformers.backend_for(*tokens(20, 24, torch.float32), n_iters=7, scale=0.3, cost="l2") == "torch"


def _halved(grads):
    return grads[0] / 2, *grads[1:]
