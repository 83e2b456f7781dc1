"""`EquilibriumAttention` returns the unique minimiser, with its gradient."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from sinkformers import ConvergenceWarning
from sinkformers.modules import EquilibriumAttention
from tests import oracle

VALID = torch.arange(7) < torch.tensor([[7], [4]])
EPS = torch.finfo(torch.float64).eps
# Two solutions, each within eps^¾·|z|, with |z| ≈ √42 for 7 tokens of 6 features, and a margin of 4: 9e-11.
SOLVED = {"atol": 8 * EPS**0.75 * 42**0.5, "rtol": 0}


def rand(*size):
    return torch.randn(*size, dtype=torch.float64)


def build(pull=0.5, eps=0.8, **options):
    return EquilibriumAttention(6, 3, 5, pull=pull, eps=eps, **options).double()


def plan(x, weight, eps, n_iters=201):
    """Return scores and weights (3, n, n) of one sample's heads, by the oracle."""
    heads = (x @ weight.T).unflatten(-1, (3, 5)).transpose(0, 1)
    scores = heads @ heads.mT / eps
    return scores, oracle.batch_weights(scores, n_iters)


def drift(x, weight, eps, n_iters=201):
    """Return T^∞ at the tokens of one sample: −(1/eps) Σ_j K^∞_ij A x_j, summed over heads."""
    _, weights = plan(x, weight, eps, n_iters)
    heads = (x @ weight.T).unflatten(-1, (3, 5)).transpose(0, 1)
    return -((weights @ heads).transpose(0, 1).flatten(1) @ weight) / eps


def energy(x, z, layer):
    """Return the objective by its definition: −½ ∫ k log(k/k⁰) d(μ⊗μ) over heads, plus the pull."""
    n = len(x)
    scores, weights = plan(x, layer.project.weight.detach(), layer.eps)
    kernel = n * weights
    interaction = -0.5 * (kernel * (kernel.log() - scores)).sum() / n**2
    return interaction + layer.pull / (2 * n) * (x - z).square().sum()


def test_attention_and_pull_balance():
    layer, z = build(), rand(2, 7, 6)
    for x, z_ in zip(layer(z), z, strict=True):
        force = drift(x, layer.project.weight, 0.8)
        assert_close(0.5 * (x - z_), force, **SOLVED)
        assert force.abs().max() > 0.05


@pytest.mark.parametrize("pull", [0.05, 5.0])
def test_the_output_minimises_the_energy(pull):
    """A strongly convex one: it grows at least as the pull alone does, in every direction and at every distance."""
    layer, z = build(pull), rand(5, 6)
    x = layer(z).detach()
    least = energy(x, z, layer)
    (gradient,) = torch.autograd.grad(energy(x.requires_grad_(), z, layer), x)
    # 1/n of the balance, whose norm is at most pull·eps^¾·|z|, or of its rounding where that is larger.
    assert gradient.abs().max() < 1e-11
    for length in (1e-3, 0.1, 1.0, 3.0):
        for _ in range(5):
            change = length * rand(5, 6)
            growth = energy(x.detach() + change, z, layer) - least
            assert growth >= pull / 10 * change.square().sum() - 1e-12


