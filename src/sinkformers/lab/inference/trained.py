"""A finished run as a model: its configuration, its weights and its files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sinkformers.lab.artefacts import catalogue
from sinkformers.lab.artefacts.artefact import METRICS_FILE, MODEL_FILE, ExperimentError, retrain_hint
from sinkformers.lab.reporting import records

if TYPE_CHECKING:
    from torch import Tensor, nn

T = TypeVar("T")


@dataclass(frozen=True)
class TrainedRun:
    """A finished run. `config` is that of its arm, as it was trained."""

    folder: Path
    metrics: Mapping[str, Any]
    config: Any

    @property
    def name(self) -> str:
        return f"{self.metrics['artefact']}, {self.metrics['preset']}, {self.metrics['arm']}"

    def file(self, name: str, read: Callable[[str], T]) -> T:
        """Return `read(text)` for the text of one of the run's files."""
        path = self.folder / name
        if not path.exists():
            raise ExperimentError(
                f"{path} is missing, and the model cannot be used without it. {retrain_hint(self.folder)}"
            )
        try:
            return read(path.read_text(encoding="utf-8"))
        # tokenizers raises a bare Exception for damaged text.
        except Exception as error:
            raise ExperimentError(
                f"{path} cannot be read ({error}), and the model cannot be used without it. {retrain_hint(self.folder)}"
            ) from error

    def classes(self) -> list[str]:
        """Return the names of the classes."""
        return self.file("classes.json", json.loads)

    def load_into(self, model: nn.Module) -> nn.Module:
        """Load the weights of the run into `model`, and return it in evaluation mode."""
        from sinkformers.lab.workbench import checkpoint

        weights, state = checkpoint.read(self.folder / MODEL_FILE, retrain_hint(self.folder))
        expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        found = {name: tuple(value.shape) for name, value in weights.items()}
        if expected != found:
            odd = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))[0]
            raise ExperimentError(
                f"{self.folder / MODEL_FILE} belongs to another model: {odd} is {found.get(odd, 'missing')} there and "
                f"{expected.get(odd, 'missing')} by {METRICS_FILE}. Put back the file that was trained with it."
            )
        there, here = (of.get("settings", {}).get("n_iters") for of in (state, self.metrics))
        if there not in (None, here):
            raise ExperimentError(
                f"{self.folder / MODEL_FILE} was trained with n_iters {there}, and {METRICS_FILE} has n_iters {here}. "
                "Put back the file that was trained with it."
            )
        model.load_state_dict(weights)
        return model.eval()


def open_run(folder: Path) -> TrainedRun:
    """Return the finished run at `folder`, or the only one below it."""
    found = sorted(path.parent for path in folder.rglob(METRICS_FILE))
    if len(found) != 1:
        reason = "holds no finished run" if not found else f"holds {len(found)} finished runs, such as {found[0]}"
        raise ExperimentError(f"{folder} {reason}; name the folder of one that `sinkformers run` has finished.")
    metrics = records.read(found[0]).metrics
    artefact = catalogue.find(metrics["artefact"])
    preset = None if artefact is None else artefact.presets.get(metrics["preset"])
    if preset is None:
        raise ExperimentError(
            f"{found[0] / METRICS_FILE} is of {metrics['artefact']}, preset {metrics['preset']}, which this version "
            "does not know. Use the version that trained it."
        )
    try:
        config = _config(preset.config, metrics["config"])
    except (KeyError, TypeError) as error:
        raise ExperimentError(
            f"{found[0] / METRICS_FILE} holds no configuration that this version can read ({error}). "
            "Use the version that trained it."
        ) from error
    return TrainedRun(found[0], metrics, config)


def _config(example: Any, values: Mapping[str, Any]) -> Any:
    """Return a configuration like `example` with the values of a record."""
    known = {field.name: values[field.name] for field in fields(example) if field.name in values}
    return replace(example, **{**known, "recipe": replace(example.recipe, **values["recipe"])})


def on(model: nn.Module, *tensors: Tensor) -> list[Tensor]:
    """Return the tensors on the device of the model."""
    device = next(model.parameters()).device
    return [tensor.to(device) for tensor in tensors]
