"""Deprecated: the data sets are in `sinkformers.lab.data`."""

from sinkformers._moved import names_of

__getattr__ = names_of("sinkformers.data", "sinkformers.lab.data")
