"""Checkpoints: the state of a training in one file, written atomically and read without executing code from it.

Tensors and a JSON text are in one safetensors file. The text holds a checksum of all tensors: a file that was truncated
or changed on disk is refused.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.optim import Optimizer

from sinkformers.lab.artefacts import record_json
from sinkformers.lab.artefacts.artefact import ExperimentError

FROM_THE_START = "Delete it to train this run from the start; nothing else was touched."


def write(path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Replace the checkpoint at `path`. If that fails, the old one stays."""
    kept = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    text = record_json.dumps({**state, "checksum": _checksum(kept)})
    replace(path, save(kept, {"state": text}))


def replace(path: Path, content: bytes) -> None:
    """Write a file atomically: it has either its old or its new content, whenever the process or the machine stops."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ExperimentError(
            f"cannot write {path}: {error.strerror or error}. What was saved before is untouched; "
            "free some space or choose another --out, and run the same command again."
        ) from None


def read(path: Path, remedy: str = FROM_THE_START) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and state as they were written. A damaged file raises `ExperimentError` with the remedy."""
    if not path.exists():
        raise ExperimentError(f"{path} is missing. {remedy}")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
            state = record_json.loads((file.metadata() or {})["state"])
        if state.pop("checksum") != _checksum(tensors):
            raise ValueError("its checksum does not match")
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise ExperimentError(f"{path} is damaged ({error}). {remedy}") from None
    return tensors, state


def _checksum(tensors: Mapping[str, Tensor]) -> int:
    total = 0
    for name in sorted(tensors):
        total = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, zlib.crc32(name.encode(), total))
    return total


def optimiser_tensors(optimiser: Optimizer) -> dict[str, Tensor]:
    """Return the state of an optimiser as named tensors. Its settings come from the recipe and are not saved."""
    state = optimiser.state_dict()["state"]
    return {f"{index}.{name}": torch.as_tensor(value) for index, of in state.items() for name, value in of.items()}


def restore_optimiser(optimiser: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Load the state that `optimiser_tensors` returned."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        index, _, part = name.partition(".")
        state.setdefault(int(index), {})[part] = tensor
    optimiser.load_state_dict({**optimiser.state_dict(), "state": state})


def part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, under their names without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
