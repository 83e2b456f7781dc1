"""The tasks of all artefacts train and are observed at the limit, n_iters = ∞."""

import math

import pytest
import torch

from sinkformers.lab.artefacts import selection

ARMS = {
    "figure4": "n-inf",
    "figure5": "n-inf",
    "figure6": "patch-4-rate-0.001-n-inf",
    "table1-set": "n-inf",
    "table1-pct": "n-inf",
    "table2": "continued-n-inf",
}


@pytest.mark.parametrize("name", ARMS)
def test_one_step_at_the_limit_has_gradients_and_columns_that_sum_to_1(name):
    artefact = selection.artefact_named(name)
    (run,) = selection.select_runs(artefact, "smoke", n_iters="inf", arms=[ARMS[name]])
    assert run.arm.n_iters == math.inf
    torch.manual_seed(0)
    task = artefact.task(artefact.presets["smoke"], run.arm, run.seed, None)
    model = task.model()
    examples = task.batches(1)[0]
    loss, _ = task.losses(model.train(), examples)
    (loss / task.weight(examples)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    assert sum(float(p.grad.abs().sum()) for p in model.parameters() if p.grad is not None) > 0
    layers = task.observe(model)["layers"]
    assert layers
    for layer in layers:
        assert layer["gap"] < 1e-3, layer
        assert layer["column_error"] < 1e-2, layer


@pytest.mark.parametrize(("n_iters", "small"), [("5", False), ("inf", True)])
def test_mean_pooling_after_a_doubly_stochastic_layer_gives_queries_and_keys_no_gradient(n_iters, small):
    """The mean of `P V` is the mean of `V` when the columns of P sum to 1, whatever the scores are."""
    artefact = selection.artefact_named("figure6")
    (run,) = selection.select_runs(artefact, "smoke", n_iters=n_iters, arms=["patch-4-*"])
    torch.manual_seed(0)
    task = artefact.task(artefact.presets["smoke"], run.arm, run.seed, None)
    model = task.model()
    weight = model.get_parameter("blocks.0.attention.project.weight")
    with torch.no_grad():
        for part in weight.chunk(3)[:2]:  # scores large enough that five iterations do not converge
            part.mul_(6)
    task.losses(model, task.batches(1)[0])[0].backward()
    assert weight.grad is not None
    query, key, value = (float(part.norm()) for part in weight.grad.chunk(3))
    assert (max(query, key) < 1e-3 * value) == small
