"""The console script. It answers in one sentence if the `cli` extra is not installed."""

from __future__ import annotations

import io
import sys


def main() -> None:
    """Run the `sinkformers` command on `sys.argv`."""
    try:
        _main()
    except KeyboardInterrupt:  # during imports; the commands handle it themselves
        sys.exit(130)


def _main() -> None:
    try:
        import rich  # noqa: F401  (tables need it, and typer works without it)

        from sinkformers.lab.cli.app import app
    except ModuleNotFoundError as missing:
        if missing.name not in {"typer", "rich"}:
            raise
        sys.exit(
            f"sinkformers: the command line needs {missing.name}; install it with pip install '.[cli]' in your clone."
        )
    if isinstance(sys.stdout, io.TextIOWrapper):
        # K⁰ and K^∞ must not end in a traceback if the output is ASCII only.
        sys.stdout.reconfigure(errors="replace")
    app()
