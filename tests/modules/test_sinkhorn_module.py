"""`Sinkhorn` computes what `sinkhorn` computes; settings are checked when a module is built; the public names exist."""

import pytest
import torch
from torch import nn

import sinkformers
from sinkformers import MultiheadAttention, Sinkhorn, sinkhorn


def test_sinkhorn_module():
    scores, mask = torch.randn(2, 5, 7), torch.rand(5, 7) > 0.2
    layer = Sinkhorn(n_iters=5, tau=0.5)
    assert layer(scores, mask).equal(sinkhorn(scores, n_iters=5, tau=0.5, mask=mask))
    assert repr(layer) == "Sinkhorn(n_iters=5, tau=0.5)"
    learned = Sinkhorn(tau=nn.Parameter(torch.tensor(0.5)))
    assert list(learned.state_dict()) == ["tau"]
    learned(scores).square().sum().backward()
    assert learned.tau.grad != 0


@pytest.mark.parametrize("build", [lambda **k: Sinkhorn(**k), lambda **k: MultiheadAttention(8, 2, **k)])
def test_settings_are_checked_when_built(build):
    for wrong, message in (({"n_iters": 0}, "n_iters must be"), ({"tau": 2.0}, "tau must lie in")):
        with pytest.raises(ValueError, match=message):
            build(**wrong)


def test_public_names():
    for name in sinkformers.__all__:
        assert getattr(sinkformers, name).__doc__
    assert set(sinkformers.__all__) < set(dir(sinkformers))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = sinkformers.nothing
