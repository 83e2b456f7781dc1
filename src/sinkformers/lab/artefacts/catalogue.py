"""Every artefact of the paper, in its order, and the experiments that it does not have."""

from __future__ import annotations

from sinkformers.lab.artefacts.artefact import Artefact
from sinkformers.lab.artefacts.causal_lm import CAUSAL_LM
from sinkformers.lab.artefacts.digits import DIGITS
from sinkformers.lab.artefacts.figure1 import FIGURE1
from sinkformers.lab.artefacts.figure2_mnist import FIGURE2_MNIST
from sinkformers.lab.artefacts.figure2_points import FIGURE2_POINTS
from sinkformers.lab.artefacts.figure2_translation import FIGURE2_TRANSLATION
from sinkformers.lab.artefacts.figure3 import FIGURE3
from sinkformers.lab.artefacts.figure4 import FIGURE4
from sinkformers.lab.artefacts.figure5 import FIGURE5
from sinkformers.lab.artefacts.figure6 import FIGURE6
from sinkformers.lab.artefacts.table1_pct import TABLE1_PCT
from sinkformers.lab.artefacts.table1_set import TABLE1_SET
from sinkformers.lab.artefacts.table2 import TABLE2
from sinkformers.lab.artefacts.theory import THEORY

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
    CAUSAL_LM,
    DIGITS,
)


def find(name: str) -> Artefact | None:
    """Return the artefact of this name, or None."""
    return next((artefact for artefact in ARTEFACTS if artefact.name == name), None)
