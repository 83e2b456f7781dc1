"""Convert every family of the installed transformers that can be built, and write what came of it.

    python -m tests.conversion.families --out build/families.jsonl --table docs/convert.md

Every family runs in a process of its own. Families that the file has already are not run again.
"""

import argparse
import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.conversion.families.check import check
from tests.conversion.families.configurations import families
from tests.conversion.families.table import write_table

TIMEOUT = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/families.jsonl"), help="one line per family")
    parser.add_argument("--table", type=Path, help="a page whose table is to be written")
    parser.add_argument("--again", action="store_true", help="run families again that are wrong or were not built")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("only", nargs="*", help="names of families; all by default")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    records = _read(options.out)
    known = {
        name for name, record in records.items() if not options.again or record["verdict"] in ("converted", "refused")
    }
    _run([name for name in options.only or families() if name in options.only or name not in known], options)
    records = _read(options.out)
    if options.table is not None:
        write_table(options.table, list(records.values()))
    for record in records.values():
        if record["verdict"] == "wrong":
            print(f"wrong: {record['family']}: {record['note']}", file=sys.stderr)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the last record of every family."""
    lines = path.read_text().splitlines() if path.exists() else []
    records = {record["family"]: record for record in map(json.loads, lines)}
    return dict(sorted(records.items()))


def _run(names: list[str], options: argparse.Namespace) -> None:
    running: dict[int, str] = {}
    for name in names:
        if len(running) >= options.jobs:
            _wait(running, options.out)
        running[_start(name, options.out)] = name
    while running:
        _wait(running, options.out)


def _start(name: str, out: Path) -> int:
    """Return the process that checks a family, a copy of this one, which has imported everything."""
    process = os.fork()
    if process:
        return process
    signal.alarm(TIMEOUT)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    code = 1
    try:
        _write(out, check(name))
        code = 0
    finally:
        os._exit(code)


def _wait(running: dict[int, str], out: Path) -> None:
    process, status = os.wait()
    name = running.pop(process)
    if status:
        reason = "timeout" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM else "crashed"
        _write(out, {"family": name, "verdict": "not built", "note": reason})
    print(name, flush=True)


def _write(out: Path, record: dict[str, Any]) -> None:
    with out.open("a") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
