"""Converted models under torch.compile, DistributedDataParallel, FSDP, autocast and half precision."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from sinkformers import set_n_iters, set_tau, to_sinkformer, watch_attention
from tests.conversion import two_processes
from tests.rounding import rounding

EXACT = rounding(4096)  # a few small layers in float64, with sums of up to some ten products: 9e-13
BALANCED = 2**-10  # column error after 21 iterations, if each of the 10 column steps halves it at least

VALID = torch.arange(7) < torch.tensor([[7], [5], [3]])


def encoder(dtype=torch.float64):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0, dtype=dtype)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.25)
    return model


@pytest.mark.parametrize("tau", [1.0, "learned"])
def test_compiled_whole_with_gradients_and_new_settings(tau):
    model = to_sinkformer(encoder(), 3, tau=tau)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 7, 8, dtype=torch.float64)
    for n_iters in (3, 5):
        set_n_iters(model, n_iters)
        out = model(x, src_key_padding_mask=~VALID)
        grads = torch.autograd.grad(out.square().sum(), list(model.parameters()))
        got = compiled(x, src_key_padding_mask=~VALID)
        got_grads = torch.autograd.grad(got.square().sum(), list(model.parameters()))
        assert_close(got, out, **EXACT)
        assert_close(got_grads, grads, **rounding(4096, size=100))  # gradients of up to some tens


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # by inductor, as it is imported
@pytest.mark.parametrize("kind", two_processes.MODELS)
def test_compiled_by_inductor_with_gradients(kind):
    if kind == "bert":
        pytest.importorskip("transformers", reason="the hf extra is not installed")
    torch.compiler.reset()
    model = two_processes.wrapped(kind, "alone")
    values = [two_processes.loss(kind, each, list(range(6))) for each in (model, torch.compile(model, fullgraph=True))]
    grads = [torch.autograd.grad(value, list(model.parameters())) for value in values]
    assert_close(values[1], values[0], **EXACT)
    assert_close(grads[1], grads[0], **EXACT)


def test_a_schedule_does_not_recompile_without_end():
    model = to_sinkformer(encoder(), 3)
    x = torch.randn(3, 7, 8, dtype=torch.float64)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for step in range(1, 20):  # more than torch's limit of recompilations
        set_tau(model, step / 20)
        assert_close(compiled(x), model(x), **EXACT)


def test_watched_while_compiled():
    model = to_sinkformer(encoder(), 21)
    x = torch.randn(3, 7, 8, dtype=torch.float64)
    with watch_attention(model) as watch:
        torch.compile(model, backend="eager")(x)
    for layer in watch.values():
        assert_close(layer.calls[0].column_sums, torch.ones(3, 2, 7, dtype=torch.float64), atol=BALANCED, rtol=0)


def test_distributed_data_parallel(tmp_path):
    os.environ.update(MASTER_ADDR="127.0.0.1")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = to_sinkformer(encoder(), 5, tau="learned")
        x = torch.randn(3, 7, 8, dtype=torch.float64)
        model(x).square().sum().backward()
        alone = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        wrapped = nn.parallel.DistributedDataParallel(model)
        wrapped(x).square().sum().backward()
        assert_close([p.grad for p in model.parameters()], alone, **EXACT)
        set_n_iters(wrapped, 1)
        assert model.layers[0].self_attn.sinkhorn.n_iters == 1
        del wrapped
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", two_processes.MODELS)
def test_two_processes_train_as_one(how, kind, tmp_path):
    if kind == "bert" and importlib.util.find_spec("transformers") is None:
        pytest.skip("the hf extra is not installed")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run += ["-m", "tests.conversion.two_processes", kind, how, str(tmp_path)]
    subprocess.run(run, check=True, cwd=Path(__file__).parents[2], env={**os.environ, "OMP_NUM_THREADS": "1"})
    alone = two_processes.train(kind)
    for rank in range(2):
        shared = torch.load(tmp_path / f"{rank}.pt")
        assert shared["world"] == 2
        assert_close(shared["parameters"], alone, **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_at_most_twice_as_much_as_softmax(dtype):
    model, exact = encoder(torch.float32), encoder(torch.float64)
    exact.load_state_dict(model.state_dict())
    x = torch.randn(3, 7, 8)
    errors = []
    for n_iters in (1, 5):
        to_sinkformer(model.float(), n_iters)
        expected = to_sinkformer(exact, n_iters)(x.double())
        errors.append((model.to(dtype)(x.to(dtype)).double() - expected).abs().max())
    assert errors[1] < 2 * errors[0]


def test_autocast():
    model = to_sinkformer(encoder(torch.float32), 5)
    x = torch.randn(3, 7, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    # bfloat16 keeps 8 bits; two layers of products of width 8 and 16 on values of order 1
    assert_close(out.float(), model(x), atol=32 * 2**-8, rtol=0)
