"""Conversion of other libraries' models to Sinkformers, in place, and back."""

from sinkformers.conversion.convert import set_n_iters, set_tau, to_sinkformer, to_transformer
from sinkformers.conversion.report import Report
from sinkformers.conversion.schedule import anneal_tau
from sinkformers.conversion.watch import watch_attention

__all__ = ["Report", "anneal_tau", "set_n_iters", "set_tau", "to_sinkformer", "to_transformer", "watch_attention"]
