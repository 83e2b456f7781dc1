"""Figure 3: learning curves of Set Sinkformers on ModelNet40, by number of iterations.

    sinkformers run figure3 --preset small --data DIR

The models are those of the upper half of Table 1, with one seed each. A run that `table1-set` has finished in the same
output folder is copied, and the report of `table1-set` draws the curves of all seeds. The paper plots the error,
1 − accuracy, and the loss.
"""

from __future__ import annotations

from dataclasses import replace

from sinkformers.lab.artefacts.artefact import Artefact
from sinkformers.lab.artefacts.table1_set import TABLE1_SET

FIGURE3 = Artefact(
    name="figure3",
    title="ModelNet40: learning curves of Set Sinkformers by n_iters",
    paper="a plot: more iterations, a higher accuracy",
    presets={
        name: replace(preset, seeds=(0,), takes="about 20 minutes on two cores" if name == "small" else preset.takes)
        for name, preset in TABLE1_SET.presets.items()
    },
    task=TABLE1_SET.task,
    identical_runs_in=("table1-set",),
)
