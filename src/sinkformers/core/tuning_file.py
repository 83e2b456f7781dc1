"""The file in which `tune` remembers its results: JSON, one entry per device, set of versions and shape."""

import json
import os
import threading
import warnings
from os import PathLike
from pathlib import Path
from typing import Any

from sinkformers.core.backend import level_of_the_caller
from sinkformers.core.environment import versions

FORMAT = "sinkformers tuning 1"


def find_entry(file: str | PathLike[str], device: str, shape: str) -> dict[str, Any] | None:
    """The entry of a shape on a device, made with the versions that run now; None if there is none."""
    for entry in _read(Path(file)) or []:
        if _key(entry) == (device, versions(), shape):
            return entry
    return None


def keep_entry(file: str | PathLike[str], device: str, shape: str, found: dict[str, Any]) -> None:
    """Add an entry, or replace the one of the same key. The file is always whole: it is replaced at once.

    A file that holds something else is left alone.
    """
    path = Path(file)
    entries = _read(path, warns=False)
    if entries is None:
        return
    entry = {"device": device, "versions": versions(), "shape": shape, **found}
    kept = [other for other in entries if _key(other) != _key(entry)]
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        text = json.dumps({"format": FORMAT, "entries": [*kept, entry]}, indent=1, ensure_ascii=False)
        new.write_text(text + "\n", encoding="utf-8")
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def _key(entry: dict[str, Any]) -> tuple[Any, ...]:
    return entry["device"], entry["versions"], entry["shape"]


def _read(path: Path, *, warns: bool = True) -> list[dict[str, Any]] | None:
    """The entries; none where there is no file, and None where it cannot be read as one of ours."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {str(data['format'])[:50]!r}, not {FORMAT!r}")
        for entry in data["entries"]:
            _check(entry)
        return data["entries"]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if warns:
            warnings.warn(
                f"tune: {path} cannot be read as a file of tune ({type(error).__name__}: {str(error)[:200]}), so that "
                "nothing is taken from it or written to it. Delete it, or name another file.",
                RuntimeWarning,
                stacklevel=level_of_the_caller(),
            )
        return None


def _check(entry: Any) -> None:
    """Raise if an entry is not what `keep_entry` writes."""
    texts = [entry[name] for name in ("device", "shape", "backend", "choice")]
    texts += [each[name] for each in entry["candidates"] for name in ("backend", "choice", "reason")]
    if not all(isinstance(text, str) for text in texts) or not isinstance(entry["versions"], dict):
        raise ValueError("an entry has a field of the wrong type")
    for each in entry["candidates"]:
        seconds = each["seconds"]
        if seconds is not None and (len(seconds) != 3 or not all(isinstance(part, float) for part in seconds)):
            raise ValueError("the times of an entry are not three numbers")
        if set(each) != {"backend", "choice", "seconds", "reason"}:
            raise ValueError(f"an entry has the fields {sorted(each)}")
