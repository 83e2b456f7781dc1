"""Checks of models inside `sequence_parallel`, of DTensors, of wrappers around models, and of compiled calls."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from sinkformers import MultiheadAttention, sequence_parallel, sinkhorn_attention, to_sinkformer, watch_attention
from sinkformers.models import TextEncoder, ViT
from tests.rounding import rounding

TOKENS, DIM = 12, 16
REAL = torch.arange(TOKENS) < torch.tensor([[TOKENS], [7]])


def close(mine, expected, count=20_000):
    """Of sums over hundreds of terms, in some layers, forward and backward."""
    assert_close(mine, expected, **rounding(count, mine.dtype, max(1.0, expected.abs().max().item())))


def torch_encoder():
    layer = nn.TransformerEncoderLayer(DIM, 4, 24, batch_first=True, dropout=0.0, dtype=torch.float64)
    return to_sinkformer(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), 3, tau="learned")


def own_multihead():
    layer = MultiheadAttention(DIM, 4, batch_first=True, n_iters=5, dtype=torch.float64)
    return _WithoutWeights(layer)


class _WithoutWeights(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, src_key_padding_mask):
        return self.layer(x, x, x, key_padding_mask=src_key_padding_mask, need_weights=False)[0]


def own_text_encoder():
    model = TextEncoder(vocabulary=9, length=5, classes=2, dim=DIM, depth=2, heads=4, hidden=24, n_iters=3).double()
    return _Mask(model.encoder)


class _Mask(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, x, src_key_padding_mask):
        return self.encoder(x, ~src_key_padding_mask)


def own_vit():
    return _NoMask(
        ViT(image=8, patch=2, channels=1, classes=2, dim=DIM, heads=4, depth=2, mlp_dim=24, n_iters=3).double().blocks
    )


class _NoMask(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks

    def forward(self, x, src_key_padding_mask):  # noqa: ARG002
        return self.blocks(x)


def trained(model, wrap=None, *, rank=0, size=1):
    """Output at valid tokens and gradients of parameters of one step, of a part of the sequences or of all."""
    part = slice(rank * TOKENS // size, (rank + 1) * TOKENS // size)
    x = torch.randn(2, TOKENS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(2))[:, part]
    real = REAL[:, part]
    wrapped = model if wrap is None else wrap(model)
    out = wrapped(x, src_key_padding_mask=~real)
    (size * out[real].sin().sum()).backward()  # wrappers take means over the ranks
    grads = {name.removeprefix("module."): p.grad for name, p in wrapped.named_parameters() if p.grad is not None}
    return out.detach().masked_fill(~real[..., None], 0.0), grads


def model_like_one_device(build, kv):
    def check(rank, size):
        torch.manual_seed(3)
        model = build()
        expected, whole = trained(copy.deepcopy(model))
        with sequence_parallel(dist.group.WORLD, kv=kv):
            out, grads = trained(model, rank=rank, size=size)
        close(out, expected.chunk(size, 1)[rank])
        assert grads.keys() == whole.keys()
        for name, grad in grads.items():
            dist.all_reduce(grad)
            close(grad / size, whole[name])

    return check


def wrapper_like_one_device(wrap):
    def check(rank, size):
        torch.manual_seed(3)
        model = torch_encoder()
        _, whole = trained(copy.deepcopy(model))
        with sequence_parallel(dist.group.WORLD):
            _, grads = trained(model, wrap, rank=rank, size=size)
        for name, grad in grads.items():
            close(grad.full_tensor() if isinstance(grad, DTensor) else grad, whole[name])

    return check


def hugging_face_encoder(rank, size):
    """A converted BERT whose positions are given, and one of the ranks has padding only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tests.conversion.hugging_face_models import build

        model = to_sinkformer(build("bert").eval(), n_iters=3)
    ids = torch.randint(5, 53, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    real, part = (
        torch.arange(TOKENS) < torch.tensor([[9], [7]]),
        slice(rank * TOKENS // size, (rank + 1) * TOKENS // size),
    )
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=real.long()).last_hidden_state
        with sequence_parallel(dist.group.WORLD):
            positions = torch.arange(TOKENS)[None, part]
            got = model(input_ids=ids[:, part], attention_mask=real[:, part].long(), position_ids=positions)
    assert_close(
        got.last_hidden_state[real[:, part]], expected[:, part][real[:, part]], **rounding(2000, torch.float32)
    )


def modules_that_cannot(_rank, _size):
    model = torch_encoder()
    x, layer = torch.randn(2, 3, DIM, dtype=torch.float64), MultiheadAttention(DIM, 4, batch_first=True, n_iters=3)
    text = TextEncoder(vocabulary=9, length=5, classes=2, dim=DIM, depth=1, heads=4, hidden=24)
    with sequence_parallel(dist.group.WORLD):
        with pytest.raises(NotImplementedError, match="returns its weights cannot run inside sequence_parallel"):
            layer(x.float(), x.float(), x.float())
        with pytest.raises(NotImplementedError, match="TextEncoder cannot run inside sequence_parallel"):
            text(torch.ones(2, 3, dtype=torch.long))
        with pytest.raises(NotImplementedError, match="Leave watch_attention"), watch_attention(model):
            model(x)


class _Layers(nn.Module):
    """A model with a layer of its own kind for each way in which attention stays as it is."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerDecoderLayer(DIM, 4, 24, batch_first=True, dropout=0.0)
        self.first, self.second = (nn.MultiheadAttention(DIM, 4, batch_first=True) for _ in range(2))
        self.own, self.decoder = MultiheadAttention(DIM, 4, batch_first=True), layer

    def forward(self, x, which):
        if which == "cross":
            return self.decoder.multihead_attn(x, x, x, need_weights=False)[0]
        layer = self.decoder.self_attn if which == "causal" else getattr(self, which)
        return layer(x, x, x, need_weights=False)[0]


def attention_that_stays_softmax(_rank, _size):
    """It is refused, or warned of, in the model that was converted and in copies of it; and as before outside."""
    converted = to_sinkformer(_Layers(), select="first")
    x, plain = torch.randn(2, 3, DIM), _Layers()
    for model in (converted, copy.deepcopy(converted), DistributedDataParallel(copy.deepcopy(converted))):
        with sequence_parallel(dist.group.WORLD):
            for which in ("first", "own"):
                assert model(x, which).shape == x.shape
            for which, reason in (("second", "not selected"), ("causal", "causal: a column sum")):
                with pytest.raises(NotImplementedError, match=rf"stays SoftMax \({reason}.* this rank's tokens alone"):
                    model(x, which)
            with pytest.warns(UserWarning, match=r"decoder.multihead_attn \[MultiheadAttention\] is the model's own"):
                model(x, "cross")
            model(x, "cross")  # once is enough
        model(x, "second")
    with sequence_parallel(dist.group.WORLD):
        plain(x, "second")  # nobody converted anything in it
        to_sinkformer(converted, 1, select="second")
        converted(x, "second")
        with pytest.raises(NotImplementedError, match="stays SoftMax"):
            converted.decoder.self_attn(x, x, x, need_weights=False)  # not by the model's own forward
    calls_sdpa = to_sinkformer(_Calls(), adapter="sdpa", select="")
    with sequence_parallel(dist.group.WORLD), pytest.raises(NotImplementedError, match="its causal calls stay SoftMax"):
        calls_sdpa(x)


class _Calls(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def dtensors(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    whole = [torch.randn(2, 3, 11, 5, dtype=torch.float64) for _ in range(3)]
    expected = sinkhorn_attention(*whole, n_iters=3)
    q, k, v = (distribute_tensor(x, mesh, [Shard(2)]).requires_grad_() for x in whole)
    out = sinkhorn_attention(q, k, v, n_iters=3)
    assert isinstance(out, DTensor)
    assert out.placements == (Shard(2),)
    assert out.shape == expected.shape
    close(out.full_tensor(), expected)
    out.sum().backward()
    assert isinstance(k.grad, DTensor)
    by_heads = [distribute_tensor(x, mesh, [Replicate()]) for x in whole]
    message = r"got query with \(Replicate\(\),\) on a mesh of \(4,\). This would do: query.redistribute\(placements=\["
    with pytest.raises(ValueError, match=message):
        sinkhorn_attention(*by_heads)
    with pytest.raises(TypeError, match="must all be DTensors, or none of them; got DTensor, Tensor, Tensor"):
        sinkhorn_attention(q, k.to_local(), v.to_local())
    assert rank < size


def compiled(_rank, _size):
    """A compiled call breaks the graph, and says why where that is not allowed."""
    query = torch.randn(1, 2, 3, 5)

    def attend(x):
        return sinkhorn_attention(x, x, x, n_iters=3, group=dist.group.WORLD).sin()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_close(torch.compile(attend, backend="eager")(query), attend(query))
        torch._dynamo.reset()  # what was compiled with breaks would be used again
        with pytest.raises(Exception, match="attention in a process group reads what the ranks tell each other"):
            torch.compile(attend, backend="eager", fullgraph=True)(query)


def compiled_model(rank, size):
    """A model that was compiled before runs inside the block, without a warning of torch's about the block's hook."""
    torch.manual_seed(3)
    model = torch_encoder().eval()
    x = torch.randn(2, TOKENS, DIM, dtype=torch.float64)
    expected, part = model(x), x.chunk(size, 1)[rank]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # others of torch's, while it compiles
        warnings.filterwarnings("error", message="Using `torch.compile")
        ours = torch.compile(model, backend="eager")
        close(ours(x), expected)
        with sequence_parallel(dist.group.WORLD):
            close(ours(part), expected.chunk(size, 1)[rank])
        close(ours(x), expected)
    torch._dynamo.reset()


CHECKS = {
    "a converted torch encoder": model_like_one_device(torch_encoder, "gather"),
    "a converted torch encoder, ring": model_like_one_device(torch_encoder, "ring"),
    "our MultiheadAttention": model_like_one_device(own_multihead, "gather"),
    "the encoder of our TextEncoder": model_like_one_device(own_text_encoder, "ring"),
    "the blocks of our ViT": model_like_one_device(own_vit, "gather"),
    "DDP around it": wrapper_like_one_device(DistributedDataParallel),
    "FSDP2 around it": wrapper_like_one_device(fully_shard),
    "modules that cannot": modules_that_cannot,
    "attention that stays SoftMax": attention_that_stays_softmax,
    "DTensors": dtensors,
    "compiled": compiled,
    "a compiled model": compiled_model,
}
SLOW_CHECKS = {"a converted Hugging Face encoder": hugging_face_encoder}
