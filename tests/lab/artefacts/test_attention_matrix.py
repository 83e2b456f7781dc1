from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from sinkformers.lab.artefacts import attention_matrix

PICTURE = Path(__file__).parents[3] / "docs" / "assets" / "attention.png"


@pytest.fixture(scope="module")
def result():
    return attention_matrix.run()


def test_the_first_panel_is_softmax(result):
    assert list(result.weights) == [1, 3, 21]
    assert_close(result.weights[1], result.scores.softmax(dim=-1))


def test_every_row_sums_to_one(result):
    for weights in result.weights.values():
        assert_close(weights.sum(dim=1), torch.ones(24, dtype=torch.float64))


def test_softmax_is_uneven_and_sinkhorn_evens_out(result):
    sums = result.column_sums
    assert sums[1].min() < 0.05
    assert sums[1].max() > 4
    errors = [float((sums[n_iters] - 1).abs().max()) for n_iters in (1, 3, 21)]
    assert errors[1] < errors[0] / 5
    assert errors[2] < 1e-3


def test_the_committed_picture_is_current_and_small(result, tmp_path):
    from PIL import Image

    path = tmp_path / "attention.png"
    attention_matrix.draw(result, path)
    drawn, committed = (np.asarray(Image.open(picture).convert("L"), dtype=float) for picture in (path, PICTURE))
    assert drawn.shape == committed.shape
    # Fonts may be rasterised differently elsewhere; a changed panel moves far more than this mean grey value.
    assert np.abs(drawn - committed).mean() < 0.5
    assert PICTURE.stat().st_size < 150_000
