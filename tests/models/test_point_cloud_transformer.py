"""The Point Cloud Transformer: a plain computation, its invariances, and the published normalisation."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import sinkformers
from sinkformers.models import PointCloudTransformer
from sinkformers.modules import OffsetAttention
from sinkformers.modules.neighbours import Neighbourhoods
from sinkformers.modules.offset_attention import port_weights
from tests.rounding import rounding

SMALL = {"classes": 7, "dim": 4, "sizes": (23, 11), "neighbours": 5, "layers": 2, "fused": 13, "hidden": 10}
PORT = {"n_iters": 2, "port": True}
EXACT = rounding(4096)  # a few small layers in float64, with sums of up to some ten products: 9e-13
DEEP = rounding(4096, size=10)  # the whole network


def model(**changes):
    made = PointCloudTransformer(**{**SMALL, **changes}).double().eval()
    for part in made.modules():  # statistics other than the initial ones
        if isinstance(part, torch.nn.BatchNorm1d):
            part.running_mean.normal_()
            part.running_var.uniform_(0.5, 2)
    return made


def points(batch=2, n=41):
    return torch.randn(batch, n, 3, dtype=torch.float64)


def plain_port(layer, x):
    """Compute attention as the published code of PCT does, channels first."""
    query, key = layer.key(x), layer.key(x).mT
    attention = torch.softmax(torch.bmm(query, key), -1)
    attention = attention / (1e-9 + attention.sum(dim=1, keepdim=True))
    return torch.bmm(layer.value(x).mT, attention).mT


@pytest.mark.parametrize("n_iters", [1, 2, 3, 5])
def test_an_offset_layer_computes_what_its_docstring_says(n_iters):
    layer, x = OffsetAttention(12, 3, n_iters=n_iters).double().eval(), torch.randn(2, 11, 12).double()
    scores = layer.key(x) @ layer.key(x).mT
    seen = sinkformers.sinkhorn(scores, n_iters=n_iters, backend="reference") @ layer.value(x)
    expected = x + F.relu(layer.norm(layer.out(x - seen)))
    assert_close(layer(x), expected, **EXACT)


def test_the_port_is_two_half_steps_on_the_transposed_scores():
    layer, x = OffsetAttention(12, 3, **PORT).double().eval(), torch.randn(2, 11, 12).double()
    expected = x + F.relu(layer.norm(layer.out(x - plain_port(layer, x))))
    assert_close(layer(x), expected, atol=1e-8, rtol=0)  # the published code adds 1e-9
    scores = torch.randn(2, 11, 11).double()
    columns = scores.exp() / scores.exp().sum(-2, keepdim=True)
    assert_close(port_weights(scores), columns / columns.sum(-1, keepdim=True), **EXACT)
    rows_first = OffsetAttention(12, 3, n_iters=2).double().eval()
    rows_first.load_state_dict(layer.state_dict())
    assert not torch.allclose(layer(x), rows_first(x))


def plain_embedding(stage, x, around):
    """Compute a stage with explicit pairs of a neighbour's offset and its centre."""
    outs = []
    for features, centres, neighbours in zip(x, *around, strict=True):
        centre = features[centres][:, None].expand(-1, neighbours.shape[-1], -1)
        outs.append(torch.cat([features[neighbours] - centre, centre], -1))
    pairs = F.relu(stage.pair_norm(stage.pair(torch.stack(outs))))
    return F.relu(stage.embed[1](stage.embed[0](pairs))).max(-2).values


@pytest.mark.parametrize("options", [{"n_iters": 1}, {"n_iters": 5}, PORT, {"mean_pool": False}], ids=str)
def test_the_network_computes_what_its_docstring_says(options):
    made, x = model(**options), points()
    around = made.neighbourhoods(x)
    h = made.embed(x)
    for stage, own in zip(made.stages, around, strict=True):
        h = plain_embedding(stage, h, own)
    assert h.shape == (2, 11, 16)
    seen, h = [h], made.mix(h)
    for layer in made.attention:
        h = layer(h)
        seen.append(h)
    fused = F.leaky_relu(made.fuse[1](made.fuse[0](torch.cat(seen, -1))), 0.2)
    pooled = [fused.max(1).values] + ([fused.mean(1)] if options.get("mean_pool", True) else [])
    assert_close(made(x), made.head(torch.cat(pooled, -1)), **DEEP)


