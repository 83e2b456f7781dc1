"""Deprecated: the `sinkformers` command is in `sinkformers.lab.cli`."""

from sinkformers._moved import warn_moved

__all__ = ["main"]


def main() -> None:
    """Run the `sinkformers` command on `sys.argv`."""
    warn_moved("sinkformers.cli", "sinkformers.lab.cli")
    from sinkformers.lab.cli import main

    main()


if __name__ == "__main__":
    main()
