"""Classification of images by a ViT, for Figures 2, 5 and 6."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinkformers.lab.data import Images, ImageSet
from sinkformers.lab.tasks.classification import entropy, hits, measured
from sinkformers.lab.tasks.config import VisionConfig
from sinkformers.lab.workbench.observation import observe
from sinkformers.models import ViT

if TYPE_CHECKING:
    from accelerate import Accelerator

OBSERVED = 256  # test images on which attention is measured
EVALUATED = 500  # test images at a time
EXAMPLES = 10  # images kept with a trained model


class ImageTask:
    """Train a ViT on the training images, evaluate it on all test images without augmentation."""

    def __init__(self, config: VisionConfig, seed: int, images: ImageSet) -> None:
        self.config, self.seed, self.images = config, seed, images
        self.recipe = config.recipe
        sample = images.train.pixels[:: max(1, len(images.train.pixels) // 5000)].double() / 255
        axes = (0, 2, 3)
        self.mean, self.std = (x.float() for x in (sample.mean(axes, keepdim=True), sample.std(axes, keepdim=True)))

    @property
    def facts(self) -> dict[str, Any]:
        sizes = {"train": len(self.images.train.labels), "test": len(self.images.test.labels)}
        return {"config": asdict(self.config), "data": {"name": self.images.name, **sizes}}

    def files(self) -> dict[str, bytes]:
        """Return the classes, the statistics of pixels, and one test image per class, to try the model on."""
        statistics = {"mean": self.mean.flatten().tolist(), "std": self.std.flatten().tolist()}
        files = {"classes.json": json.dumps(self.images.classes), "pixels.json": json.dumps(statistics)}
        return {name: text.encode() for name, text in files.items()} | examples(self.images)

    def model(self) -> nn.Module:
        return new_model(self.config, self.images.train.pixels.shape[1], len(self.images.classes))

    def batches(self, epoch: int) -> Sequence[Tensor]:
        order = torch.Generator().manual_seed(1_000_003 * self.seed + epoch)
        return torch.randperm(len(self.images.train.labels), generator=order).split(self.recipe.batch)

    def losses(self, model: nn.Module, examples: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        pixels, labels = self._take(self.images.train, examples, model)
        if self.config.crop is not None:
            pixels = random_crop(pixels, self.config.crop)
        logits = model(pixels)
        return entropy(logits, labels), {"accuracy": hits(logits, labels)}

    def weight(self, examples: Tensor) -> float:
        return len(examples)

    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        n = len(self.images.test.labels)
        mine = torch.arange(n)[accelerator.process_index :: accelerator.num_processes]

        def answer(examples: Tensor) -> tuple[Tensor, Tensor]:
            pixels, labels = self._take(self.images.test, examples, model)
            return model(pixels), labels

        return measured(answer, mine.split(EVALUATED), n, accelerator)

    def observe(self, model: nn.Module) -> dict[str, Any]:
        sample = torch.arange(min(OBSERVED, len(self.images.test.labels)))
        return observe(model, lambda: model(self._take(self.images.test, sample, model)[0]))

    def _take(self, images: Images, examples: Tensor, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Return standardised pixels and labels, on the device of the model."""
        device = next(model.parameters()).device
        pixels = (images.pixels[examples].to(device).float() / 255 - self.mean.to(device)) / self.std.to(device)
        return pixels, images.labels[examples].to(device)


def new_model(config: VisionConfig, channels: int, classes: int) -> nn.Module:
    """Return a new model of images with so many channels."""
    return ViT(
        image=config.image,
        patch=config.patch,
        channels=channels,
        classes=classes,
        dim=config.dim,
        depth=config.depth,
        heads=config.heads,
        head_dim=config.head_dim,
        mlp_dim=config.mlp_dim,
        readout=config.readout,  # pyright: ignore[reportArgumentType]  (checked there)
        n_iters=config.n_iters,
        tie_qk=config.tie_qk,
    )


def examples(images: ImageSet) -> dict[str, bytes]:
    """Return the first test image of each class, at most ten, as PNG files by name."""
    from PIL import Image

    found: dict[str, bytes] = {}
    for label, name in list(enumerate(images.classes))[:EXAMPLES]:
        places = (images.test.labels == label).nonzero().flatten()
        if len(places):
            pixels = images.test.pixels[places[0]].movedim(0, -1).squeeze(-1)
            file = io.BytesIO()
            Image.fromarray(pixels.numpy()).save(file, "PNG")
            found[f"example-{re.sub(r'[^A-Za-z0-9]+', '-', name)}.png"] = file.getvalue()
    return found


def random_crop(pixels: Tensor, share: tuple[float, float]) -> Tensor:
    """Return a random crop of each image (batch, channels, h, w), resized to (h, w), and flipped with probability ½.

    The area of the crop is uniform between the two shares given, its aspect ratio log-uniform between 3/4 and 4/3, and
    its position uniform.
    """
    n, device = len(pixels), pixels.device
    draw = torch.rand(5, n, device=device)
    area = share[0] + (share[1] - share[0]) * draw[0]
    ratio = torch.exp((2 * draw[1] - 1) * torch.log(torch.tensor(4 / 3)))
    width, height = (area * ratio).sqrt().clamp(max=1.0), (area / ratio).sqrt().clamp(max=1.0)
    flip = torch.where(draw[4] < 0.5, -1.0, 1.0)
    # The centre of the crop, in coordinates from −1 to 1.
    x, y = (2 * draw[2] - 1) * (1 - width), (2 * draw[3] - 1) * (1 - height)
    none = torch.zeros_like(x)
    theta = torch.stack([torch.stack([width * flip, none, x], -1), torch.stack([none, height, y], -1)], 1)
    grid = F.affine_grid(theta, list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
