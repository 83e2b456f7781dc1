"""`view_attention`: the scores are those of the model, the model stays as it is, and the page is safe."""

import base64
import copy
import hashlib
import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import sinkformers
from sinkformers import sinkhorn, to_sinkformer, view_attention, watch_attention
from sinkformers.models import LanguageModel, ViT
from sinkformers.modules import OffsetAttention
from sinkformers.viewing import page
from sinkformers.viewing.collect import collect
from tests.viewing import javascript

DOCUMENTED = Path(__file__).parents[2] / "docs" / "assets" / "attention.html"
HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--",
    "\u202eabc\u2066",
    "👩‍👩‍👧‍👦",
    "x" * 10000,
    "\ud800",
    "\x00\x1b",
    "&amp;\u2028",
    "",
]


def encoder(layers=2, **options):
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(12, 3, 16, batch_first=True, dtype=torch.float64, **options)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def data_of(html):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[1])


def found_in(model, inputs, **options):
    return collect(model, inputs, **({"example": 0, "layers": None, "heads": None} | options))


def error_of(head):
    """Return how far weights may be off: each score by half a step, and so each weight by a step, relative to it."""
    return 2 * head.codes.step + 1e-12


@pytest.mark.parametrize("n_iters", [None, 3, math.inf])
def test_scores_give_the_weights_of_the_model(n_iters):
    model = encoder().eval()
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    watched = copy.deepcopy(model)
    to_sinkformer(watched, 1 if n_iters is None else n_iters)
    if n_iters is not None:
        to_sinkformer(model, n_iters)
    with watch_attention(watched, keep_weights=True) as watch:
        watched(x)
    layers = found_in(model, x, example=1).layers
    assert [layer.name for layer in layers] == list(watch) == ["layers.0.self_attn", "layers.1.self_attn"]
    for layer, seen in zip(layers, watch.values(), strict=True):
        assert layer.definition == "plain"
        for head in layer.heads:
            assert (head.n_iters, head.tau) == (n_iters or 1, 1.0)
            weights = sinkhorn(head.codes.scores(), n_iters=head.n_iters)
            # The limit is found to a tolerance of 1e-3 by the model, and from the codes again.
            slack = 2e-3 if n_iters == math.inf else 10 * error_of(head)
            assert_close(weights, seen.calls[0].weights[1, head.number], atol=slack, rtol=0)


def test_padding_is_left_out():
    model, x = encoder().eval(), torch.randn(2, 7, 12, dtype=torch.float64)
    padding = torch.arange(7) >= torch.tensor([[7], [4]])
    padded = found_in(model, {"src": x, "src_key_padding_mask": padding}, example=1).layers
    alone = found_in(model, x[1:, :4]).layers
    for one, other in zip(padded, alone, strict=True):
        assert one.rows == one.columns == [0, 1, 2, 3]
        assert (one.shape, other.shape) == ((7, 7), (4, 4))
        for a, b in zip(one.heads, other.heads, strict=True):
            assert_close(a.codes.scores(), b.codes.scores(), atol=2 * b.codes.step, rtol=0)


def test_the_model_stays_as_it_is():
    model = encoder(dropout=0.3).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kinds = [type(module) for module in model.modules()]
    attributes = [sorted(module.__dict__) for module in model.modules()]
    random = torch.get_rng_state()
    view_attention(model, torch.randn(1, 5, 12, dtype=torch.float64))
    torch.set_rng_state(random)
    assert all(module.training for module in model.modules())
    assert kinds == [type(module) for module in model.modules()]
    assert attributes == [sorted(module.__dict__) for module in model.modules()]
    assert not hasattr(model, "sinkformer_report")
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


