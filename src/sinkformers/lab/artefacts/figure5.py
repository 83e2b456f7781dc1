"""Figure 5: cats and dogs, learning curves of a ViT and its Sinkformer.

    sinkformers run figure5 --preset small --data DIR

The authors' code also crops and flips validation images at random. Here test images are not changed, and `authors`
differs from `paper` only in the learning rate.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sinkformers.lab.artefacts.artefact import Arm, Artefact, Preset
from sinkformers.lab.tasks.config import VisionConfig
from sinkformers.lab.workbench.task import Recipe

if TYPE_CHECKING:
    from sinkformers.lab.tasks.images import ImageTask

N_ITERS = 3
ARMS = tuple(Arm(f"n-{n}", {"n_iters": n}) for n in (1, N_ITERS))
LIMIT = Arm("n-inf", {"n_iters": math.inf})

PAPER = VisionConfig(
    recipe=Recipe(epochs=300, batch=64, rate=5e-5, drops=(250,)),
    image=224,
    patch=16,
    dim=128,
    depth=6,
    heads=8,
    head_dim=64,
    mlp_dim=128,
    readout="cls",
    crop=(0.08, 1.0),
)
SMALL = replace(
    PAPER,
    recipe=Recipe(epochs=20, batch=64, rate=5e-4, drops=(17,)),
    image=64,
    patch=8,
    head_dim=16,
    mlp_dim=256,
    crop=(0.5, 1.0),
)
DIGITS = replace(
    PAPER,
    recipe=Recipe(epochs=2, batch=64, rate=1e-3),
    image=8,
    patch=2,
    dim=32,
    depth=2,
    heads=2,
    head_dim=16,
    mlp_dim=32,
    crop=None,
)


def task(preset: Preset, arm: Arm, seed: int, data: Path | None) -> ImageTask:
    """Return the task of an arm."""
    from sinkformers.lab.data import data_folder, load_digits, load_dogs_vs_cats
    from sinkformers.lab.tasks.images import ImageTask

    images = load_digits() if preset.data == "digits" else load_dogs_vs_cats(data_folder(data), preset.config.image)
    return ImageTask(preset.config.with_settings(arm.settings), seed, images)


FIGURE5 = Artefact(
    name="figure5",
    title="Cats and dogs: a ViT and its Sinkformer",
    paper="median 79.0 % against 79.5 %, best 80.0 % against 80.5 % (5 runs); epoch 3m20 against 3m25",
    paper_numbers={"n-1": {"median": 0.790, "best": 0.800}, "n-3": {"median": 0.795, "best": 0.805}},
    presets={
        "paper": Preset(
            about="25,000 images at 224 px, depth 6, 8 heads, 300 epochs",
            takes="a GPU-day",
            data="dogs-vs-cats",
            seeds=(0, 1, 2, 3, 4),
            arms=ARMS,
            config=PAPER,
        ),
        "authors": Preset(
            about="as paper, at the rate of the authors' code, 3e-5",
            takes="a GPU-day",
            data="dogs-vs-cats",
            seeds=(0, 1, 2, 3, 4),
            arms=ARMS,
            config=replace(PAPER, recipe=replace(PAPER.recipe, rate=3e-5)),
        ),
        "small": Preset(
            about="10,000 images at 64 px, patch 8, 20 epochs",
            takes="about 70 minutes on two cores",
            data="dogs-vs-cats",
            seeds=(0, 1, 2),
            arms=(*ARMS, LIMIT),
            config=SMALL,
            floor=0.70,
        ),
        "smoke": Preset(
            about="scikit-learn's digits, 2 epochs",
            takes="seconds",
            data="digits",
            seeds=(0,),
            arms=ARMS,
            config=DIGITS,
        ),
    },
    task=task,
)
