"""The `sinkformers` command."""

from sinkformers.lab.cli.entry import main

__all__ = ["main"]
