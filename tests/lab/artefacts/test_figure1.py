import pytest
import torch
from torch.testing import assert_close

from sinkformers.lab.artefacts import figure1


@pytest.fixture(scope="module")
def result():
    return figure1.run()


def test_one_interaction_dominates_k0(result):
    assert result.unnormalised.max() > 0.9 * result.unnormalised.sum()
    assert result.dominance == pytest.approx(float(result.unnormalised.max() / result.unnormalised.sum()))


def test_softmax_ignores_one_cluster(result):
    received = result.softmax.sum(dim=0)
    assert received[result.cluster == 0].max() < 0.01
    assert received[result.cluster == 1].sum() > 9.9
    assert_close(result.softmax.sum(dim=1), torch.ones(10, dtype=torch.float64))


def test_sinkhorn_involves_every_point(result):
    ones = torch.ones(10, dtype=torch.float64)
    assert_close(result.sinkhorn.sum(dim=0), ones, atol=1e-10, rtol=0)
    assert_close(result.sinkhorn.sum(dim=1), ones, atol=1e-14, rtol=0)


def test_scores_are_dot_products_and_the_rest_rescales_them(result):
    scores = result.queries @ result.keys.T
    assert_close(result.unnormalised.log(), scores, atol=1e-12, rtol=1e-14)
    # One factor per row leads from K⁰ to K¹, one per row and one per column to K^∞: logarithms differ in nothing else.
    by_row = result.softmax.log() - scores
    assert_close(by_row, by_row.mean(dim=1, keepdim=True).expand(10, 10), atol=1e-10, rtol=0)
    both = result.sinkhorn.log() - scores
    separable = both.mean(dim=1, keepdim=True) + both.mean(dim=0) - both.mean()
    assert_close(both, separable, atol=1e-10, rtol=0)


def test_column_sums_are_in_the_order_of_the_panels(result):
    assert_close(result.column_sums[0], result.unnormalised.sum(dim=0))
    assert_close(result.column_sums[1], result.softmax.sum(dim=0))
    assert_close(result.column_sums[2], result.sinkhorn.sum(dim=0))


def test_results_are_reproducible_and_do_not_use_the_global_generator(result):
    state = torch.get_rng_state()
    assert_close(figure1.run().sinkhorn, result.sinkhorn, atol=0, rtol=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_links_over_the_threshold_are_drawn_in_proportion(result):
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    weights = result.softmax.clone()
    weights[0, :7] = weights.new_tensor([0, 1e-13, 9e-13, 1e-12, 2e-12, 0.25, 0.5])
    figure1._draw_links(axes, result.queries, result.keys, weights)
    (links,) = [artist for artist in axes.collections if isinstance(artist, LineCollection)]
    kept = weights[weights >= 1e-12]
    assert len(links.get_segments()) == len(kept) < 100
    widths = torch.tensor(links.get_linewidths(), dtype=torch.float64)
    assert_close(widths / widths.max(), kept / kept.max())


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_suffix_chooses_the_format(result, tmp_path, suffix, magic):
    path = tmp_path / f"figure.{suffix}"
    figure1.draw(result, path)
    assert path.read_bytes().startswith(magic)
