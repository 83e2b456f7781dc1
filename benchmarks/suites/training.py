"""A whole training step of a ViT and of a text encoder: the same model, with one attention function or another."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from benchmarks import agreement
from benchmarks.case import Case, Masks
from benchmarks.contest import Entry, compete
from benchmarks.measurement import Measurement
from benchmarks.progress import Progress
from benchmarks.rows import Row, ours, softmax
from benchmarks.settings import Settings
from benchmarks.transformer import Attend, TrainingStep, text_encoder, vit

NAMES = ("sdpa", "softmax", "native", "torch")


@dataclass(frozen=True)
class Model:
    build: Callable[[Attend], nn.Module]
    case: Case
    seconds: float

    def batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(self.case.batch) % 2
        if self.case.n == 197:
            return torch.randn(self.case.batch, 3, 224, 224, generator=generator), labels
        return torch.randint(10_000, (self.case.batch, self.case.n), generator=generator), labels


MODELS = {
    "ViT": Model(vit, Case(16, 8, 197, 16, n_iters=3), 30.0),
    "text encoder": Model(text_encoder, Case(4, 8, 512, 32, n_iters=5), 40.0),
}


def run(settings: Settings, progress: Progress) -> Iterator[Measurement]:
    for label, model in MODELS.items():
        if settings.quick and label != "ViT":
            continue
        entries = [_entry(row, model) for row in settings.pick(NAMES)]
        yield from compete("training", label, entries, settings.plan(model.seconds), progress)


def _entry(row: Row, model: Model) -> Entry:
    settings = {"n": model.case.n} | ({} if row.formula == "softmax" else {"n_iters": model.case.n_iters})
    return Entry(row.name, build=lambda: _step(row.name, model), check=lambda: _check(row, model), settings=settings)


def _attend(name: str, case: Case) -> Attend:
    """The row's function on the model's own heads, as autograd sees it inside the model."""
    function = {
        "sdpa": softmax.sdpa,
        "softmax": softmax.eager,
        "native": ours.backend("native"),
        "torch": ours.backend("torch"),
        "reference": ours.backend("reference"),
    }[name]
    return lambda query, key, value: function(query, key, value, case, Masks())


def _step(name: str, model: Model) -> TrainingStep:
    torch.manual_seed(0)
    return TrainingStep(model.build(_attend(name, model.case)), *model.batch())


def _check(row: Row, model: Model) -> agreement.Checked:
    """Loss and gradients of one example, beside the same model in float64 with the row's definition in it."""
    one = replace(model, case=replace(model.case, batch=1))
    definition = "softmax" if row.formula == "softmax" else "reference"
    got, expected = _step(row.name, one), _step(definition, one)
    expected.model.double()
    if expected.batch.is_floating_point():
        expected.batch = expected.batch.double()
    for step in (got, expected):
        step.backward()
    return agreement.Checked(agreement.deviation(got.outcome(), expected.outcome()), 0.0)
