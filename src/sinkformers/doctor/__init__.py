"""`python -m sinkformers.doctor`: what serves attention on this machine, whether it is right, and how fast it is."""

from sinkformers.doctor.command import main

__all__ = ["main"]
