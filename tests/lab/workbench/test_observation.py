"""Column sums and marginal errors, against attention matrices made by hand."""

import torch
from torch import nn

from sinkformers import sinkhorn
from sinkformers.lab.workbench.observation import observe
from sinkformers.modules import SelfAttention


class Two(nn.Module):
    def __init__(self, n_iters):
        super().__init__()
        self.first, self.second = (SelfAttention(6, 2, n_iters=n_iters).double() for _ in range(2))

    def forward(self, x):
        return self.second(self.first(x))


def weights_by_hand(layer, x, n_iters):
    query, key, _ = (part.unflatten(-1, (2, 3)).transpose(1, 2) for part in layer.project(x).chunk(3, -1))
    return sinkhorn(query @ key.mT / 3**0.5, n_iters=n_iters, backend="reference")


def test_column_sums_of_all_layers_and_each():
    x = 4 * torch.randn(5, 7, 6, dtype=torch.float64)
    for n_iters in (1, 3):
        model = Two(n_iters)
        found = observe(model, lambda model=model: model(x))
        weights = [weights_by_hand(model.first, x, n_iters), weights_by_hand(model.second, model.first(x), n_iters)]
        gaps = [(each.sum(-2) - 1).abs() for each in weights]
        assert [layer["name"] for layer in found["layers"]] == ["first", "second"]
        for layer, gap in zip(found["layers"], gaps, strict=True):
            torch.testing.assert_close(layer["gap"], gap.mean().item())
            torch.testing.assert_close(layer["column_error"], gap.max().item())
            assert layer["row_error"] < 1e-12
        together = torch.cat([gap.flatten() for gap in gaps])
        torch.testing.assert_close(found["columns"]["gap"], together.mean().item())
        torch.testing.assert_close(found["columns"]["within_0.1"], (together <= 0.1).double().mean().item())
        sums = torch.cat([each.sum(-2).flatten() for each in weights])
        q = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95], dtype=torch.float64)
        expected = torch.quantile(sums, q, interpolation="nearest")
        torch.testing.assert_close(torch.tensor(found["columns"]["quantiles"], dtype=torch.float64), expected)


def test_observing_keeps_the_model_in_training_mode():
    model = Two(3).train()
    observe(model, lambda: model(torch.randn(1, 4, 6, dtype=torch.float64)))
    assert model.training
    assert model.first.training
