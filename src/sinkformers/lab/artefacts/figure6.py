"""Figure 6: accuracy on MNIST against patch size, one layer and one head of attention without a feed-forward network.

    sinkformers run figure6 --preset small --data DIR

The paper has no CLS token when it says that both models are equivalent at patch 28, where there is a single patch; its
authors' code has one. `paper` and `small` classify the mean of the patches, `authors` a CLS token. The paper uses
different learning rates for the two arms; here every arm is run at both.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinkformers.lab.artefacts.artefact import Arm, Artefact, Preset
from sinkformers.lab.tasks.config import VisionConfig
from sinkformers.lab.workbench.task import Recipe

if TYPE_CHECKING:
    from sinkformers.lab.tasks.images import ImageTask

N_ITERS = 5  # as in the authors' code; the paper does not state it
RATES = (1e-3, 2e-3)
PATCHES = (28, 14, 7, 4, 2)
LIMIT_PATCHES = (14, 7, 4)

MNIST = VisionConfig(
    recipe=Recipe(epochs=45, batch=100, rate=1e-3, drops=(35, 41)),
    image=28,
    patch=7,
    dim=128,
    depth=1,
    heads=1,
    head_dim=64,
    mlp_dim=0,
    readout="mean",
)
DIGITS = replace(
    MNIST, recipe=Recipe(epochs=3, batch=100, rate=1e-3, drops=(2,)), image=8, patch=2, dim=32, head_dim=16
)


def arms(
    patches: tuple[int, ...], rates: tuple[float, ...], tied: int | None = None, limit: tuple[int, ...] = ()
) -> tuple[Arm, ...]:
    """Return SoftMax and Sinkhorn arms for every patch size and rate; for the patch size `tied` also with W_Q = W_K.

    The patch sizes in `limit` also have arms at the limit of Sinkhorn's algorithm.
    """
    settings: list[dict[str, Any]] = [
        {"patch": patch, "rate": rate, "n_iters": n_iters}
        for patch in patches
        for rate in rates
        for n_iters in (1, N_ITERS)
    ]
    settings += [{**each, "tie_qk": True} for each in settings if each["patch"] == tied]
    settings += [{"patch": patch, "rate": rate, "n_iters": math.inf} for patch in limit for rate in rates]
    return tuple(Arm(name(each), each) for each in settings)


def name(settings: dict[str, Any]) -> str:
    """Return the name of an arm."""
    tied = "-tied" if settings.get("tie_qk") else ""
    return f"patch-{settings['patch']}{tied}-rate-{settings['rate']:g}-n-{settings['n_iters']}"


def task(preset: Preset, arm: Arm, seed: int, data: Path | None) -> ImageTask:
    """Return the task of an arm."""
    from sinkformers.lab.data import data_folder, load_digits, load_mnist
    from sinkformers.lab.tasks.images import ImageTask

    images = load_digits() if preset.data == "digits" else load_mnist(data_folder(data))
    return ImageTask(preset.config.with_settings(arm.settings), seed, images)


FIGURE6 = Artefact(
    name="figure6",
    title="MNIST accuracy against patch size",
    paper="Sinkformer ahead for small patches, equal at patch 28 (read off a plot; median of 5)",
    presets={
        "paper": Preset(
            about="no CLS token, mean pooling; both rates in both arms; n_iters 5",
            takes="about 19 hours on two cores",
            data="mnist",
            seeds=(0, 1, 2, 3, 4),
            arms=arms(PATCHES, RATES, tied=7),
            config=MNIST,
        ),
        "authors": Preset(
            about="reads out a CLS token, as the published curve; n_iters 1, 5 and ∞",
            takes="about 17 hours on two cores",
            data="mnist",
            seeds=(0, 1, 2, 3, 4),
            arms=arms(PATCHES, RATES, limit=LIMIT_PATCHES),
            config=replace(MNIST, readout="cls"),
        ),
        "small": Preset(
            about="as paper, without patch 2, 3 seeds; also n_iters ∞",
            takes="about 3 hours on two cores",
            data="mnist",
            seeds=(0, 1, 2),
            arms=arms(PATCHES[:-1], RATES, tied=7, limit=LIMIT_PATCHES),
            config=MNIST,
        ),
        "smoke": Preset(
            about="scikit-learn's digits, 3 epochs",
            takes="seconds",
            data="digits",
            seeds=(0,),
            arms=arms((8, 4, 2), RATES[:1]),
            config=DIGITS,
        ),
    },
    task=task,
)
