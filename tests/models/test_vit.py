"""The ViT: a plain computation, conversion, and equal parameters for SoftMax and Sinkhorn."""

import copy

import pytest
import torch
import torch.nn.functional as F

import sinkformers
from sinkformers.models import ViT
from sinkformers.modules import SelfAttention
from tests.rounding import rounding

SMALL = {
    "image": 15,
    "patch": 5,
    "channels": 2,
    "classes": 7,
    "dim": 12,
    "depth": 2,
    "heads": 3,
    "head_dim": 5,
    "mlp_dim": 11,
}


EXACT = rounding(4096)  # a few small layers in float64, with sums of up to some ten products: 9e-13


def vit(**changes):
    return ViT(**{**SMALL, **changes}).double()


def plain_patches(images, patch):
    """Cut the patches one after the other, row by row."""
    n = images.shape[-1] // patch
    cut = [images[..., i * patch : (i + 1) * patch, j * patch : (j + 1) * patch] for i in range(n) for j in range(n)]
    return torch.stack([part.flatten(1) for part in cut], 1)


def plain_attention(layer, x, n_iters):
    query, key, value = layer.project(x).chunk(3, -1)
    heads = [[part[:, :, h * 5 : (h + 1) * 5] for part in (query, key, value)] for h in range(3)]
    outs = [sinkformers.sinkhorn(q @ k.mT / 5**0.5, n_iters=n_iters, backend="reference") @ v for q, k, v in heads]
    return layer.out(torch.cat(outs, -1))


@pytest.mark.parametrize("readout", ["cls", "mean"])
@pytest.mark.parametrize("n_iters", [1, 3])
def test_the_network_computes_what_its_docstring_says(readout, n_iters):
    model, images = vit(readout=readout, n_iters=n_iters), torch.randn(4, 2, 15, 15, dtype=torch.float64)
    x = model.embed(plain_patches(images, 5))
    if readout == "cls":
        x = torch.cat([model.cls.expand(4, -1, -1), x], 1)
    x = x + model.positions
    for block in model.blocks:
        x = x + plain_attention(block.attention, block.attention_norm(x), n_iters)
        x = x + block.mlp[4](F.gelu(block.mlp[1](block.mlp[0](x))))
    expected = model.head(x[:, 0] if readout == "cls" else x.mean(1))
    torch.testing.assert_close(model(images), expected, **EXACT)


def test_softmax_and_sinkhorn_have_the_same_parameters():
    transformer, sinkformer = vit(n_iters=1), vit(n_iters=5)
    shapes = [[(name, p.shape) for name, p in model.named_parameters()] for model in (transformer, sinkformer)]
    assert shapes[0] == shapes[1]
    sinkformer.load_state_dict(transformer.state_dict())


def test_a_converted_transformer_equals_a_sinkformer():
    images = torch.randn(3, 2, 15, 15, dtype=torch.float64)
    built = vit(n_iters=5)
    converted = vit(n_iters=1)
    converted.load_state_dict(built.state_dict())
    assert not torch.allclose(converted(images), built(images))
    sinkformers.to_sinkformer(converted, n_iters=5)
    assert torch.equal(converted(images), built(images))
    sinkformers.to_transformer(converted)
    assert all(layer.n_iters == 1 for layer in converted.modules() if isinstance(layer, SelfAttention))


def test_a_model_built_as_a_sinkformer_can_be_watched_and_changed():
    model, images = vit(n_iters=21, readout="mean"), torch.randn(3, 2, 15, 15, dtype=torch.float64)
    before = model(images)
    with sinkformers.watch_attention(model) as watch:
        assert torch.equal(model(images), before)
    assert list(watch) == ["blocks.0.attention", "blocks.1.attention"]
    for layer in watch.values():  # initial scores are small: each of 10 column steps divides the error by 4 at least
        torch.testing.assert_close(
            layer.calls[0].column_sums, torch.ones(3, 3, 9, dtype=torch.float64), atol=4.0**-10, rtol=0
        )
    sinkformers.set_n_iters(model, 1)
    single = vit(n_iters=1, readout="mean")
    single.load_state_dict(model.state_dict())
    assert torch.equal(model(images), single(images))
    assert torch.equal(copy.deepcopy(model)(images), model(images))


def test_tied_queries_and_keys_make_symmetric_scores_and_fewer_parameters():
    tied = SelfAttention(8, 2, tie_qk=True, n_iters=1)
    assert tied.project.out_features == 16
    x = torch.randn(2, 6, 8)
    query, value = tied.project(x).chunk(2, -1)
    heads = query.unflatten(-1, (2, 4)).transpose(1, 2), value.unflatten(-1, (2, 4)).transpose(1, 2)
    expected = F.scaled_dot_product_attention(heads[0], heads[0], heads[1]).transpose(1, 2).flatten(2)
    torch.testing.assert_close(tied(x), tied.out(expected))


def test_without_a_feed_forward_network_a_block_is_attention_alone():
    model = vit(mlp_dim=0, depth=1)
    assert model.blocks[0].mlp is None
    assert not [name for name, _ in model.named_parameters() if "mlp" in name]


def test_padding_does_not_matter():
    layer, x = SelfAttention(8, 2, n_iters=5).double(), torch.randn(2, 7, 8, dtype=torch.float64)
    valid = torch.arange(7) < torch.tensor([[7], [4]])
    out = layer(x, mask=valid)
    torch.testing.assert_close(out[1, :4], layer(x[1:, :4])[0], **EXACT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch": 4}, r"patch must divide the image's side; got image=15 and patch=4"),
        ({"readout": "max"}, r'readout must be "cls" or "mean"; got \'max\''),
        (
            {"head_dim": None, "heads": 5},
            r"num_heads must divide dim, or head_dim must be given; got num_heads=5, dim=12",
        ),
    ],
)
def test_wrong_arguments_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        vit(**changes)


def test_images_of_another_size_are_refused():
    with pytest.raises(ValueError, match=r"images must be 15×15; got \(1, 2, 20, 20\)"):
        vit()(torch.randn(1, 2, 20, 20, dtype=torch.float64))
