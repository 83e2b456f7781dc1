"""Convert every family of the installed transformers that can be built, and write what came of it.

    python -m tests.conversion.families --out build/families.jsonl --table docs/convert.md

Every family runs in a process of its own, with limits of time and memory. Families that the file has already, by the
code as it is now, are not run again.
"""

import argparse
import functools
import hashlib
import json
import os
import resource
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers

import sinkformers
from tests.conversion import families as here
from tests.conversion.families.check import check
from tests.conversion.families.configurations import families
from tests.conversion.families.table import write_table

SECONDS = 90  # of the processor, for a family
MEMORY = 8 << 30  # bytes that a family may have more than this process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/families.jsonl"), help="one line per family")
    parser.add_argument("--table", type=Path, help="a page whose table is to be written")
    parser.add_argument("--again", action="store_true", help="run families again that are wrong or were not built")
    parser.add_argument("only", nargs="*", help="names of families; all by default")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    records = _read(options.out)
    known = {
        name for name, record in records.items() if not options.again or record["verdict"] in ("converted", "refused")
    }
    _run([name for name in options.only or families() if name in options.only or name not in known], options.out)
    records = _read(options.out)
    if options.table is not None:
        write_table(options.table, list(records.values()))
    for record in records.values():
        if record["verdict"] == "wrong":
            print(f"wrong: {record['family']}: {record['note']}", file=sys.stderr)


@functools.cache
def _code() -> str:
    """Return a digest of the code that makes the records: that of the library and of the sweep."""
    folders = map(Path, (*sinkformers.__path__, *here.__path__))  # an editable installation has two of the former
    files = sorted(file for folder in folders for file in folder.rglob("*.py") if file.name != "table.py")
    assert any(file.name == "sinkhorn.py" for file in files), "the code of the library was not found"
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the last record of every family that was made by the code as it is now."""
    lines = path.read_text().splitlines() if path.exists() else []
    records = {record["family"]: record for record in map(json.loads, lines) if record.get("code") == _code()}
    return dict(sorted(records.items()))


def _run(names: list[str], out: Path) -> None:
    for number, name in enumerate(names, 1):
        start = time.monotonic()
        process = os.fork()  # a copy of this one, which has imported everything
        if not process:
            _child(name, out)
        _, status, used = os.wait4(process, 0)
        if status:
            _write(out, {"family": name, "verdict": "not built", "note": _ended(status)})
        times = f"{used.ru_utime + used.ru_stime:.1f} s of the processor, {time.monotonic() - start:.1f} s"
        print(f"{number} of {len(names)}: {name}, {times}, {used.ru_maxrss >> 10} MiB", flush=True)


def _child(name: str, out: Path) -> NoReturn:
    """Check a family, and end the process."""
    code = 1
    try:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        torch.set_num_threads(1)
        _write(out, check(name))
        code = 0
    except Exception as error:  # of the sweep itself, or for want of memory
        _write(out, {"family": name, "verdict": "not built", "note": f"{type(error).__name__} in the sweep"})
        code = 0
    finally:
        os._exit(code)


def _ended(status: int) -> str:
    """Return why a process ended without a record."""
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        return f"it took more than {SECONDS} seconds"
    return (
        f"its process ended by {signal.Signals(os.WTERMSIG(status)).name}"
        if os.WIFSIGNALED(status)
        else "its process ended"
    )


def _write(out: Path, record: dict[str, Any]) -> None:
    with out.open("a") as file:
        file.write(json.dumps(record | {"code": _code()}) + "\n")


if __name__ == "__main__":
    main()
