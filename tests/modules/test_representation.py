"""`repr` of our modules: `n_iters`, `tau`, and the settings that differ from their defaults."""

import math

import pytest
import torch
from torch import nn

from sinkformers import MultiheadAttention, Sinkhorn
from sinkformers.models.decoder import CausalAttention, CrossAttention
from sinkformers.models.set_transformer import unscaled_plan
from sinkformers.modules import (
    ISAB,
    MAB,
    PMA,
    SAB,
    EquilibriumAttention,
    InvertibleAttention,
    OffsetAttention,
    SelfAttention,
)


def learned(*values):
    return nn.Parameter(torch.tensor(values).squeeze())


SHOWN = [
    (lambda: Sinkhorn(), "n_iters=3, tau=1.0"),
    (lambda: Sinkhorn(7, 0.3), "n_iters=7, tau=0.3"),
    (lambda: Sinkhorn(tau=learned(0.5)), "n_iters=3, tau=learned"),
    (lambda: Sinkhorn(tau=torch.tensor([0.5, 0.7])), "n_iters=3, tau=tensor (2,)"),
    (
        lambda: MultiheadAttention(8, 2, n_iters=7, tau=0.3),
        "embed_dim=8, num_heads=2, n_iters=7, tau=0.3",
    ),
    (
        lambda: MultiheadAttention(
            8, 2, dropout=0.1, kdim=5, vdim=3, batch_first=True, tau=learned(0.5, 0.7), allow_one_way_mask=True
        ),
        "embed_dim=8, num_heads=2, n_iters=3, tau=learned (2,), dropout=0.1, batch_first=True, kdim=5, vdim=3, "
        "allow_one_way_mask=True",
    ),
    (lambda: SelfAttention(8, 2, n_iters=1), "num_heads=2, n_iters=1, tau=1.0"),
    (
        lambda: SelfAttention(8, 2, 3, tau=0.0, tie_qk=True, dropout=0.1),
        "num_heads=2, n_iters=3, tau=0.0, tie_qk=True, dropout=0.1, head_dim=3",
    ),
    (lambda: MAB(3, 5, 8, 2, n_iters=5), "num_heads=2, n_iters=5, tau=1.0"),
    (
        lambda: MAB(3, 5, 16, 2, scale_by="width", plan=unscaled_plan),
        "num_heads=2, n_iters=3, tau=1.0, scale=0.25, plan=unscaled_plan",
    ),
    (lambda: SAB(3, 8, 2, n_iters=5), ""),
    (lambda: ISAB(3, 8, 2, 4), "num_inducing=4"),
    (lambda: PMA(8, 2), "num_seeds=1"),
    (lambda: PMA(8, 2, 3, literal=True), "num_seeds=3, literal=True"),
    (lambda: OffsetAttention(12, 3, n_iters=5, tau=0.5), "n_iters=5, tau=0.5"),
    (lambda: OffsetAttention(12, 3, n_iters=2, port=True), "n_iters=2, tau=1.0, port=True"),
    (lambda: InvertibleAttention(6, 3, n_iters=math.inf), "num_heads=3, n_iters=inf, contraction=0.9"),
    (lambda: InvertibleAttention(6, 3, 5), "num_heads=3, n_iters=1, contraction=0.9, head_dim=5"),
    (lambda: EquilibriumAttention(8, 2), "num_heads=2, pull=1.0, eps=2.0"),
    (
        lambda: EquilibriumAttention(6, 3, 5, pull=learned(0.5), eps=0.8),
        "num_heads=3, pull=learned, eps=0.8, head_dim=5",
    ),
    (lambda: CausalAttention(8, 2), "num_heads=2, n_iters=1, tau=1.0, causal=streaming"),
    (
        lambda: CrossAttention(8, 2, n_iters=3, tau="learned"),
        "num_heads=2, n_iters=3, tau=learned, causal=streaming",
    ),
    (
        lambda: MultiheadAttention(8, 2, causal="streaming"),
        "embed_dim=8, num_heads=2, n_iters=3, tau=1.0, causal=streaming",
    ),
    (
        lambda: SelfAttention(8, 2, tau="learned", causal="prefix", rotary=True),
        "num_heads=2, n_iters=3, tau=learned, causal=prefix, rotary=True",
    ),
]


@pytest.mark.parametrize(("build", "expected"), SHOWN)
def test_settings_are_shown(build, expected):
    module = build()
    assert module.extra_repr() == expected
    assert expected in repr(module)
    with torch.no_grad():
        assert module.extra_repr() == expected
    assert module.to("meta").extra_repr() == expected


@pytest.mark.parametrize("block", [SAB(3, 8, 2, n_iters=7, tau=0.3), ISAB(3, 8, 2, 4, n_iters=7, tau=0.3)])
def test_blocks_show_the_settings_of_their_parts(block):
    assert repr(block).count("num_heads=2, n_iters=7, tau=0.3") == sum(
        isinstance(each, MAB) for each in block.modules()
    )


def test_changed_settings_are_shown():
    layer = MultiheadAttention(8, 2)
    layer.n_iters, layer.tau = 9, 0.25
    assert "n_iters=9, tau=0.25" in repr(layer)
