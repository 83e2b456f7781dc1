"""The task of point clouds: batches, augmentation, cached neighbourhoods, evaluation, and the presets."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.testing import assert_close

from sinkformers.lab.artefacts import table1_pct, table1_set
from sinkformers.lab.artefacts.artefact import ExperimentError
from sinkformers.lab.artefacts.catalogue import find
from sinkformers.lab.data import Clouds, PointSet
from sinkformers.lab.tasks import augmentation
from sinkformers.lab.tasks.points import PointTask
from sinkformers.lab.workbench.task import Recipe
from sinkformers.lab.workbench.training import Hooks, Training

NAMES = ("table1-set", "table1-pct", "figure3", "figure2-points")
CONFIGS = {"set": table1_set.SMOKE, "pct": table1_pct.SMOKE}


def point_set(n_train=53, n_test=29, points=61):
    def clouds(n):
        return Clouds(torch.randn(n, points, 3), torch.randint(0, 3, (n,)))

    return PointSet(clouds(n_train), clouds(n_test), ("a", "b", "c"), "made up")


def task(kind, **changes):
    recipe = Recipe(epochs=1, batch=13, rate=1e-3)
    return PointTask(replace(CONFIGS[kind], recipe=recipe, **changes), 0, point_set())


@pytest.mark.parametrize("batch", [10, 13, 52])
def test_every_shape_is_seen_once_per_epoch_in_a_new_order(batch):
    made = task("pct")
    made.recipe = replace(made.recipe, batch=batch)
    first, second = (torch.cat(list(made.batches(epoch))) for epoch in (1, 2))
    assert first.sort().values.tolist() == second.sort().values.tolist() == list(range(53))
    assert not torch.equal(first, second)
    assert torch.equal(first, torch.cat(list(made.batches(1))))
    assert min(map(len, made.batches(1))) > 1


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_whole_test_set_is_evaluated_without_augmentation(kind):
    AcceleratorState._reset_state(reset_partial_state=True)
    made = task(kind, scale=(0.1, 3.0), n_iters=3)
    model = made.model().eval()
    points, labels = made.shapes.test.points[:, :48], made.shapes.test.labels
    if kind == "set":
        points = (points - points.mean((1, 2), keepdim=True)) / points.std((1, 2), keepdim=True, correction=0)
    logits = torch.cat([model(points[i : i + 1]) for i in range(29)])
    found = made.evaluate(model, Accelerator(cpu=True))
    assert found["accuracy"] == pytest.approx((logits.argmax(-1) == labels).double().mean().item())
    assert found["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-4)


def test_cached_neighbourhoods_are_those_before_augmentation(monkeypatch):
    made, examples = task("pct", shift=0.0), torch.tensor([5, 2, 40])
    model, given = made.model(), []
    monkeypatch.setattr(model, "forward", lambda points, around: given.append((points, around)) or torch.zeros(3, 3))
    made.losses(model, examples)
    made.losses(model, examples)
    raw = made.shapes.train.points[examples][:, :48]
    (once, around), (again, kept) = given
    assert not torch.equal(once, again)  # scaled again
    for found, expected in zip(around, model.neighbourhoods(raw), strict=True):
        assert all(torch.equal(one.long(), other) for one, other in zip(found, expected, strict=True))
    assert all(
        torch.equal(a, b) for one, other in zip(around, kept, strict=True) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("changes", [{"subset": True}, {"drop": 0.5}])
def test_neighbourhoods_are_not_cached_if_points_change(changes, monkeypatch):
    made = task("pct", **changes)
    model, given = made.model(), []
    monkeypatch.setattr(model, "forward", lambda *args: given.append(args) or torch.zeros(2, 3))
    made.losses(model, torch.arange(2))
    assert [len(args) for args in given] == [1]
    assert given[0][0].shape == (2, 48, 3)


@pytest.mark.parametrize("kind", CONFIGS)
def test_attention_is_measured_on_the_same_sample_every_time(kind):
    made = task(kind, n_iters=5)
    model = made.model()
    first, second = made.observe(model), made.observe(model)
    assert first == second
    assert len(first["layers"]) == {"set": 5, "pct": 2}[kind]
    assert all(layer["row_error"] < 1e-5 for layer in first["layers"])
    json.dumps(first)


@pytest.mark.parametrize("kind", CONFIGS)
def test_losses_are_sums_with_a_gradient(kind):
    made = task(kind, n_iters=3)
    model = made.model()
    loss, sums = made.losses(model, torch.arange(7))
    loss.backward()
    assert loss.item() == pytest.approx(7 * math.log(3), rel=0.7)
    assert 0 <= float(sums["accuracy"]) <= 7
    assert made.weight(torch.arange(7)) == 7
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_standardised():
    points = torch.randn(5, 40, 3) * 4 + 2
    done = augmentation.standardised(points)
    assert_close(done.mean((1, 2)), torch.zeros(5), atol=1e-5, rtol=0)
    assert_close(done.square().mean((1, 2)), torch.ones(5), atol=1e-5, rtol=0)


def test_a_subset_has_distinct_points_and_differs_between_draws():
    points = torch.arange(4 * 20 * 3).view(4, 20, 3).float()
    some, others = augmentation.subset_of(points, 7), augmentation.subset_of(points, 7)
    assert some.shape == (4, 7, 3)
    assert not torch.equal(some, others)
    for cloud, drawn in zip(points.tolist(), some.tolist(), strict=True):
        assert all(point in cloud for point in drawn)
        assert len({tuple(point) for point in drawn}) == 7


def test_dropped_points_move_onto_the_first():
    points = torch.randn(500, 50, 3)
    done = augmentation.drop_points(points, 0.875)
    dropped = (done != points).any(-1)
    assert (done == torch.where(dropped[..., None], points[:, :1], points)).all()
    assert abs(dropped.double().mean() - 0.4375 * 49 / 50) < 0.05
    assert dropped.double().mean(1).max() <= 1


def test_scaling_shifting_and_turning():
    points = torch.randn(2000, 5, 3)
    factor = augmentation.scaled(points, 0.5, 2.0) / points
    assert_close(factor, factor[:, :1].expand_as(factor), atol=1e-4, rtol=1e-4)
    assert 0.5 - 1e-3 <= factor.min() < 0.51
    assert 1.99 < factor.max() <= 2.0 + 1e-3
    moved = augmentation.shifted(points, 0.2) - points
    assert_close(moved, moved[:, :1].expand_as(moved), atol=1e-6, rtol=0)
    assert 0.19 < moved.abs().max() <= 0.2 + 1e-6
    turned = augmentation.turned(points, 0.3)
    assert torch.equal(turned[..., 2], points[..., 2])
    assert_close(turned.norm(dim=-1), points.norm(dim=-1), atol=1e-5, rtol=0)
    cos = F.cosine_similarity(turned[..., :2], points[..., :2], dim=-1)
    assert 0.28 < cos.clamp(max=1).acos().max() <= 0.3 + 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_presets_build_and_their_arms_differ_in_no_parameter(name):
    artefact = find(name)
    more = {"figure2-points": set(), "table1-pct": {"authors"}}.get(name, {"authors", "medium"})
    assert set(artefact.presets) == {"paper", "small", "smoke"} | more
    for key, preset in artefact.presets.items():
        json.dumps(asdict(preset.config))
        shapes = []
        for arm in preset.arms:
            with torch.device("meta"):
                model = preset.config.with_settings(arm.settings).model(40)
            shapes.append(
                [(part, p.shape) for part, p in model.named_parameters() if key != "authors" or "norm" not in part]
            )
        assert all(each == shapes[0] for each in shapes)
        assert any(arm.n_iters == 1 for arm in preset.arms)
        assert preset.data == ("" if key == "smoke" else "modelnet40")


def test_the_port_has_exactly_two_iterations():
    with pytest.raises(ExperimentError, match="the arm port has two iterations, and 3 were asked for"):
        table1_pct.SMOKE.with_settings({"port": True, "n_iters": 3}).model(8)


def test_the_authors_set_sinkformer_differs_as_its_code_does():
    transformer, sinkformer = (
        table1_set.AUTHORS.with_settings(each | {"n_iters": 5}).model(40)
        for each in (
            table1_set.TRANSFORMER,
            table1_set.SINKFORMER,
        )
    )
    assert transformer.sab is sinkformer.sab is None
    assert not [name for name, _ in transformer.named_parameters() if "norm" in name]
    assert sinkformer.pool.literal
    assert sinkformer.pool.mab.plan.__name__ == "unscaled_plan"
    assert transformer.pool.mab.plan is None
    assert sinkformer.pool.mab.scale == 1 / 16


@pytest.mark.parametrize("name", NAMES)
def test_smoke_runs_learn_from_the_computed_shapes(name):
    AcceleratorState._reset_state(reset_partial_state=True)
    artefact = find(name)
    preset = artefact.presets["smoke"]
    made = artefact.task(preset, preset.arms[-1], 0, None)
    model = made.model()
    optimiser = made.recipe.build(model)
    for epoch in range(1, 11):
        for batch in made.batches(epoch):
            optimiser.zero_grad()
            (made.losses(model.train(), batch)[0] / len(batch)).backward()
            optimiser.step()
    assert made.evaluate(model.eval(), Accelerator(cpu=True))["accuracy"] > 0.3  # an eighth is chance
    assert made.facts["data"] == {"name": "shapes", "train": 192, "test": 64}


class Stopped(Exception):
    pass


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_stopped_training_resumes_to_the_same_bits(kind, tmp_path):
    """Augmentation, dropout and the statistics of BatchNorm resume exactly."""
    finals = []
    for name, stop_at in (("whole", None), ("stopped", 7)):
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(5)
        made = task(kind, n_iters=3)
        made.recipe = replace(made.recipe, epochs=2)

        def step(epoch, done, of, stop_at=stop_at):
            if stop_at is not None and (epoch - 1) * of + done == stop_at:
                raise Stopped

        def training(hook, made=made, name=name):
            hooks = Hooks(hook, lambda _record, _seconds: None)
            (tmp_path / name).mkdir(exist_ok=True)
            return Training(made, {"seed": 3}, tmp_path / name, Accelerator(cpu=True), hooks)

        if stop_at is not None:
            with pytest.raises(Stopped):
                training(step).run(0.0)
        finals.append(training(lambda *_: None).run(0.0))
    assert [each.resumed for each in finals] == [0, 1]
    assert finals[0].epochs == finals[1].epochs
    states = [each.model.state_dict() for each in finals]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
