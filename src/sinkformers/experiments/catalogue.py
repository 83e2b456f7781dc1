"""Every artefact of the paper, in its order; those without presets are planned."""

from __future__ import annotations

from sinkformers.experiments.artefact import Artefact
from sinkformers.experiments.figure1 import FIGURE1
from sinkformers.experiments.figure2_mnist import FIGURE2_MNIST
from sinkformers.experiments.figure2_points import FIGURE2_POINTS
from sinkformers.experiments.figure3 import FIGURE3
from sinkformers.experiments.figure5 import FIGURE5
from sinkformers.experiments.figure6 import FIGURE6
from sinkformers.experiments.table1_pct import TABLE1_PCT
from sinkformers.experiments.table1_set import TABLE1_SET

ARTEFACTS = (
    FIGURE1,
    FIGURE2_MNIST,
    FIGURE2_POINTS,
    Artefact("figure2-translation", "Column sums while a translation model trains", "most columns drift to 1"),
    TABLE1_SET,
    TABLE1_PCT,
    FIGURE3,
    Artefact("figure4", "IMDb: learning curves of a text Transformer and its Sinkformer", "a plot; epoch +8 %"),
    Artefact(
        "table2",
        "IWSLT'14 German to English: a trained Transformer turned into a Sinkformer",
        "BLEU 34.43, un-adapted 33.81, then 34.68 against 34.73 (median of 6); epoch +2.4 %",
    ),
    FIGURE5,
    FIGURE6,
    Artefact("theory", "Flows, energies and limits in numbers", "propositions and a theorem"),
)


def find(name: str) -> Artefact | None:
    return next((artefact for artefact in ARTEFACTS if artefact.name == name), None)
