"""`python -m benchmarks`: time the suites, append to the records; `python -m benchmarks report`: render the page."""

import argparse
import datetime
import difflib
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main(arguments: Sequence[str] | None = None) -> int:
    import sys

    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    asked = parser.parse_args(arguments)
    if asked.suites == ["report"]:
        return _report(asked, parser)
    return _run(asked, parser, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Time Sinkhorn attention beside SoftMax attention and beside everyone else.",
        epilog="`python -m benchmarks report` renders docs/benchmarks.md and its plots from the newest records.",
    )
    parser.add_argument("suites", nargs="*", metavar="suite", help="which suites to run (default: all), or `report`")
    parser.add_argument("--quick", action="store_true", help="two shapes, few rounds: about two minutes")
    parser.add_argument("--rows", metavar="NAME,…", help="only these rows (SDPA is always timed)")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default: 2)")
    parser.add_argument("--budget", type=float, default=1.0, metavar="FACTOR", help="multiplies the time for rounds")
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="where IMDb is, for `limit` (default: as in `sinkformers run`)"
    )
    parser.add_argument("--list", action="store_true", help="name the suites and the rows, and stop")
    parser.add_argument(
        "--records", type=Path, metavar="FOLDER", help="where records are (default: benchmarks/records)"
    )
    parser.add_argument(
        "--page", type=Path, default=ROOT / "docs" / "benchmarks.md", help="the page that `report` fills"
    )
    return parser


def _run(asked: argparse.Namespace, parser: argparse.ArgumentParser, arguments: list[str]) -> int:
    import torch

    from benchmarks import machine, records
    from benchmarks.progress import Progress
    from benchmarks.rows import ROWS
    from benchmarks.settings import Settings
    from benchmarks.solvers import SOLVERS
    from benchmarks.suites import QUICK, SUITES, small
    from benchmarks.suites.operator import TINY_ROWS

    names = {*ROWS, *TINY_ROWS, *small.ROWS, *SOLVERS}
    suites = asked.suites or list(QUICK if asked.quick else SUITES)
    rows = None if asked.rows is None else tuple(name.strip() for name in asked.rows.split(",") if name.strip())
    if asked.list:
        print(f"suites: {', '.join(SUITES)}\nrows: {', '.join([*ROWS, *sorted(names - set(ROWS))])}")
        return 0
    _known(parser, "suite", suites, SUITES)
    _known(parser, "row", rows or (), names)
    if asked.threads < 1 or asked.budget <= 0:
        parser.error(f"--threads must be ≥ 1 and --budget > 0; got {asked.threads} and {asked.budget}.")
    torch.set_num_threads(asked.threads)
    settings = Settings(asked.quick, rows, asked.threads, asked.budget, asked.data)
    run = records.Run(
        started=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        command=shlex.join(["python", "-m", "benchmarks", *_shown(arguments)]),
        quick=asked.quick,
        rows=None if rows is None else list(rows),
        machine=machine.machine(asked.threads),
        versions=machine.versions(),
        **machine.commit(),
    )
    folder, progress = asked.records or records.FOLDER, Progress()
    progress.heading(
        f"{run.machine['cpu']}, {asked.threads} threads, torch {run.versions['torch']}, commit {run.commit}"
    )
    with progress.running():
        for suite in suites:
            for measurement in SUITES[suite](settings, progress):
                records.append(run, measurement, folder)
    progress.heading(f"Recorded in {run.file(folder)}")
    return 0


def _report(asked: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from benchmarks import records
    from benchmarks.report import page

    folder = asked.records or records.FOLDER
    try:
        written = page.fill(asked.page, records.newest(records.read(folder)))
    except (OSError, ValueError) as error:
        parser.exit(1, f"report: {error}\n")
    for path in written:
        print(f"Written: {path}")
    return 0


def _shown(arguments: Iterable[str]) -> list[str]:
    """The arguments that change what was measured; where the data is and where the records went does not."""
    kept, skip = [], False
    for argument in arguments:
        if skip or argument.startswith(("--records=", "--data=")):
            skip = False
        elif argument in ("--records", "--data"):
            skip = True
        else:
            kept.append(argument)
    return kept


def _known(parser: argparse.ArgumentParser, kind: str, asked: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for name in asked:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {near[0]}?" if near else ""
            parser.error(f"no {kind} is called {name!r}; there are {', '.join(sorted(known))}.{hint}")