def test_the_published_widths():
    made = PointCloudTransformer(classes=40)
    assert [tuple(stage.pair.weight.shape) for stage in made.stages] == [(128, 128), (256, 256)]
    assert [tuple(layer.key.weight.shape) for layer in made.attention] == [(64, 256)] * 4
    assert made.fuse[0].weight.shape == (1024, 1280)
    assert [part.out_features for part in made.head if isinstance(part, torch.nn.Linear)] == [512, 256, 40]
    assert [part.p for part in made.head if isinstance(part, torch.nn.Dropout)] == [0.5, 0.5]
    assert (made.sizes, made.neighbours) == ((512, 256), 32)
    assert all(layer.scale == 1.0 for layer in made.attention)


@pytest.mark.parametrize("options", [{"n_iters": 1}, {"n_iters": 5}, PORT], ids=str)
def test_order_does_not_matter(options):
    made, x = model(**options), points()
    assert_close(made(x[:, torch.randperm(41)]), made(x), **DEEP)


def test_neighbourhoods_can_be_computed_before():
    made, x = model(n_iters=3), points()
    kept = [Neighbourhoods(*(numbers.to(torch.int16) for numbers in own)) for own in made.neighbourhoods(x)]
    assert torch.equal(made(x, kept), made(x))
    assert not torch.allclose(made(x, [own._replace(neighbours=own.neighbours.flip(0)) for own in kept]), made(x))


def test_neighbourhoods_depend_on_xyz_alone():
    """Features after the first three, normals or colours, are embedded, but are not coordinates."""
    made, xyz = model(features=5), points()
    clouds = [torch.cat([xyz, 100 * torch.randn(2, 41, 2).double()], -1) for _ in range(2)]
    for stage, other, plain in zip(*map(made.neighbourhoods, (*clouds, xyz)), strict=True):
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(stage, other, plain, strict=True))
    assert not torch.allclose(made(clouds[0]), made(clouds[1]))
    farther = clouds[0] * torch.tensor([1.0, 1.0, 50.0, 1.0, 1.0])
    assert not torch.equal(made.neighbourhoods(farther)[0].neighbours, made.neighbourhoods(clouds[0])[0].neighbours)


def test_all_variants_have_the_same_parameters():
    variants = [model(**options) for options in ({"n_iters": 1}, PORT, {"n_iters": 21})]
    shapes = [[(name, p.shape) for name, p in variant.named_parameters()] for variant in variants]
    assert shapes[0] == shapes[1] == shapes[2]
    variants[2].load_state_dict(variants[1].state_dict())


@pytest.mark.parametrize("first", [{"n_iters": 1}, PORT], ids=str)
def test_a_converted_transformer_equals_a_sinkformer(first):
    built, converted, softmax, x = model(n_iters=5), model(**first), model(n_iters=1), points()
    for other in (converted, softmax):
        other.load_state_dict(built.state_dict())
    before = converted(x)
    with sinkformers.watch_attention(converted):
        assert torch.equal(converted(x), before)
    sinkformers.to_sinkformer(converted, n_iters=5)
    assert list(converted.sinkformer_report.converted) == ["attention.0", "attention.1"]
    assert torch.equal(converted(x), built(x))
    sinkformers.to_transformer(converted)
    assert torch.equal(converted(x), softmax(x))
    assert all(type(layer) is OffsetAttention for layer in converted.attention)


@pytest.mark.parametrize("options", [{"n_iters": 3}, PORT], ids=str)
def test_watched_weights_are_those_of_the_output(options):
    made, x = model(**options), points()
    inputs = []
    made.attention[0].register_forward_pre_hook(lambda _module, args: inputs.append(args[0]))
    with sinkformers.watch_attention(made) as watch:
        made(x)
    key = made.attention[0].key(inputs[0])
    weights = port_weights(key @ key.mT) if options is PORT else sinkformers.sinkhorn(key @ key.mT, n_iters=3)
    (seen,) = watch["attention.0"].calls
    assert_close(seen.column_sums, weights.sum(-2)[:, None], **EXACT)
    assert_close(seen.row_error, torch.zeros(2, 1).double(), **EXACT)


def test_the_model_can_be_trained():
    made, x = model(n_iters=3, dropout=0.0).train(), points(batch=6)
    labels, optimiser = torch.arange(6), torch.optim.Adam(made.parameters(), lr=1e-2)
    for _ in range(100):
        optimiser.zero_grad()
        loss = F.cross_entropy(made(x), labels)
        loss.backward()
        optimiser.step()
    assert loss < 0.1
    assert all(p.grad is not None for p in made.parameters())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: OffsetAttention(12, 3, n_iters=3, port=True), r"n_iters must be 2 and tau 1; got n_iters=3, tau=1.0"),
        (lambda: model(sizes=(4, 3)), r"sizes must fall .* got sizes=\(4, 3\), neighbours=5"),
        (lambda: model(sizes=(11, 23)), r"sizes must fall"),
        (lambda: model()(points(n=22)), r"at least 23 points, for 23 centres with 5 neighbours each; got 22"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
