"""Column error against products, of Sinkhorn's iterations and of Newton's method."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.measurement import Measurement
from benchmarks.solvers import NEWTON, SINKHORN

COLOURS = ("#1f9d55", "#1f6f9d", "#d6354a", "#8a8f9c")
STYLES = {SINKHORN: ("--", "Sinkhorn"), NEWTON: ("-", "Newton")}


def draw(found: Sequence[Measurement], path: Path) -> bool:
    """Draw the curves of the records, one colour per shape; False where there are none."""
    from matplotlib.figure import Figure

    curves = [m for m in found if m.curve and m.row in STYLES]
    if not curves:
        return False
    colours = dict(zip(dict.fromkeys(m.shape for m in curves), COLOURS, strict=False))
    figure = Figure(figsize=(6.4, 4.2), facecolor="white", layout="constrained")
    axes = figure.subplots()
    for m in curves:
        style, name = STYLES[m.row]
        points = zip(*m.curve, strict=True)
        axes.plot(*points, style, marker="o", markersize=3, color=colours[m.shape], label=f"{name}, {m.shape}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("products with the kernel")
    axes.set_ylabel("largest error of a column sum")
    axes.grid(True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    return True
