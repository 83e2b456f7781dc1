"""The log of a run while it trains: one JSON line per epoch, and a file for TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sinkformers.lab.artefacts.artefact import LOG_FILE
from sinkformers.lab.workbench import checkpoint


class EpochLog:
    """The log in `folder`; nothing is written unless `enabled`. An epoch that is repeated replaces its line."""

    def __init__(self, folder: Path, *, enabled: bool) -> None:
        self.file, self.enabled = folder / LOG_FILE, enabled

    def __enter__(self) -> EpochLog:
        if self.enabled:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(self.file.parent / "tensorboard")
        return self

    def __exit__(self, *_: object) -> None:
        if self.enabled:
            self.board.close()

    def add(self, record: dict[str, Any], seconds: float) -> None:
        if not self.enabled:
            return
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
        earlier = [line for line in lines if _epoch_of(line) < record["epoch"]]
        line = json.dumps({**record, "seconds": round(seconds, 3)})
        checkpoint.replace(self.file, "\n".join([*earlier, line, ""]).encode())
        for part in ("train", "test", "columns"):
            for name, value in record.get(part, {}).items():
                if isinstance(value, float):
                    self.board.add_scalar(f"{part}/{name}", value, record["epoch"])


def _epoch_of(line: str) -> int:
    try:
        return json.loads(line)["epoch"]
    except (ValueError, KeyError):
        return 2**31  # damaged: left out
