"""Figure 2, translation panel: the column sums of the encoder's attention while a translation model trains.

    sinkformers run figure2-translation --preset small --data DIR

The model is that of Table 2. Epoch 0 is before training; the paper's plot starts later. The Transformer is compared
with a Sinkformer that is trained from scratch.
"""

from __future__ import annotations

from dataclasses import replace

from sinkformers.lab.artefacts import table2
from sinkformers.lab.artefacts.artefact import Arm, Artefact, Preset


def arms(*n_iters: int) -> tuple[Arm, ...]:
    return tuple(Arm(f"n-{n}", {"n_iters": n}) for n in n_iters)


FIGURE2_TRANSLATION = Artefact(
    name="figure2-translation",
    title="Column sums of the encoder's attention while a translation model trains",
    paper="most columns drift to 1 (a plot)",
    metric="bleu",
    presets={
        "paper": Preset(
            about="IWSLT'14 by fairseq's transformer_iwslt_de_en, 30 epochs",
            takes="some GPU-hours",
            data="iwslt14",
            seeds=(0,),
            arms=arms(1),
            config=table2.PAPER,
            metric="bleu_tokenised",
        ),
        "small": Preset(
            about="Multi30k, 3 + 3 layers, dim 256, 12 epochs, the Sinkformer beside it",
            takes="about 2 hours on two cores",
            data="multi30k",
            seeds=(0, 1),
            arms=arms(1, table2.N_ITERS),
            config=table2.SMALL,
            floor=33.0,
        ),
        "smoke": Preset(
            about="generated number words, 2 epochs",
            takes="about a minute",
            data="",
            seeds=(0,),
            arms=arms(1, table2.N_ITERS),
            config=replace(table2.NUMBERS, recipe=replace(table2.NUMBERS.recipe, epochs=2)),
        ),
    },
    task=table2.task,
    identical_runs_in=("table2",),
)
