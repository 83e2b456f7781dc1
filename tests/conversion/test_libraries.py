"""Models of timm, vit-pytorch and x-transformers, in a separate environment: `make test-timm`."""

import copy
import importlib.util
import pickle

import pytest
import torch
from torch.testing import assert_close

from sinkformers import set_n_iters, to_sinkformer, to_transformer, watch_attention

if any(importlib.util.find_spec(name) is None for name in ("timm", "vit_pytorch", "x_transformers")):
    pytest.skip("the timm extra is not installed: make test-timm", allow_module_level=True)

from tests.conversion.timm_environment import timm, vit_pytorch, x_transformers

pytestmark = pytest.mark.timm

EXACT = 1e-10  # float64; some 10⁴ roundings on values up to 10²
BALANCED = 2**-10  # column error after 21 iterations, if each of the 10 column steps halves it at least
VIT = {"img_size": 12, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
WINDOWS = {"img_size": 16, "patch_size": 2, "embed_dim": 12, "depths": (2, 2), "num_heads": (3, 3), "window_size": 4}
PATCHES = {"image_size": 12, "patch_size": 4, "num_classes": 5, "dim": 24, "depth": 2, "heads": 3, "mlp_dim": 32}
HEADS = {"dim": 24, "depth": 2, "heads": 3, "attn_dim_head": 8}


def text(**options):
    encoder = x_transformers.Encoder(**HEADS, **options)
    return x_transformers.TransformerWrapper(num_tokens=53, max_seq_len=16, attn_layers=encoder)


BUILDERS = {
    "timm vit": lambda: timm.models.VisionTransformer(**VIT),
    "timm deit": lambda: timm.models.VisionTransformerDistilled(**VIT),
    "timm beit": lambda: timm.models.Beit(**VIT, use_rel_pos_bias=True),
    "timm eva": lambda: timm.models.Eva(**VIT),
    "timm swin": lambda: timm.models.SwinTransformer(**WINDOWS, num_classes=5),
    "vit-pytorch": lambda: vit_pytorch.ViT(**PATCHES, dim_head=8),
    "vit-pytorch simple": lambda: vit_pytorch.SimpleViT(**PATCHES, dim_head=8),
    "x-transformers": text,
    "x-transformers flash": lambda: text(attn_flash=True),
    "x-transformers alibi": lambda: text(alibi_pos_bias=True),
}
VALID = torch.arange(11) < torch.tensor([[11], [7]])


def build(name, fused=True):
    torch.manual_seed(0)
    model = BUILDERS[name]()
    for key, parameter in model.named_parameters():
        if parameter.dim() > 1 and "pos" not in key:
            torch.nn.init.normal_(parameter, std=0.2)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    return model.double()


def output(name, model, padding=None):
    generator = torch.Generator().manual_seed(3)
    if name.startswith("x-transformers"):
        ids = torch.randint(1, 53, (2, 11), generator=generator)
        ids = ids if padding is None else torch.where(VALID, ids, padding)
        return model(ids, mask=VALID)[VALID]
    size = 16 if "swin" in name else 12
    return model(torch.randn(2, 3, size, size, generator=generator, dtype=torch.float64))


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_one_iteration_is_the_original(name, training, fused):
    model = build(name, fused).train(training)
    torch.manual_seed(5)
    before = output(name, model)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    expected = torch.autograd.grad(before.square().sum(), learned, materialize_grads=True)
    to_sinkformer(model, n_iters=1)
    torch.manual_seed(5)
    after = output(name, model)
    # x-transformers asks for SoftMax in float32
    tolerance = 1e-5 if name in ("x-transformers", "x-transformers alibi") else EXACT
    assert_close(after, before, atol=tolerance, rtol=0)
    grads = torch.autograd.grad(after.square().sum(), learned, materialize_grads=True)
    for got, grad in zip(grads, expected, strict=True):
        assert_close(got, grad, atol=10 * tolerance * max(1.0, grad.abs().max().item()), rtol=0)


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("fused", [True, False])
def test_many_iterations_balance_the_columns(name, fused):
    model = build(name, fused).eval()
    softmax = output(name, model)
    to_sinkformer(model, n_iters=21)
    with watch_attention(model) as watch:
        out = output(name, model)
    assert (out - softmax).abs().max() > 1e-3
    assert len(watch) == (4 if "swin" in name else 2)
    for layer in watch.values():
        (seen,) = layer.calls
        if name.startswith("x-transformers"):
            assert seen.rows.equal(VALID[:, None].expand(2, 3, 11))
            assert seen.columns.equal(seen.rows)
        assert_close(seen.column_sums.double(), seen.columns.double(), atol=BALANCED, rtol=0)
    adapters = {entry.adapter for entry in model.sinkformer_report.entries}
    assert adapters == {name.split()[0]}


@pytest.mark.parametrize("name", [name for name in BUILDERS if name.startswith("x-transformers")])
def test_padding_changes_no_output(name):
    model = to_sinkformer(build(name), 5).eval()
    assert output(name, model, padding=7).equal(output(name, model, padding=3))


@pytest.mark.parametrize("name", BUILDERS)
def test_back_and_copied(name):
    model = build(name).eval()
    before, types = output(name, model), [type(module) for module in model.modules()]
    keys = list(model.state_dict())
    to_sinkformer(model, 5, tau="learned")
    out = output(name, model)
    assert len(model.state_dict()) == len(keys) + len(model.sinkformer_report.parameters)
    assert output(name, copy.deepcopy(model)).equal(out)
    if not name.startswith("x-transformers"):  # its models have local functions, which cannot be pickled
        assert output(name, pickle.loads(pickle.dumps(model))).equal(out)
    set_n_iters(model, 1)
    to_transformer(model)
    assert [type(module) for module in model.modules()] == types
    assert list(model.state_dict()) == keys
    assert output(name, model).equal(before)


def test_pooling_channels_and_talking_heads_are_reported():
    pooled = to_sinkformer(timm.models.VisionTransformer(**VIT, global_pool="map", class_token=False))
    assert "mean pooling" in pooled.sinkformer_report.kept["attn_pool"]
    with pytest.raises(ValueError, match=r"(?s)XCA.*attends over channels.*ClassAttn.*mean pooling"):
        to_sinkformer(timm.models.Xcit(**{**VIT, "img_size": 32, "patch_size": 16}))
    with pytest.raises(ValueError, match=r"(?s)TalkingHeadAttn"):
        to_sinkformer(timm.models.Cait(**VIT))


def test_decoders_of_x_transformers_stay_softmax():
    sizes = {"num_tokens": 53, "depth": 2, "heads": 3, "max_seq_len": 16}
    sides = {f"{side}_{key}": value for side in ("enc", "dec") for key, value in sizes.items()}
    report = to_sinkformer(x_transformers.XTransformer(dim=24, **sides)).sinkformer_report
    assert len(report.converted) == 2
    assert (
        sorted(reason.split(":")[0] for reason in report.kept.values())
        == ["causal"] * 2 + ["cross-attention of a decoder"] * 2
    )
    decoder = x_transformers.Decoder(**HEADS)
    with pytest.raises(ValueError, match="causal"):
        to_sinkformer(x_transformers.TransformerWrapper(num_tokens=53, max_seq_len=16, attn_layers=decoder))
    with pytest.raises(ValueError, match="no SoftMax over keys"):
        to_sinkformer(text(attn_sigmoid=True))


@pytest.mark.parametrize("name", ["timm vit", "vit-pytorch simple"])
def test_compiled(name):
    model = to_sinkformer(build(name), 5).eval()
    compiled = torch.compile(model, backend="aot_eager")
    assert_close(output(name, compiled), output(name, model), atol=EXACT, rtol=0)
