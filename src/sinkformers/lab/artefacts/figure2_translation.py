"""Figure 2, translation panel: the column sums of the encoder's attention while a translation model trains.

    sinkformers run figure2-translation --preset small --data DIR

The model is that of Table 2. Epoch 0 is before training; the paper's plot starts later. The Sinkformer, trained from
the beginning, stands beside the Transformer.
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
            "IWSLT'14 by fairseq's transformer_iwslt_de_en, 30 epochs",
            "some GPU-hours",
            "iwslt14",
            (0,),
            arms(1),
            table2.PAPER,
            metric="bleu_tokenised",
        ),
        "small": Preset(
            "Multi30k, 3 + 3 layers, dim 256, 12 epochs, the Sinkformer beside it",
            "about 2 hours on two cores",
            "multi30k",
            (0, 1),
            arms(1, table2.N_ITERS),
            table2.SMALL,
            floor=33.0,
        ),
        "smoke": Preset(
            "generated number words, 2 epochs",
            "about a minute",
            "",
            (0,),
            arms(1, table2.N_ITERS),
            replace(table2.NUMBERS, recipe=replace(table2.NUMBERS.recipe, epochs=2)),
        ),
    },
    task=table2.task,
    twins=("table2",),
)
