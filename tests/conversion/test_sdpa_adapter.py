"""Modules that call `F.scaled_dot_product_attention`, converted by `adapter="sdpa"`: exactly their calls change."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from sinkformers import set_n_iters, to_sinkformer, to_transformer, watch_attention
from tests import oracle

EXACT = 1e-12  # float64, values of order 1
VALID = torch.arange(7) < torch.tensor([[7], [5], [3]])


class Block(nn.Module):
    """A typical attention block."""

    def __init__(self, causal=False):
        super().__init__()
        self.num_heads = 2
        self.causal = causal
        self.qkv = nn.Linear(8, 24, dtype=torch.float64)
        self.out = nn.Linear(8, 8, dtype=torch.float64)

    def heads(self, x):
        return self.qkv(x).reshape(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)

    def forward(self, x, mask=None):
        query, key, value = self.heads(x)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=self.causal)
        return x + self.out(out.transpose(1, 2).flatten(2))


class Indirect(nn.Module):
    """A block whose `forward` calls attention in another function."""

    def __init__(self):
        super().__init__()
        self.inner = Block()

    def forward(self, x, mask=None):
        return attention_elsewhere(self.inner, x, mask)


def attention_elsewhere(block, x, mask):
    query, key, value = block.heads(x)
    return block.out(F.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).flatten(2))


class Stack(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x, mask=None):
        for block in self.blocks:
            x = block(x, mask)
        return x


def tokens():
    return torch.randn(3, 7, 8, dtype=torch.float64)


KEYS = VALID[:, None, None]
FLOATS = torch.zeros(3, 1, 7, 7, dtype=torch.float64).masked_fill(~KEYS, -torch.inf)
MASKS = {"none": None, "keys": KEYS, "square": KEYS.expand(3, 1, 7, 7).contiguous(), "floats": FLOATS}


def test_the_adapter_is_used_only_if_named():
    with pytest.raises(ValueError, match=r'(?s)this Stack has no.*adapter="sdpa"'):
        to_sinkformer(Stack(Block()))


@pytest.mark.parametrize("mask", MASKS)
def test_one_iteration_is_the_original(mask):
    model, x = Stack(Block(), Block()), tokens()
    valid = slice(None) if mask == "none" else VALID
    before = model(x, MASKS[mask])[valid]
    expected = torch.autograd.grad(before.square().sum(), list(model.parameters()))
    to_sinkformer(model, 1, adapter="sdpa")
    after = model(x, MASKS[mask])[valid]
    assert_close(after, before, atol=EXACT, rtol=0)
    grads = torch.autograd.grad(after.square().sum(), list(model.parameters()))
    assert_close(grads, expected, atol=1e3 * EXACT, rtol=0)


@pytest.mark.parametrize("mask", MASKS)
def test_attention_is_sinkhorns_and_padding_is_masked_as_a_query_too(mask):
    model, x = Block(), tokens()
    query, key, value = model.heads(x)
    part = None if mask == "none" else (VALID[:, None] & VALID[..., None])[:, None]
    expected = oracle.attention(query, key, value, 5, tau=0.6, mask=part).transpose(1, 2).flatten(2)
    to_sinkformer(model, 5, tau=0.6, adapter="sdpa")
    assert_close(model(x, MASKS[mask]), x + model.out(expected), atol=EXACT, rtol=0)


def test_masks_of_fewer_axes_are_those_of_heads():
    model, x = Block(), tokens()
    query, key, value = model.heads(x)
    bias = torch.randn(2, 7, 7, dtype=torch.float64)
    expected = oracle.attention(query, key, value, 5, bias=bias.expand(3, 2, 7, 7)).transpose(1, 2).flatten(2)
    to_sinkformer(model, 5, adapter="sdpa")
    assert_close(model(x, bias), x + model.out(expected), atol=EXACT, rtol=0)


def test_intercepted_calls_are_reported_and_others_unchanged():
    model, x = Stack(Block(), Block(causal=True)), tokens()
    before = [block(x) for block in model.blocks]
    to_sinkformer(model, 5, adapter="sdpa")
    with watch_attention(model) as watch:
        model(x)
        model(x)
    assert [len(layer.calls) for layer in watch.values()] == [2, 0]
    calls = {name: entry.calls for name, entry in model.sinkformer_report.converted.items()}
    assert calls == {"blocks.0": {"attention call": 2}, "blocks.1": {"causal call left SoftMax": 2}}
    assert "2 × causal call left SoftMax" in str(model.sinkformer_report)
    assert model.blocks[1](x).equal(before[1])
    assert (model.blocks[0](x) - before[0]).abs().max() > 1e-4
    assert isinstance(model.blocks[0], Block)
    tokens_ = torch.randn(3, 2, 7, 4)
    assert F.scaled_dot_product_attention(tokens_, tokens_, tokens_).shape == tokens_.shape
    assert calls["blocks.0"] == {"attention call": 3}


def test_all_calls_inside_selected_modules_are_intercepted():
    model, x = Stack(Indirect(), Indirect()), tokens()
    with pytest.raises(ValueError, match=r"select matches none.*'blocks\.0\.inner', 'blocks\.1\.inner'"):
        to_sinkformer(model, adapter="sdpa", select="nothing")
    softmax = model(x)
    to_sinkformer(model, 5, adapter="sdpa", select="blocks.1")
    assert (model(x) - softmax).abs().max() > 1e-6
    assert list(model.sinkformer_report.converted) == ["blocks.1"]
    # A module that contains a converted one is not intercepted twice.
    to_sinkformer(model, 5, adapter="sdpa", select=lambda name, _module: name in ("", "blocks.0"))
    assert list(model.sinkformer_report.converted) == ["blocks.0", "blocks.1"]
    model(x)
    assert all(
        entry.calls == {"attention call": 1 + (name == "blocks.1")}
        for name, entry in model.sinkformer_report.converted.items()
    )


def test_back_to_the_original():
    model, x = Stack(Block(), Block()), tokens()
    before, keys = model(x), list(model.state_dict())
    to_sinkformer(model, 5, tau="learned", adapter="sdpa")
    assert model.sinkformer_report.parameters == ["blocks.0.sinkhorn_tau", "blocks.1.sinkhorn_tau"]
    assert to_transformer(model)(x).equal(before)
    assert [type(block) for block in model.blocks] == [Block, Block]
    assert list(model.state_dict()) == keys
    assert set(model.blocks[0].__dict__) == set(Block().__dict__)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), copy.copy])
def test_copies(clone):
    model, x = to_sinkformer(Stack(Block(), Block()), 5, tau="learned", adapter="sdpa"), tokens()
    other = clone(model)
    assert other(x).equal(model(x))
    set_n_iters(other, 7)
    assert [block.sinkhorn.n_iters for block in other.blocks] == [7, 7]


def test_compiled_whole():
    model, x = to_sinkformer(Stack(Block(), Block()), 5, adapter="sdpa"), tokens()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    out, got = model(x, KEYS), compiled(x, KEYS)
    assert_close(got, out, atol=EXACT, rtol=0)
    grads = [torch.autograd.grad(o.square().sum(), list(model.parameters())) for o in (out, got)]
    assert_close(*grads, atol=1e3 * EXACT, rtol=0)
    for _ in range(10):  # more than torch's limit of compilations, which here would raise
        compiled(x, KEYS)


def test_causal_masks_are_refused():
    model = to_sinkformer(Block(), 3, adapter="sdpa")
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    floats = torch.zeros(7, 7, dtype=torch.float64).masked_fill(~causal, -torch.inf)
    x = tokens()
    for mask in (causal, causal & KEYS, floats, causal.mT, causal | (torch.arange(7) < 3)):
        with pytest.raises(NotImplementedError, match=r"SinkhornBlock: attn_mask must not order the tokens.*`select`"):
            model(x, mask)
        assert to_sinkformer(copy.deepcopy(model), 3, allow_one_way_mask=True)(x, mask).isfinite().all()
    assert model(x, torch.eye(7, dtype=torch.bool)).isfinite().all()  # the diagonal alone hides nothing later
    set_n_iters(model, 1)
    expected = to_transformer(copy.deepcopy(model))(x, causal)
    assert_close(model(x, causal), expected, atol=EXACT, rtol=0)


def test_learned_tau_needs_the_number_of_heads():
    model = Stack(Block(), Block())
    del model.blocks[1].num_heads
    with pytest.raises(ValueError, match=r'tau="learned" needs the number of heads, and .blocks\.1. \(Block\)'):
        to_sinkformer(model, tau="learned", adapter="sdpa")
    assert [type(block) for block in model.blocks] == [Block, Block]
    assert not hasattr(model.blocks[0], "sinkhorn_tau")
