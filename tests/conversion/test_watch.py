"""`watch_attention`: column sums, entropies and marginal errors."""

import math
import re
import sys
from xml.etree import ElementTree

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from sinkformers import causal_sinkhorn, sinkhorn, to_sinkformer, watch_attention
from sinkformers.conversion.curves import Curve, Curves, _spread, curves_svg
from sinkformers.models import LanguageModel
from tests.conversion.torch_encoders import EXACT, VALID, agree, encoder, run

BALANCED = 2**-10  # column error after 21 iterations, if each of the 10 column steps halves it at least


@pytest.mark.parametrize("padded", [True, False])
def test_watched_column_sums_are_one(padded):
    model = to_sinkformer(encoder(), n_iters=21)
    plain = run(model, padded)
    with watch_attention(model) as watch:
        watched = run(model, padded)
    agree(watched, plain, atol=0.0)
    assert list(watch) == ["layers.0.self_attn", "layers.1.self_attn"]
    valid = VALID if padded else torch.ones_like(VALID)
    for layer in watch.values():
        (seen,) = layer.calls
        assert seen.rows.equal(valid[:, None].expand(3, 2, 7))
        assert seen.columns.equal(seen.rows)
        assert_close(seen.column_sums, seen.columns.double(), atol=BALANCED, rtol=0)
        assert seen.row_error.max() < EXACT
        deviation = (seen.column_sums - 1).abs().masked_fill(~seen.columns, 0).amax(-1)
        assert_close(seen.column_error, deviation, atol=EXACT, rtol=0)
        assert (seen.row_entropy[seen.rows] > 0).all()
        assert (seen.row_entropy <= seen.columns.sum(-1, keepdim=True).double().log() + EXACT).all()
    run(model, padded)
    assert all(len(layer.calls) == 1 for layer in watch.values())
    assert re.search(r"^layers\.1\.self_attn +1 ", str(watch), re.MULTILINE)  # its largest column sum


def test_uniform_attention_has_the_entropy_of_the_valid_tokens():
    module = to_sinkformer(nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64), 3)
    nn.init.zeros_(module.in_proj_weight)
    x = torch.randn(3, 7, 8, dtype=torch.float64)
    with watch_attention(module) as watch:
        module(x, x, x, key_padding_mask=~VALID, need_weights=False)
    (seen,) = watch[""].calls
    expected = torch.where(VALID, VALID.sum(-1, keepdim=True).double().log(), 0.0)
    assert_close(seen.row_entropy, expected[:, None].expand(3, 2, 7), atol=EXACT, rtol=0)


def test_softmax_is_watched_at_one_iteration():
    module = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    x = torch.randn(3, 7, 8, dtype=torch.float64)
    weights = module(x, x, x, average_attn_weights=False)[1]
    with watch_attention(to_sinkformer(module, 1)) as watch:
        module(x, x, x)
    assert_close(watch[""].calls[0].column_sums, weights.sum(-2), atol=EXACT, rtol=0)
    assert_close(watch[""].calls[0].row_entropy, -(weights * weights.log()).sum(-1), atol=EXACT, rtol=0)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("n_iters", [1, 3])
def test_kept_scores_give_the_weights(n_iters, padded):
    model = to_sinkformer(encoder(), n_iters)
    with watch_attention(model, keep_weights=True, keep_scores=True) as watch:
        run(model, padded)
    for layer in watch.values():
        (seen,) = layer.calls
        assert (seen.scores == -math.inf).equal(~(seen.rows[..., None] & seen.columns[..., None, :]))
        assert_close(sinkhorn(seen.scores, n_iters=n_iters), seen.weights, atol=EXACT, rtol=0)
    with watch_attention(model) as watch:
        run(model, padded)
    assert all(layer.calls[0].scores is None for layer in watch.values())


def test_kept_scores_of_rows_in_order():
    model = LanguageModel(vocabulary=19, length=8, dim=12, depth=1, heads=3, hidden=8, n_iters=3)
    with watch_attention(model, keep_weights=True, keep_scores=True) as watch:
        model(torch.arange(7)[None])
    (call,) = next(iter(watch.values())).calls
    assert (call.scores == -math.inf)[0, 0].equal(torch.ones(7, 7).triu(1).bool())
    again = causal_sinkhorn(call.scores, n_iters=3, mask=call.scores > -math.inf)
    assert_close(again, call.weights, atol=1e-5, rtol=0)


def watched_steps(steps):
    model = to_sinkformer(encoder(), 3)
    with watch_attention(model) as watch:
        for _ in range(steps):
            run(model, True)
    return watch


def test_results_are_drawn_over_the_calls():
    matplotlib = pytest.importorskip("matplotlib")
    watch = watched_steps(3)
    figure = watch.plot()
    assert isinstance(figure, matplotlib.figure.Figure)
    assert [axes.get_title() for axes in figure.axes] == [
        "largest column sum",
        "smallest column sum",
        "row error",
        "column error",
    ]
    for axes, number in zip(figure.axes, (0, 1), strict=False):
        for line, layer in zip(axes.get_lines()[:2], watch.values(), strict=True):
            assert list(line.get_xdata()) == [1, 2, 3]
            sums = [call.column_sums[call.columns] for call in layer.calls]
            assert list(line.get_ydata()) == [float(each.min() if number else each.max()) for each in sums]
    assert {text.get_text() for text in figure.legends[0].get_texts()} == set(watch)


def test_notebooks_show_the_curves_without_matplotlib(monkeypatch):
    watch = watched_steps(3)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    shown = watch._repr_html_()
    svg = ElementTree.fromstring(shown[shown.index("<svg") :])
    lines = svg.findall(".//{*}polyline")
    assert [len(line.get("points").split()) for line in lines] == [3] * 8  # two modules in four panels
    assert {"layers.0.self_attn", "layers.1.self_attn"} <= {text.text for text in svg.findall(".//{*}text")}
    with pytest.raises(ModuleNotFoundError, match="needs matplotlib"):
        watch.plot()


def test_nothing_is_drawn_of_modules_that_were_not_called():
    with watch_attention(to_sinkformer(encoder(), 3)) as watch:
        pass
    assert "<svg" not in watch._repr_html_()
    assert "<table" in watch._repr_html_()


def test_long_curves_keep_their_extremes():
    values = [1.0] * 5000
    values[3333] = 7.0
    points = _spread(values)
    assert len(points) <= 400
    assert (3333, 7.0) in points


def test_names_in_curves_are_text():
    curves = [Curves("largest column sum", [Curve("<b>&", [1.0, math.nan, 2.0])], False)]
    svg = curves_svg(curves)
    assert "&lt;b&gt;&amp;" in svg
    assert "nan" not in svg
