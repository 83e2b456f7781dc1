"""Every artefact of the paper, in its order; those without presets are planned."""

from __future__ import annotations

from sinkformers.experiments.artefact import Artefact
from sinkformers.experiments.figure1 import FIGURE1
from sinkformers.experiments.figure2_mnist import FIGURE2_MNIST
from sinkformers.experiments.figure5 import FIGURE5
from sinkformers.experiments.figure6 import FIGURE6
from sinkformers.experiments.theory.study import THEORY

ARTEFACTS = (
    FIGURE1,
    FIGURE2_MNIST,
    Artefact("figure2-points", "Column sums while a Point Cloud Transformer trains", "most columns drift to 1"),
    Artefact("figure2-translation", "Column sums while a translation model trains", "most columns drift to 1"),
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
    Artefact("figure4", "IMDb: learning curves of a text Transformer and its Sinkformer", "a plot; epoch +8 %"),
    Artefact(
        "table2",
        "IWSLT'14 German to English: a trained Transformer turned into a Sinkformer",
        "BLEU 34.43, un-adapted 33.81, then 34.68 against 34.73 (median of 6); epoch +2.4 %",
    ),
    FIGURE5,
    FIGURE6,
    THEORY,
)


def find(name: str) -> Artefact | None:
    return next((artefact for artefact in ARTEFACTS if artefact.name == name), None)
