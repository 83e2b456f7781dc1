"""Figure 6: accuracy on MNIST against patch size, one layer and one head of attention without a feed-forward network.

    sinkformers run figure6 --preset small --data DIR

The paper has no CLS token when it says that both models are equivalent at patch 28, where there is a single patch; its
authors' code has one. `paper` and `small` read out the mean of the patches, `authors` a CLS token. The paper gave the
two arms different learning rates; here every arm is run at both.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from sinkformers.lab.artefacts.artefact import Arm, Artefact, Preset
from sinkformers.lab.data import data_folder, load_digits, load_mnist
from sinkformers.lab.tasks.images import ImageTask, VisionConfig
from sinkformers.lab.workbench.task import Recipe

N_ITERS = 5  # as in the authors' code; the paper is silent
RATES = (1e-3, 2e-3)
PATCHES = (28, 14, 7, 4, 2)

MNIST = VisionConfig(
    Recipe(epochs=45, batch=100, rate=1e-3, drops=(35, 41)),
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


def arms(patches: tuple[int, ...], rates: tuple[float, ...], tied: int | None = None) -> tuple[Arm, ...]:
    """SoftMax and Sinkhorn for every patch and rate; at the patch `tied` also with W_Q = W_K."""
    settings: list[dict[str, Any]] = [
        {"patch": patch, "rate": rate, "n_iters": n_iters}
        for patch in patches
        for rate in rates
        for n_iters in (1, N_ITERS)
    ]
    settings += [{**each, "tie_qk": True} for each in settings if each["patch"] == tied]
    return tuple(Arm(name(each), each) for each in settings)


def name(settings: dict[str, Any]) -> str:
    tied = "-tied" if settings.get("tie_qk") else ""
    return f"patch-{settings['patch']}{tied}-rate-{settings['rate']:g}-n-{settings['n_iters']}"


def task(preset: Preset, arm: Arm, seed: int, data: Path | None) -> ImageTask:
    images = load_digits() if preset.data == "digits" else load_mnist(data_folder(data))
    return ImageTask(preset.config.of(arm.settings), seed, images)


FIGURE6 = Artefact(
    name="figure6",
    title="MNIST accuracy against patch size",
    paper="Sinkformer ahead for small patches, equal at patch 28 (read off a plot; median of 5)",
    presets={
        "paper": Preset(
            "no CLS token, mean pooling; both rates in both arms; n_iters 5",
            "about 19 hours on two cores",
            "mnist",
            (0, 1, 2, 3, 4),
            arms(PATCHES, RATES, tied=7),
            MNIST,
        ),
        "authors": Preset(
            "reads out a CLS token, as the published curve",
            "about 17 hours on two cores",
            "mnist",
            (0, 1, 2, 3, 4),
            arms(PATCHES, RATES),
            replace(MNIST, readout="cls"),
        ),
        "small": Preset(
            "as paper, without patch 2, 3 seeds",
            "about 2 hours on two cores",
            "mnist",
            (0, 1, 2),
            arms(PATCHES[:-1], RATES, tied=7),
            MNIST,
        ),
        "smoke": Preset(
            "scikit-learn's digits, 3 epochs", "seconds", "digits", (0,), arms((8, 4, 2), RATES[:1]), DIGITS
        ),
    },
    task=task,
)