def test_our_own_layers_are_shown_with_their_settings():
    layer = sinkformers.MultiheadAttention(12, 3, batch_first=True, n_iters=5, tau=0.5)
    x = torch.randn(1, 7, 12)
    (shown,) = found_in(layer, (x, x, x)).layers
    assert shown.name == "MultiheadAttention"
    assert [(head.n_iters, head.tau) for head in shown.heads] == [(5, 0.5)] * 3
    weights = layer(x, x, x, average_attn_weights=False)[1][0]
    for head in shown.heads:
        again = sinkhorn(head.codes.scores(), n_iters=5, tau=0.5).float()
        assert_close(again, weights[head.number].detach(), atol=10 * error_of(head) + 1e-5, rtol=0)
    assert type(layer) is sinkformers.MultiheadAttention


@pytest.mark.parametrize(("causal", "n_iters"), [("streaming", 3), ("streaming", 1)])
def test_causal_models_are_shown_in_order(causal, n_iters):
    model = LanguageModel(vocabulary=19, length=16, dim=12, depth=2, heads=3, hidden=16, causal=causal, n_iters=n_iters)
    layers = found_in(model, torch.arange(7)[None]).layers
    assert [layer.definition for layer in layers] == ["streaming"] * 2
    for head in layers[0].heads:
        scores = head.codes.scores()
        assert scores[0, 0] == 0
        assert (scores == -math.inf).equal(torch.ones(7, 7).triu(1).bool())
        assert head.n_iters == n_iters


def test_a_compiled_model_is_run_as_it_is_written():
    x = torch.randn(1, 5, 12, dtype=torch.float64)
    model = encoder(1).eval()
    (layer,) = found_in(torch.compile(model, backend="eager"), x).layers
    (plain,) = found_in(model, x).layers
    for one, other in zip(layer.heads, plain.heads, strict=True):
        assert one.codes.codes.equal(other.codes.codes)


def test_prefix_attention_is_not_shown():
    model = LanguageModel(vocabulary=19, length=16, dim=12, depth=1, heads=3, hidden=16, causal="prefix", n_iters=3)
    with pytest.raises(ValueError, match="prefix definition"):
        view_attention(model, torch.arange(7)[None])


def test_learned_tau_is_shown_for_each_head():
    model = to_sinkformer(encoder(1), tau="learned")
    with torch.no_grad():
        model.layers[0].self_attn.sinkhorn_tau.copy_(torch.tensor([-1.0, 0.0, 1.0]))
    (layer,) = found_in(model, torch.randn(1, 5, 12, dtype=torch.float64)).layers
    assert [head.tau for head in layer.heads] == pytest.approx([1 / (1 + math.e), 0.5, math.e / (1 + math.e)])


def test_a_layer_with_its_own_order_is_shown_as_it_is():
    layer = OffsetAttention(12, 3, n_iters=2, port=True)
    x = torch.randn(1, 7, 12)
    (shown,) = found_in(layer, x).layers
    assert shown.definition == "fixed"
    scores = (layer.key(x) @ layer.key(x).mT)[0].detach().double()
    weights = scores.softmax(-2)  # its columns, then its rows
    expected = weights / weights.sum(-1, keepdim=True)
    (head,) = shown.heads
    assert_close(head.codes.scores().softmax(-1), expected, atol=2e-6 + error_of(head), rtol=0)