@pytest.mark.parametrize("start", ["input", "zero", "far"])
def test_descent_from_anywhere_ends_there(start):
    layer, z = build(), rand(5, 6)
    x = {"input": z.clone(), "zero": torch.zeros_like(z), "far": 3 * rand(5, 6)}[start].requires_grad_()
    descent = torch.optim.LBFGS(
        [x], max_iter=200, tolerance_grad=1e-11, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure():
        descent.zero_grad()
        value = energy(x, z, layer)
        value.backward()
        return value

    descent.step(closure)
    assert_close(x.detach(), layer(z).detach(), atol=1e-6, rtol=0)  # the line search cannot resolve √eps


def test_the_interaction_is_convex():
    """Between any two configurations of the tokens; so every positive pull has one minimiser."""
    layer = build(pull=1e-300, eps=0.4)
    nothing = torch.zeros(5, 6, dtype=torch.float64)
    for size in (0.3, 1.0):
        for _ in range(10):
            a, b = size * rand(5, 6), size * rand(5, 6)
            middle = energy((a + b) / 2, nothing, layer)
            assert middle <= (energy(a, nothing, layer) + energy(b, nothing, layer)) / 2 + 1e-12


@pytest.mark.parametrize("lead", [(), (2,), (3, 2)])
def test_equal_tokens_have_a_closed_form(lead):
    """Equal tokens, or a single one, attend to themselves: x = (1 + A/(pull·eps))⁻¹ z."""
    layer, z = build(), rand(*lead, 1, 6)
    weight = layer.project.weight.detach()
    matrix = torch.eye(6, dtype=torch.float64) + weight.T @ weight / (0.5 * 0.8)
    expected = torch.linalg.solve(matrix, z.reshape(-1, 6).T).T.reshape(z.shape)
    tolerance = {"atol": 1e-11, "rtol": 0}  # eps^¾·|z|, with |z| ≈ √6 per token
    assert_close(layer(z).detach(), expected, **tolerance)
    assert_close(layer(z.expand(*lead, 7, 6)).detach(), expected.expand(*lead, 7, 6), **tolerance)


def test_gradient():
    layer, z = build(pull=nn.Parameter(torch.tensor(0.5)), eps=nn.Parameter(torch.tensor(0.8))), rand(2, 5, 6)
    names, weights = zip(*layer.named_parameters(), strict=True)
    assert sorted(names) == ["eps", "project.weight", "pull"]

    def call(z, *weights):
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (z, VALID[:, :5]))

    assert torch.autograd.gradcheck(call, (z.requires_grad_(), *weights), fast_mode=True)


def test_the_implicit_gradient_equals_that_of_unrolled_descent():
    """30 steps of gradient descent on the energy, with the oracle's weights."""
    layer, z, d_x = build(pull=2.0, eps=1.5), rand(5, 6).requires_grad_(), rand(5, 6)
    weight, x = layer.project.weight, z
    for _ in range(30):
        x = x - 0.35 * (2.0 * (x - z) - drift(x, weight, 1.5, 61))
    expected = torch.autograd.grad(x, (z, weight), d_x)
    found = layer(z)
    assert_close(found, x, **SOLVED)
    for ours, theirs in zip(torch.autograd.grad(found, (z, weight), d_x), expected, strict=True):
        assert_close(ours, theirs, atol=10 * SOLVED["atol"], rtol=0)  # sums over tokens


@pytest.mark.parametrize("pull", [1e-2, 1.0])
def test_evidence(pull):
    layer, z = build(pull), rand(2, 7, 6)
    x, info = layer(z, return_info=True)
    assert info.converged.tolist() == [True, True]
    assert (info.steps > 1).all()
    stiffness = torch.linalg.svdvals(layer.project.weight)[0].square() / 0.8
    eps = torch.finfo(torch.float64).eps
    aim = max(eps**0.75, 16 * eps * (1 + stiffness / pull))
    for error, x_, z_ in zip(info.error, x, z, strict=True):
        balance = pull * (x_ - z_) - drift(x_, layer.project.weight, 0.8, 801)
        assert error <= aim * z_.norm()
        assert (balance.norm() / pull - error).abs() <= 32 * eps * (1 + stiffness / pull) * z_.norm()


def test_single_precision_is_double_precision_rounded():
    layer, z = build().float(), torch.randn(2, 7, 6)
    x, info = layer(z, return_info=True)
    assert x.dtype == torch.float32
    assert info.converged.all()
    distance = (x - layer.double()(z.double())).norm(dim=(1, 2))
    assert (distance <= info.error + 1e-5 * z.norm(dim=(1, 2))).all()


def test_a_problem_too_hard_for_single_precision_warns():
    layer, z = build(1e-3, 1e-2).float(), torch.randn(2, 7, 6)
    with pytest.warns(
        ConvergenceWarning, match=r"2 of 2 samples have not converged; .* larger pull or eps, or float64"
    ):
        layer(z)
    x, info = layer(z, return_info=True)
    assert not info.converged.any()
    assert ((x - layer.double()(z.double())).norm(dim=(1, 2)) <= info.error).all()


