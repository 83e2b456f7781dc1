"""The table of families in docs/convert.md."""

from pathlib import Path
from typing import Any


def write_table(page: Path, records: list[dict[str, Any]]) -> None:
    raise NotImplementedError