def test_layers_and_heads_are_chosen_by_number():
    x = torch.randn(1, 5, 12, dtype=torch.float64)
    chosen = found_in(encoder(3), x, layers=[-1, 0], heads=[2, -3]).layers
    assert [(layer.number, [head.number for head in layer.heads]) for layer in chosen] == [(0, [0, 2]), (2, [0, 2])]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [7]}, "layers must be numbers from 0 to 1; got"),
        ({"layers": "0"}, "layers must be a list"),
        ({"heads": []}, "heads must name one"),
        ({"heads": [5]}, "none of them has one of the heads"),
        ({"tokens": ["a"]}, r"tokens must have an entry for every token .*: 5; got 1"),
        ({"tokens": "abcde"}, "tokens must be a list of texts"),
        ({"tokens": [1, 2, 3, 4, 5]}, "tokens must be texts; got 1"),
        ({"example": 1}, "example must be from 0 to 0"),
        ({"points": torch.zeros(3, 3)}, "points must have an entry"),
        ({"points": torch.full((5, 3), math.nan)}, "points must be finite"),
        ({"image": torch.zeros(2, 4, 4)}, "1, 3 or 4 channels"),
        ({"image": torch.zeros(1, 4, 4), "points": torch.zeros(5, 3)}, "not both"),
        ({"grid": (1, 5)}, "grid must come with an image"),
        ({"image": torch.zeros(1, 4, 9), "grid": (3, 3)}, "as many patches as there are tokens"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises((ValueError, TypeError, IndexError), match=message):
        view_attention(encoder(), torch.randn(1, 5, 12, dtype=torch.float64), **options)


def test_a_model_without_attention_is_refused():
    with pytest.raises(ValueError, match="No attention was found"):
        view_attention(nn.Linear(2, 2), torch.randn(1, 2))


def test_an_empty_input_is_refused():
    layer = to_sinkformer(nn.MultiheadAttention(12, 3, batch_first=True))
    with pytest.raises(ValueError, match="all of their tokens are masked"):
        view_attention(layer, (torch.randn(1, 0, 12),) * 3)


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="inputs must have an example; the batch is empty"):
        view_attention(encoder(), torch.randn(0, 3, 12, dtype=torch.float64))


def test_names_and_titles_with_halves_of_characters_are_saved(tmp_path):
    view = view_attention(
        encoder(), torch.randn(1, 3, 12, dtype=torch.float64), name="half \ud800", title="\udcff here"
    )
    text = view.save(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<title>? here</title>" in text
    assert view.models[0].name == "half ?"


def test_scores_that_are_not_finite_are_named():
    model = encoder(1)
    with torch.no_grad():
        model.layers[0].self_attn.in_proj_weight[0] = math.nan
    found = found_in(model, torch.randn(1, 5, 12, dtype=torch.float64))
    assert [head.number for head in found.layers[0].heads] == [1, 2]
    assert found.notes == ["head 0 of layers.0.self_attn: its scores are not finite"]
    with pytest.raises(ValueError, match=r"were found, but head 0 of .* its scores are not finite"):
        found_in(model, torch.randn(1, 5, 12, dtype=torch.float64), heads=[0])


def test_the_page_reads_what_was_written():
    view = view_attention(encoder(), torch.randn(1, 5, 12, dtype=torch.float64))
    answer = """
    import { readData } from "./data.js";
    const read = (layer) => layer.heads.map((head) => [...head.scores()]);
    const answer = (source) => readData(source).models[0].layers.map(read);
    """
    found = javascript.run(answer, json.dumps(data_of(view.to_html())))
    for layer, read in zip(view.models[0].layers, found, strict=True):
        for head, scores in zip(layer.heads, read, strict=True):
            assert_close(torch.tensor(scores, dtype=torch.float64).view(5, 5), head.codes.scores(), atol=1e-12, rtol=0)


def test_tokens_stay_text():
    view = view_attention(
        encoder(), torch.randn(1, 9, 12, dtype=torch.float64), tokens=HOSTILE, title=HOSTILE[0], name=HOSTILE[0]
    )
    html = view.to_html()
    assert len(re.findall("<script", html, re.IGNORECASE)) == len(re.findall("</script", html, re.IGNORECASE)) == 2
    assert "alert(1)</" not in html
    data = data_of(html)
    assert data["tokens"][:4] == HOSTILE[:4]
    assert data["tokens"][5] == "?"
    assert max(map(len, data["tokens"])) == 80
    assert "<iframe srcdoc=" in view._repr_html_()
    assert "<script" not in view._repr_html_()


def test_the_page_allows_its_own_scripts_only():
    html = view_attention(encoder(), torch.randn(1, 5, 12, dtype=torch.float64)).to_html()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)[1]
    assert "default-src 'none'" in policy
    for tag, kind in (('<script type="module">', "script"), ("<style>", "style")):
        source = re.search(f"{tag}(.*?)</{kind}>", html, re.DOTALL)[1]
        assert f"{kind}-src 'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'" in policy
    addresses = set(re.findall(r"https?://[^\s\"'`)]+", html))
    assert addresses == {"http://www.w3.org/2000/svg", "https://bottosson.github.io/posts/oklab/"}


