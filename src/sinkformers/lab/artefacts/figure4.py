"""Figure 4: IMDb, learning curves of a text Transformer and its Sinkformer.

    sinkformers run figure4 --preset small --data DIR

The vocabulary is byte-level BPE, learned from the training reviews; the authors' is a SentencePiece model of as many
pieces. `authors` follows their code where it differs from the paper; `tasks/texts_authors.py` lists the differences.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sinkformers.lab.artefacts.artefact import Arm, Artefact, Preset
from sinkformers.lab.tasks.config import TextConfig
from sinkformers.lab.workbench.task import Recipe

if TYPE_CHECKING:
    from sinkformers.lab.tasks.texts import TextTask

N_ITERS = 3
ARMS = tuple(Arm(f"n-{n}", {"n_iters": n}) for n in (1, N_ITERS))
LIMIT = Arm("n-inf", {"n_iters": math.inf})

PAPER = TextConfig(
    recipe=Recipe(epochs=15, batch=32, rate=1e-4, drops=(12,)),
    vocabulary=16_000,
    length=512,
    dim=256,
    depth=6,
    heads=8,
    hidden=1024,
)
AUTHORS = replace(PAPER, recipe=replace(PAPER.recipe, drops=(11,)), authors=True)
SMALL = replace(
    PAPER,
    recipe=Recipe(epochs=8, batch=32, rate=3e-4, drops=(6,)),
    vocabulary=8_000,
    length=192,
    dim=64,
    depth=3,
    heads=4,
    hidden=128,
    lower=True,
)
OPINIONS = replace(
    PAPER,
    recipe=Recipe(epochs=8, batch=32, rate=3e-3, drops=(6,)),
    vocabulary=400,
    length=32,
    dim=32,
    depth=2,
    heads=2,
    hidden=64,
)


def task(preset: Preset, arm: Arm, seed: int, data: Path | None) -> TextTask:
    """Return the task of an arm."""
    from sinkformers.lab.data import data_folder, load_imdb, load_opinions
    from sinkformers.lab.tasks.texts import TextTask
    from sinkformers.lab.tasks.texts_authors import AuthorsTask, merged

    texts = load_imdb(data_folder(data)) if preset.data == "imdb" else load_opinions()
    config = preset.config.with_settings(arm.settings)
    return AuthorsTask(config, seed, merged(texts)) if config.authors else TextTask(config, seed, texts)


FIGURE4 = Artefact(
    name="figure4",
    title="IMDb: learning curves of a text Transformer and its Sinkformer",
    paper='"a gain in accuracy when using a Sinkformer" (a plot); epoch 4m02 against 4m22',
    presets={
        "paper": Preset(
            about="25,000 reviews to train on and 25,000 to test with, 512 tokens, depth 6, 8 heads, 15 epochs",
            takes="hours on a GPU",
            data="imdb",
            seeds=(0, 1, 2, 3, 4),
            arms=ARMS,
            config=PAPER,
        ),
        "authors": Preset(
            about="as the authors' code: 40,000/10,000 reviews, noise for positions, detached potential, SoftMax twice",
            takes="hours on a GPU",
            data="imdb",
            seeds=(0, 1, 2, 3, 4),
            arms=ARMS,
            config=AUTHORS,
        ),
        "small": Preset(
            about="all reviews, the first 192 tokens of each; depth 3, 4 heads, dim 64, 8 epochs",
            takes="about an hour on two cores",
            data="imdb",
            seeds=(0, 1, 2),
            arms=(*ARMS, LIMIT),
            config=SMALL,
            floor=0.80,
        ),
        "smoke": Preset(
            about="generated opinions, 8 epochs", takes="seconds", data="", seeds=(0,), arms=ARMS, config=OPINIONS
        ),
    },
    task=task,
)
