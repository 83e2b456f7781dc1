"""What converted models, reports and watches show, printed and in a notebook."""

import copy
import pickle
from html.parser import HTMLParser

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sinkformers import set_n_iters, set_tau, to_sinkformer, to_transformer, watch_attention
from sinkformers.conversion.report import Entry, Report
from sinkformers.modules import ISAB, OffsetAttention, SelfAttention


class Attention(nn.Module):
    """Attention with an `extra_repr` of its own."""

    num_heads = 2

    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)

    def extra_repr(self):
        return "width=4"


def bert():
    pytest.importorskip("transformers", reason="the hf extra is not installed")
    from tests.conversion.hugging_face_models import build

    return build("bert")


# A model, the adapter to name, how often the settings are shown, and what precedes them.
CONVERTED = {
    "torch.nn": (lambda: nn.TransformerEncoderLayer(8, 2, 16), None, 1, "embed_dim=8, num_heads=2, "),
    "own": (lambda: SelfAttention(8, 2, n_iters=1), None, 1, "num_heads=2, "),
    "own, two blocks": (lambda: ISAB(3, 8, 2, 4, n_iters=1), None, 2, "num_heads=2, "),
    "own, offset": (lambda: OffsetAttention(8, 2, n_iters=1), None, 1, ""),
    "intercepted": (lambda: nn.Sequential(Attention()), "sdpa", 1, "width=4, "),
    "Hugging Face": (bert, None, 1, ""),  # `ModuleList` shows equal layers once
}


@pytest.mark.parametrize("name", CONVERTED)
def test_converted_modules_show_their_settings(name):
    build, adapter, count, before = CONVERTED[name]
    model = build()
    original = repr(model)
    to_sinkformer(model, 7, tau=0.3, adapter=adapter)
    assert repr(model).count(f"{before}n_iters=7, tau=0.3") == count
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert repr(clone) == repr(model)
    set_n_iters(model, 9)
    assert repr(model).count("n_iters=9, tau=0.3") == count
    set_tau(model, 0.5)
    assert repr(model).count("n_iters=9, tau=0.5") == count
    to_sinkformer(model, 5, tau="learned", allow_one_way_mask=True, adapter=adapter)
    with torch.no_grad():
        assert repr(model).count("n_iters=5, tau=learned") == count
    if name in ("torch.nn", "intercepted", "Hugging Face"):
        assert repr(model).count("allow_one_way_mask=True") == count
    assert repr(to_transformer(model)) == original


def test_modules_of_timm_show_their_settings(monkeypatch):
    """They are recognised by the name of their package, and intercepted."""
    monkeypatch.setattr(Attention, "__module__", "timm.layers.attention")
    model = to_sinkformer(nn.Sequential(Attention()), 7, tau=0.3)
    assert [entry.adapter for entry in model.sinkformer_report.entries] == ["timm"]
    assert "width=4, n_iters=7, tau=0.3" in repr(model)


def test_a_restored_hugging_face_module_keeps_nothing():
    model = bert()
    attributes = [set(module.__dict__) for module in model.modules()]
    to_transformer(to_sinkformer(model, 7))
    assert [set(module.__dict__) for module in model.modules()] == attributes


REPORT = Report(
    [
        Entry("a.<b>", "Attention", "sdpa", "", "a.<b>.sinkhorn_tau", {"attention call": 2}),
        Entry("", "Causal&Co", None, 'causal: a "reason"'),
    ]
)


def test_a_report_reads_the_same_wherever_it_is_shown():
    assert str(REPORT) == (
        "1 of 2 attention modules converted\n"
        "  a.<b> [Attention] Sinkhorn (sdpa), learns a.<b>.sinkhorn_tau; 2 × attention call\n"
        '  (the model itself) [Causal&Co] unchanged: causal: a "reason"'
    )
    assert repr(REPORT) == str(REPORT)


class Parser(HTMLParser):
    """The tags and the texts of a page."""

    def __init__(self):
        super().__init__()
        self.tags, self.texts = [], []

    def handle_starttag(self, tag, attrs):
        assert not attrs
        self.tags.append(tag)

    def handle_data(self, data):
        self.texts.append(data)


def cells(page):
    """Return the texts of a table that has no other tags than its own."""
    parser = Parser()
    parser.feed(page)
    assert set(parser.tags) <= {"table", "caption", "thead", "tbody", "tr", "th", "td"}
    return parser.texts


def test_a_report_is_an_escaped_table_in_a_notebook():
    texts = cells(REPORT._repr_html_())
    assert texts[0] == "1 of 2 attention modules converted"
    assert texts[4:] == [
        *("a.<b>", "Attention", "Sinkhorn (sdpa), learns a.<b>.sinkhorn_tau; 2 × attention call"),
        *("(the model itself)", "Causal&Co", 'unchanged: causal: a "reason"'),
    ]


def watched():
    """Two modules with uniform attention over 5 valid of 7 tokens; the second is not called."""
    model = nn.ModuleDict({name: nn.MultiheadAttention(8, 2, batch_first=True) for name in ("first", "<second>")})
    nn.init.zeros_(model["first"].in_proj_weight)
    x, padding = torch.randn(3, 7, 8), (torch.arange(7) >= 5).expand(3, 7)
    with watch_attention(to_sinkformer(model, 3)) as watch:
        model["first"](x, x, x, key_padding_mask=padding)
    return watch


def test_a_watch_is_a_table():
    watch = watched()
    lines = str(watch).splitlines()
    assert repr(watch) == str(watch)
    assert len({len(line.rstrip()) for line in lines[:2]}) == 1  # aligned to the right
    assert lines[0].split("  ")[0] == "module"
    assert lines[1].split()[:4] == ["first", "1", "1", "1.61"]  # log 5
    assert all(float(error) < 7 * torch.finfo(torch.float32).eps for error in lines[1].split()[4:])  # sums of 7
    assert lines[2].split() == ["<second>", "not", "called"]


def test_a_watch_is_an_escaped_table_in_a_notebook():
    watch = watched()
    shown, _, curves = watch._repr_html_().partition("<svg")
    texts = cells(shown)
    assert "&lt;second&gt;" in curves
    assert "<second>" not in curves
    assert texts[1:7] == [
        "module",
        "largest column sum",
        "smallest column sum",
        "mean row entropy",
        "row error",
        "column error",
    ]
    assert texts[7:11] == ["first", "1", "1", "1.61"]
    assert texts[13:] == ["<second>", "not called"]


def test_watched_modules_and_calls_show_statistics_instead_of_tensors():
    watch = watched()
    shown = repr(watch["first"].calls[0])
    assert shown.startswith("Call(weights (3, 2, 7, 7): column sums 1 to 1, mean row entropy 1.61, row error ")
    assert repr(watch["first"]) == f"WatchedModule(calls=[{shown}])"
    assert repr(watch["<second>"]) == "WatchedModule(calls=[])"


def test_a_call_whose_tokens_are_all_masked_is_shown_too():
    layer = to_sinkformer(nn.MultiheadAttention(8, 2, batch_first=True), 3)
    x = torch.randn(1, 3, 8)
    with watch_attention(layer) as watch:
        layer(x, x, x, key_padding_mask=torch.ones(1, 3, dtype=torch.bool))
    assert "(the model itself)" in str(watch)
    assert "all masked" in str(watch)
