"""Figure 2, point cloud panel: the column sums of attention while a Point Cloud Transformer trains.

    sinkformers run figure2-points --preset small --data DIR

The models are those of the lower half of Table 1. The paper's plot starts after the first epoch; here epoch 0 is before
training. SoftMax is compared with the normalisation that the Transformer was published with, whose rows also sum to 1.
"""

from __future__ import annotations

from sinkformers.lab.artefacts import table1_pct
from sinkformers.lab.artefacts.artefact import Artefact, Preset
from sinkformers.lab.artefacts.table1_set import arms, task
from sinkformers.lab.tasks.config import SHAPES

FIGURE2_POINTS = Artefact(
    name="figure2-points",
    title="Column sums of attention while a Point Cloud Transformer trains on ModelNet40",
    paper="most columns drift to 1 (a plot from epoch 1 on)",
    presets={
        "paper": Preset(
            about="1,024 points, four layers of 256 channels, 300 epochs",
            takes="a GPU-day",
            data="modelnet40",
            seeds=(0,),
            arms=arms(1) + table1_pct.PORT,
            config=table1_pct.PAPER,
        ),
        "small": Preset(
            about="as the small preset of table1-pct, one seed, the Sinkformer beside it",
            takes="about 20 minutes on two cores",
            data="modelnet40",
            seeds=(0,),
            arms=arms(1, 3) + table1_pct.PORT,
            config=table1_pct.SMALL,
        ),
        "smoke": Preset(
            about="eight kinds of computed shapes, 6 epochs",
            takes="seconds",
            data=SHAPES,
            seeds=(0,),
            arms=arms(1, 3) + table1_pct.PORT,
            config=table1_pct.SMOKE,
        ),
    },
    task=task,
    identical_runs_in=("table1-pct",),
)