def test_equal_views_give_equal_pages():
    x = torch.randn(1, 5, 12, dtype=torch.float64)
    assert view_attention(encoder(), x).to_html() == view_attention(encoder(), x).to_html()


def test_large_views_have_fewer_bits_and_then_fewer_heads(monkeypatch):
    view = view_attention(encoder(), torch.randn(1, 5, 12, dtype=torch.float64))
    whole = {"heads": 6, "bytes": 6 * 25}
    for most, bits, left in ((2 * whole["bytes"], 16, 0), (whole["bytes"], 8, 0), (4 * 25, 8, 2), (1, 8, 5)):
        monkeypatch.setattr(page, "MOST_BYTES", most)
        data = page.payload(view)
        heads = [(layer["number"], head["number"]) for layer in data["models"][0]["layers"] for head in layer["heads"]]
        assert (data["bits"], data["left_out"], len(heads)) == (bits, left, whole["heads"] - left)
        assert len(base64.b64decode(data["scores"])) == len(heads) * 25 * bits // 8
    uneven = {(layer.number, head.number): head.unevenness for layer in view.models[0].layers for head in layer.heads}
    assert heads == [max(uneven, key=uneven.get)]


def test_twelve_layers_of_twelve_heads_fit_into_twenty_megabytes():
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(24, 12, 8, batch_first=True), 12, enable_nested_tensor=False
    )
    html = view_attention(model, torch.randn(1, 128, 24)).to_html()
    assert len(html.encode()) < 20e6
    assert data_of(html)["bits"] == 16
    assert data_of(html)["left_out"] == 0


def test_images_and_their_patches():
    model = ViT(image=12, patch=4, channels=1, classes=2, dim=12, depth=1, heads=1, mlp_dim=8, readout="cls")
    image = torch.rand(1, 1, 12, 12)
    view = view_attention(model, image, image=image[0])
    assert view.subject["grid"] == [3, 3]
    assert view.subject["first"] == 1
    assert view.tokens == ["CLS", "1,1", "1,2", "1,3", "2,1", "2,2", "2,3", "3,1", "3,2", "3,3"]
    pixels = torch.frombuffer(bytearray(base64.b64decode(view.subject["pixels"])), dtype=torch.uint8).view(12, 12, 3)
    assert_close(pixels[..., 1] / 255, image[0, 0], atol=0.5 / 255 + 1e-6, rtol=0)


def test_two_models_side_by_side():
    x = torch.randn(1, 5, 12, dtype=torch.float64)
    first = view_attention(encoder(), x, tokens=list("abcde"))
    both = first.beside(view_attention(to_sinkformer(encoder(), 3), x, tokens=list("abcde")))
    assert [model.name for model in both.models] == ["TransformerEncoder", "TransformerEncoder (2)"]
    counts = [model["layers"][0]["heads"][0]["n_iters"] for model in data_of(both.to_html())["models"]]
    assert counts == [1, 3]
    with pytest.raises(ValueError, match="same tokens"):
        first.beside(view_attention(encoder(), x))
    with pytest.raises(ValueError, match="two models at most"):
        both.beside(first)


@pytest.mark.skipif(not DOCUMENTED.exists(), reason="the page is in the repository, not in the source distribution")
def test_the_page_in_the_documentation_is_up_to_date():
    """docs/viewer.md has the command that writes it."""
    html = DOCUMENTED.read_text(encoding="utf-8")
    assert page.bundle() in html
    assert (javascript.ASSETS / "style.css").read_text(encoding="utf-8") in html


def test_names_of_all_scripts_differ():
    """They share one scope on the page."""
    names = re.findall(r"^(?:export )?(?:async )?(?:function|const|let|class) (\w+)", page.bundle(), re.MULTILINE)
    assert len(names) > 50
    assert len(names) == len(set(names))
    assert not re.search(r"^(import|export) ", page.bundle(), re.MULTILINE)
    assert {f"{file.name}" for file in javascript.ASSETS.glob("*.js")} == set(page.SCRIPTS)
