"""The pictures: time against n, time against n_iters, memory against n, and column error against products."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.measurement import Measurement
from benchmarks.report import limit_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"sdpa": "#8a8f9c", "native": "#d6354a", "torch": "#1f6f9d", "log-loop": "#1f9d55"}
NAMES = {"sdpa": "SDPA", "native": 'backend="native"', "torch": 'backend="torch"', "log-loop": "log-domain loop"}
Points = Callable[[Measurement], "tuple[float, float] | None"]


def draw(suites: dict[str, list[Measurement]], folder: Path) -> dict[str, Path]:
    """The pictures that the records suffice for, by the suite they belong to."""
    folder.mkdir(parents=True, exist_ok=True)
    scaling, operator = suites.get("scaling", []), suites.get("operator", [])
    square = [m for m in operator if m.shape != "(65536, 4, 4)" and m.row != "sdpa"]
    pictures = {
        "time-n": (scaling, _time_against_n, "tokens n, one head", "seconds, forward and backward", True),
        "memory-n": (scaling, _memory_against_n, "tokens n, one head", "peak memory of a step, MiB", True),
        "time-iterations": (square, _time_against_steps, "n_iters", "ms, forward and backward", False),
    }
    written = {}
    for name, (found, points, x_label, y_label, logarithmic) in pictures.items():
        path = folder / f"benchmark-{name}.png"
        if _draw(found, points, (x_label, y_label), logarithmic, path):
            written[name] = path
    path = folder / "benchmark-limit-products.png"
    if limit_plot.draw(suites.get("limit", []), path):
        written["limit-products"] = path
    return written


def _time_against_n(m: Measurement) -> tuple[float, float] | None:
    return (float(m.n), m.seconds.median) if m.n and m.seconds else None


def _memory_against_n(m: Measurement) -> tuple[float, float] | None:
    return (float(m.n), m.peak_bytes / 2**20) if m.n and m.peak_bytes else None


def _time_against_steps(m: Measurement) -> tuple[float, float] | None:
    return (float(m.n_iters), 1e3 * m.seconds.median) if m.n_iters and m.seconds else None


def _draw(found: list[Measurement], points: Points, labels: tuple[str, str], logarithmic: bool, path: Path) -> bool:
    from matplotlib.figure import Figure

    curves = {row: [p for m in found if m.row == row and (p := points(m))] for row in NAMES}
    curves = {row: sorted(line) for row, line in curves.items() if len(line) > 1}
    if not curves:
        return False
    figure = Figure(figsize=(6.4, 4.2), facecolor="white", layout="constrained")
    axes = figure.subplots()
    for row, line in curves.items():
        axes.plot(*zip(*line, strict=True), marker="o", markersize=4, color=COLOURS[row], label=NAMES[row])
    _dress(axes, labels, logarithmic)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    return True


def _dress(axes: Axes, labels: tuple[str, str], logarithmic: bool) -> None:
    if logarithmic:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.grid(True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
