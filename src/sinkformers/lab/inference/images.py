"""Classification of an image, with the attention of the model between its patches."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sinkformers import watch_attention
from sinkformers.lab.artefacts.artefact import METRICS_FILE, ExperimentError, retrain_hint
from sinkformers.lab.data.formats.image_files import read_image
from sinkformers.lab.inference.trained import TrainedRun, on
from sinkformers.lab.tasks.config import VisionConfig
from sinkformers.lab.tasks.images import new_model

PIXELS_FILE = "pixels.json"


@dataclass(frozen=True)
class PatchAttention:
    """Weights (tokens, tokens) of a layer, the mean over its heads.

    The tokens are the patches of the image, row by row, after `extra` others: one for a CLS token.
    """

    layer: str
    weights: Tensor
    extra: int

    @property
    def received(self) -> Tensor:
        """The attention that each patch receives, (side, side); 1 is an even share."""
        patches = self.weights.sum(0)[self.extra :]
        side = round(len(patches) ** 0.5)
        return patches.view(side, side)


@dataclass(frozen=True)
class ImagePrediction:
    """An image, uint8 (channels, size, size), as the model saw it, and its classes, the most probable first."""

    file: Path
    pixels: Tensor
    classes: list[tuple[str, float]]
    attention: PatchAttention


class ImageClassifier:
    """A trained classifier of images."""

    def __init__(self, run: TrainedRun) -> None:
        self.config, self.names = _config(run), run.classes()
        if not (run.folder / PIXELS_FILE).exists():
            raise ExperimentError(
                f"{run.folder} was trained by a version that did not save the mean and deviation of the pixels "
                f"({PIXELS_FILE}), and images cannot be prepared without them. {retrain_hint(run.folder)}"
            )
        self.mean, self.std = run.file(PIXELS_FILE, _statistics)
        self.channels = len(self.mean)
        self.model = run.load_into(new_model(self.config, self.channels, len(self.names)))

    @torch.no_grad()
    def predict(self, file: Path, *, layer: str | None = None, invert: bool = False) -> ImagePrediction:
        """Classify the image in a file. `layer` selects the layer whose attention is returned, by default the last.

        `invert` exchanges dark and light, for drawings with dark ink on a model that was trained on light ink.
        """
        pixels = self.read(file, invert=invert)
        likely = self.model(*on(self.model, self.standardised(pixels)))[0].softmax(-1).cpu()
        order = likely.argsort(descending=True, stable=True).tolist()
        classes = [(self.names[number], float(likely[number])) for number in order]
        return ImagePrediction(file, pixels, classes, self.attention(pixels, layer))

    def read(self, file: Path, *, invert: bool = False) -> Tensor:
        """Return the pixels of an image as the model sees them, uint8 (channels, size, size)."""
        pixels, _ = read_image(file, size=self.config.image, channels=self.channels)
        return 255 - pixels if invert else pixels

    def doubts(self, file: Path, *, invert: bool = False) -> list[str]:
        """Return warnings about an answer."""
        pixels, (width, height) = read_image(file, size=self.config.image, channels=self.channels)
        size, found = self.config.image, []
        if (width, height) != (size, size):
            cut = "" if width == height else "the square in the middle of "
            found.append(f"{cut}{file.name}, {width} × {height}, is resized to {size} × {size} for this model.")
        bright = float(pixels.double().mean()) / 255
        bright = 1 - bright if invert else bright
        trained = float(self.mean.mean())
        if self.channels == 1 and abs(bright - trained) > abs(1 - bright - trained) + 0.1:
            ground, exchange = ("dark" if trained < 0.5 else "light"), ("without" if invert else "with")
            found.append(
                f"{file.name} has a brightness of {bright:.2f}, and the images that the model learned from "
                f"{trained:.2f}: if its ground should be {ground}, try {exchange} --invert."
            )
        return found

    def standardised(self, pixels: Tensor) -> Tensor:
        """Return pixels, uint8 (channels, size, size), as a batch of one."""
        return ((pixels.float() / 255 - self.mean[:, None, None]) / self.std[:, None, None])[None]

    def attention(self, pixels: Tensor, layer: str | None = None) -> PatchAttention:
        """Return the attention of a layer, by default the last."""
        return patch_attention(self.model, self.standardised(pixels), self.config, layer)


def initial_model(run: TrainedRun, channels: int) -> nn.Module:
    """Return the model of a run as it was before training: its seed determines it."""
    torch.manual_seed(run.metrics["seed"])
    return new_model(_config(run), channels, len(run.classes())).eval()


@torch.no_grad()
def patch_attention(model: nn.Module, batch: Tensor, config: VisionConfig, layer: str | None = None) -> PatchAttention:
    """Return the attention of a layer of `model` for a batch of one image. It runs a copy, which is watched."""
    model = copy.deepcopy(model)
    with watch_attention(model, keep_weights=True) as watch:
        model(*on(model, batch))
    seen = {name: each.calls[0].weights for name, each in watch.items() if each.calls}
    if layer is not None and layer not in seen:
        raise ExperimentError(f"there is no layer {layer!r}. Choose one of {', '.join(seen)}.")
    name = layer or list(seen)[-1]
    weights = seen[name]
    assert weights is not None
    return PatchAttention(name, weights[0].mean(0).cpu(), 1 if config.readout == "cls" else 0)


def _config(run: TrainedRun) -> VisionConfig:
    if not isinstance(run.config, VisionConfig):
        raise ExperimentError(f"{run.folder / METRICS_FILE} is not of a model of images; name another run.")
    return run.config


def _statistics(text: str) -> tuple[Tensor, Tensor]:
    values: Any = json.loads(text)
    mean, std = (torch.tensor(values[name], dtype=torch.float32) for name in ("mean", "std"))
    if mean.ndim != 1 or mean.shape != std.shape or len(mean) not in (1, 3) or not (std > 0).all():
        raise ValueError("mean and std must be lists of 1 or 3 numbers, std above 0")
    return mean, std
