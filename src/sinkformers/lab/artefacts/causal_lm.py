"""Causal language models: SoftMax and Sinkhorn attention with rows in order. This experiment is not in the paper.

    sinkformers run causal-lm --preset small --data DIR
    sinkformers run causal-lm --preset recall

`small` predicts the next byte of IMDb's reviews. Streaming attention shows how many queries came before, and so reveals
positions; with learned positions that alone looks like a gain. Every comparison is therefore made with rotary positions
too. The arms `short-*` have texts of 64 bytes, for the prefix definition, which costs n³.
`recall` looks up values by their keys.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinkformers.lab.artefacts.artefact import Arm, Artefact, Preset
from sinkformers.lab.tasks.config import LanguageConfig
from sinkformers.lab.workbench.task import WarmRecipe

if TYPE_CHECKING:
    from sinkformers.lab.tasks.language import LanguageTask

N_ITERS = 3
SHORT = 64  # bytes

SMALL = LanguageConfig(
    recipe=WarmRecipe(epochs=8, batch=16, rate=2e-3, warmup=100),
    steps=100,
    length=192,
    dim=128,
    depth=3,
    heads=4,
    hidden=256,
    tested=384,
)
RECALL = replace(
    SMALL,
    recipe=WarmRecipe(epochs=30, batch=64, rate=5e-3, warmup=100),
    length=15,
    dim=64,
    depth=2,
    heads=2,
    hidden=128,
    vocabulary=64,
    pairs=4,
)
OPINIONS = replace(
    SMALL,
    recipe=WarmRecipe(epochs=3, batch=16, rate=3e-3, warmup=20),
    steps=20,
    length=64,
    dim=32,
    depth=2,
    heads=2,
    hidden=64,
    tested=64,
)


def arms(name: str, *variants: dict[str, Any], **settings: Any) -> tuple[Arm, ...]:
    """Return a SoftMax arm, and one Sinkformer arm for each of the variants, which add settings."""
    found = [Arm(f"{name}-n-1", {**settings, "n_iters": 1})]
    for variant in variants:
        added = "".join(f"-{value}" if key == "causal" else f"-{key}-{value}" for key, value in variant.items())
        found.append(Arm(f"{name}{added}-n-{N_ITERS}", {**settings, **variant, "n_iters": N_ITERS}))
    return tuple(found)


TAU = ({}, {"tau": 0.5}, {"tau": "learned"})
ALL = arms("rotary", *TAU, {"causal": "prefix"}, positions="rotary")
ARMS = (
    *arms("rotary", *TAU, positions="rotary"),
    *arms("learned", {}, positions="learned"),
    *arms("short", {}, {"causal": "prefix"}, positions="rotary", length=SHORT, batch=48),
)


def task(preset: Preset, arm: Arm, seed: int, data: Path | None) -> LanguageTask:
    """Return the task of an arm."""
    from sinkformers.lab.data import data_folder, load_imdb, load_opinions, load_recall
    from sinkformers.lab.tasks.language import RecallTask, TextTask

    config = preset.config.with_settings(arm.settings)
    if config.pairs is not None:
        return RecallTask(config, seed, load_recall(config.pairs))
    return TextTask(config, seed, load_imdb(data_folder(data)) if preset.data == "imdb" else load_opinions())


CAUSAL_LM = Artefact(
    name="causal-lm",
    title="Causal language models: SoftMax, and Sinkhorn with rows in order",
    paper="not in the paper, which has no causal attention",
    metric="bits_per_byte",
    presets={
        "small": Preset(
            about="IMDb's reviews byte by byte, 192 bytes, depth 3, 4 heads, dim 128, 800 steps",
            takes="about 90 minutes on one core",
            data="imdb",
            seeds=(0, 1, 2),
            arms=ARMS,
            config=SMALL,
        ),
        "recall": Preset(
            about="generated associative recall: 4 pairs of a key and a value, depth 2, 2 heads, dim 64, 3,000 steps",
            takes="about half an hour on one core",
            seeds=(0, 1, 2),
            arms=(
                *arms("rotary", *TAU, {"causal": "prefix"}, positions="rotary"),
                *arms("learned", {}, positions="learned"),
            ),
            config=RECALL,
            metric="accuracy",
        ),
        "smoke": Preset(
            about="generated opinions byte by byte, 60 steps",
            takes="seconds",
            seeds=(0,),
            arms=ALL,
            config=OPINIONS,
        ),
    },
    task=task,
    equal_time=True,
)
