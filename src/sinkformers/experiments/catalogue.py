"""Every artefact of the paper, in its order."""

from __future__ import annotations

from sinkformers.experiments.artefact import Artefact
from sinkformers.experiments.figure1 import FIGURE1
from sinkformers.experiments.figure2_mnist import FIGURE2_MNIST
from sinkformers.experiments.figure2_points import FIGURE2_POINTS
from sinkformers.experiments.figure2_translation import FIGURE2_TRANSLATION
from sinkformers.experiments.figure3 import FIGURE3
from sinkformers.experiments.figure4 import FIGURE4
from sinkformers.experiments.figure5 import FIGURE5
from sinkformers.experiments.figure6 import FIGURE6
from sinkformers.experiments.table1_pct import TABLE1_PCT
from sinkformers.experiments.table1_set import TABLE1_SET
from sinkformers.experiments.table2 import TABLE2
from sinkformers.experiments.theory.study import THEORY

ARTEFACTS = (
    FIGURE1,
    FIGURE2_MNIST,
    FIGURE2_POINTS,
    FIGURE2_TRANSLATION,
    TABLE1_SET,
    TABLE1_PCT,
    FIGURE3,
    FIGURE4,
    TABLE2,
    FIGURE5,
    FIGURE6,
    THEORY,
)


def find(name: str) -> Artefact | None:
    return next((artefact for artefact in ARTEFACTS if artefact.name == name), None)