def test_masking_equals_deletion():
    layer, z = build(), rand(2, 7, 6)
    x = layer(z, VALID)
    assert x[1, 4:].equal(z[1, 4:])
    assert_close(x[1, :4], layer(z[1, :4]), **SOLVED)
    assert_close(x[0], layer(z[0]), **SOLVED)


def test_the_contents_of_padding_change_nothing():
    layer = build(pull=nn.Parameter(torch.tensor(0.5)), eps=nn.Parameter(torch.tensor(0.8)))
    z, d_x, results = rand(2, 7, 6), rand(2, 7, 6), []
    for filling in (0.0, torch.nan):
        tokens = z.masked_fill(~VALID[..., None], filling).requires_grad_()
        x = layer(tokens, VALID)
        grads = torch.autograd.grad(x, (tokens, *layer.parameters()), d_x)
        results.append([x.where(VALID[..., None], 0), *grads])
    for clean, poisoned in zip(*results, strict=True):
        assert clean.equal(poisoned)
        assert clean.isfinite().all()
    assert results[0][1][1, 4:].equal(d_x[1, 4:])


def test_the_order_of_tokens_does_not_matter():
    layer, z, order = build(), rand(7, 6), torch.randperm(7)
    assert_close(layer(z[order]), layer(z)[order], **SOLVED)


def test_samples_without_tokens_and_layers_without_weights():
    layer, z = build(), rand(2, 7, 6)
    assert layer(z, VALID & torch.tensor([[True], [False]]))[1].equal(z[1])
    torch.nn.init.zeros_(layer.project.weight)
    assert layer(z).equal(z)
    assert layer(0 * z).equal(0 * z)


def test_nan_stays_in_its_sample():
    layer, z = build(), rand(2, 7, 6)
    alone = layer(z[1])
    z[0, 2, 3] = torch.nan
    x, info = layer(z, return_info=True)
    assert_close(x[1], alone, **SOLVED)
    assert info.converged.tolist() == [False, True]
    assert layer(z)[0].isnan().any()


def test_a_second_derivative_is_refused():
    z = rand(5, 6).requires_grad_()
    (grad,) = torch.autograd.grad(build()(z).square().sum(), z, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


class Exponential(nn.Module):
    def forward(self, x):
        return x.exp()

    def right_inverse(self, x):
        return x.log()


def test_a_learned_pull_can_be_kept_positive():
    layer, z = build(pull=nn.Parameter(torch.tensor(0.5))), rand(5, 6)
    expected = layer(z)
    nn.utils.parametrize.register_parametrization(layer, "pull", Exponential())
    assert_close(layer(z), expected, **SOLVED)
    layer(z).square().sum().backward()
    assert layer.parametrizations.pull.original.grad != 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pull": 0.0}, "pull must be a positive number; got 0.0"),
        ({"eps": -1.0}, "eps must be a positive number; got -1.0"),
        (
            {"pull": torch.tensor(-0.25)},
            "pull must be positive; got -0.25. .*parametrize",
        ),
        ({"eps": torch.ones(3)}, r"a tensor eps must hold one floating-point number; got shape \(3,\)"),
        ({"num_heads": 4}, "num_heads must divide dim"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=f"EquilibriumAttention: {message}"):
        EquilibriumAttention(**{"dim": 6, "num_heads": 3, **options})


def test_a_learned_pull_that_became_negative_is_an_error():
    layer = build(pull=nn.Parameter(torch.tensor(0.5)))
    with torch.no_grad():
        layer.pull -= 1
    with pytest.raises(ValueError, match=r"pull must be positive; got -0\.5"):
        layer(rand(5, 6))


def test_errors_of_a_call():
    with pytest.raises(ValueError, match=r"EquilibriumAttention: mask must broadcast to the tokens = \(2, 7\)"):
        build()(rand(2, 7, 6), torch.ones(2, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match="EquilibriumAttention: z must have at least 2 axes"):
        build()(rand(6))


def test_settings_are_shown_in_the_repr():
    assert "num_heads=3, pull=0.5, eps=0.8" in repr(build())
    assert f"eps={math.sqrt(5):.6f}" in repr(EquilibriumAttention(6, 3, 5))
