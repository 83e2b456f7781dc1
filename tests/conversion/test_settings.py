"""`select`, `set_n_iters`, `set_tau` and a learned `tau`."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from sinkformers import set_n_iters, set_tau, to_sinkformer, to_transformer
from tests.conversion.torch_encoders import EXACT, agree, encoder, run


@pytest.mark.parametrize(
    ("select", "picked"),
    [
        ("layers.1.*", ["layers.1.self_attn"]),
        (lambda name, _module: name.startswith("layers.0"), ["layers.0.self_attn"]),
        (lambda _name, module: isinstance(module, nn.MultiheadAttention), ["layers.0.self_attn", "layers.1.self_attn"]),
    ],
)
def test_select_picks(select, picked):
    model = to_sinkformer(encoder(), select=select)
    assert list(model.sinkformer_report.converted) == picked
    assert set(model.sinkformer_report.kept.values()) <= {"not selected"}
    converted = [name for name, module in model.named_modules() if hasattr(module, "sinkhorn")]
    assert converted == picked


def test_a_second_call_adds_and_changes():
    model = to_sinkformer(encoder(), 3, select="layers.0.*")
    to_sinkformer(model, 5, tau=0.5, select="layers.1.*")
    found = {
        name: (module.sinkhorn.n_iters, module.sinkhorn.tau)
        for name, module in model.named_modules()
        if name[-4:] == "attn"
    }
    assert found == {"layers.0.self_attn": (3, 1.0), "layers.1.self_attn": (5, 0.5)}
    assert [entry.kind for entry in model.sinkformer_report.entries] == ["MultiheadAttention"] * 2
    to_transformer(to_sinkformer(model, 7))
    assert type(model.layers[1].self_attn) is nn.MultiheadAttention


def test_settings_change_for_selected_modules():
    model = to_sinkformer(encoder(), 3)
    set_n_iters(model, 7, select="*.1.*")
    set_tau(model, 0.25, select=lambda name, _module: "0" in name)
    assert (model.layers[0].self_attn.sinkhorn.n_iters, model.layers[0].self_attn.sinkhorn.tau) == (3, 0.25)
    assert (model.layers[1].self_attn.sinkhorn.n_iters, model.layers[1].self_attn.sinkhorn.tau) == (7, 1.0)


@pytest.mark.parametrize("padded", [True, False])
def test_tau_zero_is_softmax_and_one_is_sinkhorn(padded):
    model = encoder()
    softmax = run(model, padded)
    to_sinkformer(model, n_iters=5)
    sinkhorn = run(model, padded)
    set_tau(model, 0.0)
    agree(run(model, padded), softmax)
    set_tau(model, 1e-9)
    agree(run(model, padded), softmax, atol=1e-7)  # continuous there
    set_tau(model, 1.0)
    agree(run(model, padded), sinkhorn, atol=0.0)


def test_learned_tau_is_one_parameter_and_has_its_gradient():
    model = encoder()
    names = [name for name, _ in model.named_parameters()]
    to_sinkformer(model, tau="learned")
    added = {name: p for name, p in model.named_parameters() if name not in names}
    assert list(added) == ["layers.0.self_attn.sinkhorn_tau", "layers.1.self_attn.sinkhorn_tau"]
    assert model.sinkformer_report.parameters == list(added)
    assert all(p.shape == (2,) and p.dtype == torch.float64 for p in added.values())
    set_tau(model, 0.3)
    learned = run(model, True)
    with torch.no_grad():
        added["layers.1.self_attn.sinkhorn_tau"] += torch.tensor([0.2, -0.1])
    fixed = copy.deepcopy(model)
    step, loss = 1e-4, []
    logit = fixed.layers[1].self_attn.sinkhorn_tau
    gradient = dict(zip([n for n, _ in model.named_parameters()], run(model, True)[1], strict=True))
    for sign in (1, -1):
        with torch.no_grad():
            logit[1] += sign * step
        loss.append(run(fixed, True)[0].square().sum().item())
        with torch.no_grad():
            logit[1] -= sign * step
    slope = (loss[0] - loss[1]) / (2 * step)
    assert gradient["layers.1.self_attn.sinkhorn_tau"][1].item() == pytest.approx(
        slope, rel=1e-6, abs=1e-8
    )  # loss·eps/step
    to_sinkformer(model, tau=0.3)
    assert [name for name, _ in model.named_parameters()] == names
    assert_close(run(model, True)[0], learned[0], atol=EXACT, rtol=0)


def test_setting_a_learned_tau_moves_its_logits_and_keeps_the_parameter():
    model = to_sinkformer(encoder(), tau="learned")
    parameter = model.layers[0].self_attn.sinkhorn_tau
    set_tau(model, 0.1)
    assert model.layers[0].self_attn.sinkhorn_tau is parameter
    assert_close(parameter.sigmoid(), torch.full((2,), 0.1, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"learned, so it must lie strictly between 0 and 1; got 1\.0\."):
        set_tau(model, 1.0)
    set_tau(to_sinkformer(model, tau=1.0), "learned")
    assert model.sinkformer_report.parameters == [f"layers.{i}.self_attn.sinkhorn_tau" for i in (0, 1)]
