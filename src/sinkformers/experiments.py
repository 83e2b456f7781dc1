"""Deprecated: the experiments are in `sinkformers.lab`."""

from sinkformers._moved import modules_of

__getattr__ = modules_of(
    "sinkformers.experiments", "sinkformers.lab.artefacts", "sinkformers.lab.tasks", "sinkformers.lab"
)
