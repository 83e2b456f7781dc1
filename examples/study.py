"""What the studies here share: arms of a comparison, runs that are trained once and kept, the table and the picture.

A run is an arm and a seed, with a file of its own that is written when it is finished: a study that is stopped
continues with the runs that are missing.
"""

import argparse
import fnmatch
import json
import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import sinkformers
from sinkformers.lab.data import DataError, data_folder

N_ITERS = 3
AS_IT_IS = {  # how a trained SoftMax model is converted and not adapted
    **{f"tau {tau}": {"n_iters": N_ITERS, "tau": tau} for tau in (0.25, 0.5, 1.0)},
    "the limit": {"n_iters": math.inf},
}


def leave(model: nn.Module, step: int, n_steps: int) -> None:
    """No schedule."""


def anneal(model: nn.Module, step: int, n_steps: int) -> None:
    """tau from 0 to 1 over the first half of all steps."""
    sinkformers.anneal_tau(model, step, n_steps // 2)


def add_iterations(model: nn.Module, step: int, n_steps: int) -> None:
    """One iteration in the first quarter of all steps, two in the second, then three."""
    sinkformers.set_n_iters(model, min(N_ITERS, 1 + 4 * step // n_steps))


class Arm(NamedTuple):
    """How attention is normalised: settings of `to_sinkformer`, and a schedule called before each step."""

    settings: Mapping[str, Any]
    schedule: Callable[[nn.Module, int, int], None] = leave


ARMS = {
    "SoftMax": Arm({"n_iters": 1}),
    "at once": Arm({"n_iters": N_ITERS}),
    "tau annealed": Arm({"n_iters": N_ITERS, "tau": 0.0}, anneal),
    "n_iters annealed": Arm({"n_iters": 1}, add_iterations),
    "tau learned": Arm({"n_iters": N_ITERS, "tau": "learned"}),
    "tau 0.5": Arm({"n_iters": N_ITERS, "tau": 0.5}),
}

Train = Callable[[str, int], dict[str, Any]]  # an arm and a seed to {"accuracy": [after each epoch], …}


def unadapted(model: nn.Module, accuracy: Callable[[nn.Module], float]) -> dict[str, float]:
    """A trained SoftMax model, converted and used as it is."""
    found = {}
    for name, settings in AS_IT_IS.items():
        sinkformers.to_sinkformer(model, **settings)
        found[name] = accuracy(model)
    return found


def learned(model: nn.Module) -> dict[str, list[float]]:
    return {name: p.sigmoid().tolist() for name, p in model.named_parameters() if name.endswith("sinkhorn_tau")}


def _file(out: Path, arm: str, seed: int) -> Path:
    return out / "runs" / f"{arm.replace(' ', '-').replace(',', '')}-{seed}.json"


def _one_thread() -> None:
    torch.set_num_threads(1)


def run(out: Path, arms: Mapping[str, Arm], train: Train, seeds: int, workers: int) -> None:
    """Train the runs that are missing, seed by seed, `workers` side by side on a thread each."""
    from rich.progress import Progress

    (out / "runs").mkdir(parents=True, exist_ok=True)
    wanted = [(arm, seed) for seed in range(seeds) for arm in arms]
    missing = [each for each in wanted if not _file(out, *each).exists()]
    with Progress() as progress:
        task = progress.add_task("runs", total=len(wanted), completed=len(wanted) - len(missing))
        for (arm, seed), result in _trained(missing, train, workers):
            file = _file(out, arm, seed)
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps({"arm": arm, "seed": seed, **result}), encoding="utf-8")
            partial.replace(file)
            progress.console.print(f"{arm}, seed {seed}: {result['accuracy'][-1]:.1%}")
            progress.advance(task)


def _trained(
    missing: list[tuple[str, int]], train: Train, workers: int
) -> Iterator[tuple[tuple[str, int], dict[str, Any]]]:
    if workers == 1:
        yield from ((each, train(*each)) for each in missing)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_one_thread) as pool:
        running = {pool.submit(train, *each): each for each in missing}
        for done in as_completed(running):
            yield running[done], done.result()


def report(out: Path, arms: Mapping[str, Arm]) -> str:
    """A table of all runs so far; a picture of them goes to accuracy.png."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in sorted((out / "runs").glob("*.json"))]
    if not found:
        raise SystemExit(f"{out} holds no finished run yet. Run this without --report first.")
    runs: dict[str, dict[int, float]] = {}
    for each in found:
        runs.setdefault(each["arm"], {})[each["seed"]] = each["accuracy"][-1]
        for name, value in each.get("unadapted", {}).items():
            runs.setdefault(f"SoftMax, then {name}, un-adapted", {})[each["seed"]] = value
    order = [*arms, *(f"SoftMax, then {name}, un-adapted" for name in AS_IT_IS)]
    rows = {name: [runs[name][seed] for seed in sorted(runs[name])] for name in order if name in runs}
    _draw(rows, out / "accuracy.png")
    lines = ["| attention | median | all runs, by seed |", "| --- | --- | --- |"]
    for name, each in rows.items():
        lines.append(f"| {name} | {statistics.median(each):.1%} | {', '.join(f'{x:.1%}' for x in each)} |")
    return "\n".join(lines)


def _draw(rows: Mapping[str, list[float]], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 0.4 * len(rows) + 1), layout="constrained")
    axes = figure.subplots()
    for place, each in enumerate(rows.values()):
        axes.plot(each, [place] * len(each), "o", color="tab:blue", alpha=0.6)
        axes.plot([statistics.median(each)], [place], "|", color="black", markersize=16)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlabel("test accuracy (dots: runs, bar: median)")
    figure.savefig(file, dpi=150)


def main(doc: str | None, arms: Mapping[str, Arm], prepare: Callable[[Path, Path], Train], out: str) -> None:
    """The command line: `prepare` gets the folders of data and output, and returns how a run is trained."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder of data sets; else $SINKFORMERS_DATA")
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0 on")
    parser.add_argument("--workers", type=int, default=2, help="runs trained side by side, on a thread each")
    parser.add_argument("--arms", metavar="PATTERN", default="*", help="such as 'tau*'; by default, every arm")
    parser.add_argument("--report", action="store_true", help="only the table and the picture of what is there")
    args = parser.parse_args()
    chosen = {name: arm for name, arm in arms.items() if fnmatch.fnmatchcase(name, args.arms)}
    if not chosen:
        parser.error(f"--arms {args.arms!r} matches none of: {', '.join(arms)}")
    if not args.report:
        try:
            run(args.out, chosen, prepare(data_folder(args.data), args.out), args.seeds, args.workers)
        except DataError as error:
            raise SystemExit(str(error)) from None
    print(report(args.out, arms))
