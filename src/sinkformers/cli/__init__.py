"""The `sinkformers` command."""

from sinkformers.cli.entry import main

__all__ = ["main"]
