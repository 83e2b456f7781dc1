"""Every artefact of the paper, in its order; those without presets are planned."""

from __future__ import annotations

from sinkformers.experiments.artefact import Artefact
from sinkformers.experiments.figure1 import FIGURE1
from sinkformers.experiments.figure2_mnist import FIGURE2_MNIST
from sinkformers.experiments.figure2_translation import FIGURE2_TRANSLATION
from sinkformers.experiments.figure4 import FIGURE4
from sinkformers.experiments.figure5 import FIGURE5
from sinkformers.experiments.figure6 import FIGURE6
from sinkformers.experiments.table2 import TABLE2

ARTEFACTS = (
    FIGURE1,
    FIGURE2_MNIST,
    Artefact("figure2-points", "Column sums while a Point Cloud Transformer trains", "most columns drift to 1"),
    FIGURE2_TRANSLATION,
    Artefact(
        "table1-set",
        "ModelNet40: Set Transformer and Set Sinkformer",
        "best/median/mean/worst of 4 runs: 87.8/86.3/85.8/84.7 against 89.1/88.4/88.3/88.1",
    ),
    Artefact(
        "table1-pct",
        "ModelNet40: Point Cloud Transformer and Point Cloud Sinkformer",
        "best/median/mean/worst of 4 runs: 93.2/92.5/92.5/92.3 against 93.1/92.8/92.7/92.5",
    ),
    Artefact("figure3", "ModelNet40: learning curves of Set Sinkformers by n_iters", "a plot"),
    FIGURE4,
    TABLE2,
    FIGURE5,
    FIGURE6,
    Artefact("theory", "Flows, energies and limits in numbers", "propositions and a theorem"),
)


def find(name: str) -> Artefact | None:
    return next((artefact for artefact in ARTEFACTS if artefact.name == name), None)
