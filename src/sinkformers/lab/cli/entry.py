"""The console script: it must answer, in one sentence, where the `cli` extra is not installed."""

from __future__ import annotations

import io
import sys


def main() -> None:
    """Run the `sinkformers` command on `sys.argv`."""
    try:
        _main()
    except KeyboardInterrupt:  # while modules are imported; commands have their own answer
        sys.exit(130)


def _main() -> None:
    try:
        import rich  # noqa: F401  (tables need it; typer does without)

        from sinkformers.lab.cli.app import app
    except ModuleNotFoundError as missing:
        if missing.name not in {"typer", "rich"}:
            raise
        sys.exit(
            f"sinkformers: the command line needs {missing.name}; install it with pip install '.[cli]' in your clone."
        )
    if isinstance(sys.stdout, io.TextIOWrapper):
        # K⁰ and K^∞ must not end in a traceback where the output can hold ASCII only.
        sys.stdout.reconfigure(errors="replace")
    app()
