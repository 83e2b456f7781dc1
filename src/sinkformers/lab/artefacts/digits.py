"""The first experiment: a Transformer and its Sinkformers learn scikit-learn's digits, in minutes, without a download.

    sinkformers run digits

It is not in the paper. The model is the smallest in which every row of an attention matrix matters: two layers, read
out at a CLS token. (With one layer the CLS token reads its own row only; and the mean over the tokens after a converged
layer does not depend on its weights, because its columns sum to one.) The counts of iterations are SoftMax, the
library's default and the limit.
"""

from __future__ import annotations

import math
from dataclasses import replace

from sinkformers.lab.artefacts import figure6
from sinkformers.lab.artefacts.artefact import Arm, Artefact, Preset
from sinkformers.lab.tasks.config import VisionConfig
from sinkformers.lab.workbench.task import Recipe

ARMS = tuple(Arm(f"n-{n}", {"n_iters": n}) for n in (1, 3, math.inf))

CONFIG = VisionConfig(
    recipe=Recipe(epochs=30, batch=50, rate=1e-3, drops=(24,)),
    image=8,
    patch=2,
    dim=64,
    depth=2,
    heads=1,
    head_dim=32,
    mlp_dim=128,
    readout="cls",
)

DIGITS = Artefact(
    name="digits",
    title="A Transformer and its Sinkformers read handwritten digits",
    paper="",
    presets={
        "small": Preset(
            about="a ViT of two layers on the 1,797 digits that come with scikit-learn, 30 epochs, 5 seeds",
            takes="about 3 minutes on two cores",
            data="digits",
            seeds=(0, 1, 2, 3, 4),
            arms=ARMS,
            config=CONFIG,
        ),
        "smoke": Preset(
            about="a ViT of two layers on the 1,797 digits that come with scikit-learn, 2 epochs, 1 seed",
            takes="seconds",
            data="digits",
            seeds=(0,),
            arms=ARMS,
            config=replace(CONFIG, recipe=replace(CONFIG.recipe, epochs=2, drops=())),
        ),
    },
    task=figure6.task,
)
