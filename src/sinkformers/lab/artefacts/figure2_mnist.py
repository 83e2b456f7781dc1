"""Figure 2, MNIST panel: the column sums of SoftMax attention while a ViT trains.

    sinkformers run figure2-mnist --preset small --data DIR

The paper finds that "the learning process makes the attention matrices more and more doubly stochastic". Its plot
starts after the first epoch; here epoch 0 is before training. The model is the one-layer ViT of Figure 6, with a CLS
token and with mean pooling, and is compared with the Sinkformer.
"""

from __future__ import annotations

from dataclasses import replace

from sinkformers.lab.artefacts import figure6
from sinkformers.lab.artefacts.artefact import Arm, Artefact, Preset
from sinkformers.lab.workbench.task import Recipe


def arms(n_iters: tuple[int, ...]) -> tuple[Arm, ...]:
    return tuple(
        Arm(f"{readout}-n-{n}", {"readout": readout, "n_iters": n}) for readout in ("cls", "mean") for n in n_iters
    )


FIGURE2_MNIST = Artefact(
    name="figure2-mnist",
    title="Column sums of attention while a ViT learns handwritten digits",
    paper="most columns drift to 1 (a plot from epoch 1 on)",
    presets={
        "paper": Preset(
            about="one layer, one head, patch 7, 45 epochs",
            takes="20 minutes on two cores",
            data="mnist",
            seeds=(0,),
            arms=arms((1,)),
            config=figure6.MNIST,
        ),
        "small": Preset(
            about="as paper, 3 seeds, the Sinkformer beside it",
            takes="about 25 minutes on two cores",
            data="mnist",
            seeds=(0, 1, 2),
            arms=arms((1, figure6.N_ITERS)),
            config=figure6.MNIST,
        ),
        "smoke": Preset(
            about="scikit-learn's digits, 40 epochs",
            takes="under a minute on two cores",
            data="digits",
            seeds=(0,),
            arms=arms((1, figure6.N_ITERS)),
            config=replace(
                figure6.DIGITS, recipe=Recipe(epochs=40, batch=100, rate=2e-3, drops=(30, 36)), dim=64, head_dim=32
            ),
        ),
    },
    task=figure6.task,
    identical_runs_in=("figure6",),
)
