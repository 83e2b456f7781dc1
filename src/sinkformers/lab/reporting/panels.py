"""Common look of all figures: colours, axes, grids of panels. Equal runs give equal files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from sinkformers.lab.reporting.comparison import side
from sinkformers.lab.reporting.metrics import Metric

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Orange and violet can be told apart with every kind of colour blindness, and in greyscale by their lightness.
INK, FAINT, RULE = "#1f2433", "#8a90a6", "#e4e6ee"
SOFTMAX, TARGET = "#d9622b", "#d9622b"
SINKHORN = ("#4a44a8", "#8f87d8", "#14103f")  # of one count; lightest and darkest of several
WIDTH = 12.6
NARROW_WIDTH = 5.0
MOST_COLUMNS = 4
NARROW_COLUMNS = 2

_narrow = ContextVar("narrow", default=False)


@contextmanager
def narrow() -> Iterator[None]:
    """Arrange the panels of figures for a narrow screen, two in a row."""
    token = _narrow.set(True)
    try:
        yield
    finally:
        _narrow.reset(token)


def is_narrow() -> bool:
    """Whether figures are arranged for a narrow screen."""
    return _narrow.get()


def colours(n_iters: Iterable[int | float]) -> dict[int | float, str]:
    """Return a colour per n_iters: orange for SoftMax, violet for Sinkhorn, darker for larger n_iters."""
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    counts = sorted({count for count in n_iters if count != 1})
    shades = LinearSegmentedColormap.from_list("violet", [SINKHORN[1], SINKHORN[0], SINKHORN[2]])
    drawn = {count: to_hex(shades(place / max(1, len(counts) - 1))) for place, count in enumerate(counts)}
    return {1: SOFTMAX} | (drawn if len(counts) > 1 else dict.fromkeys(counts, SINKHORN[0]))


def grid(n_rows: int, n_columns: int, *, height: float = 2.5) -> tuple[Figure, list[list[Axes]]]:
    """Return a figure with a grid of panels. The background is opaque white, for light and dark pages alike."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    across = min(n_columns, NARROW_COLUMNS) if is_narrow() else n_columns
    down = n_rows * -(-n_columns // across)
    size = NARROW_WIDTH if is_narrow() else min(WIDTH, 1.2 + 4.4 * n_columns), 0.6 + height * down
    figure = Figure(figsize=size, facecolor="white", layout=ConstrainedLayoutEngine(w_pad=0.09, h_pad=0.08))
    panels = [list(row) for row in figure.subplots(down, across, squeeze=False)]
    rows = [list(chain(*panels[place : place + down // n_rows])) for place in range(0, down, down // n_rows)]
    for unused in (axes for row in rows for axes in row[n_columns:]):
        unused.remove()
    rows = [row[:n_columns] for row in rows]
    for axes in (axes for row in rows for axes in row):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(FAINT)
        axes.grid(axis="y", color=RULE, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(which="both", left=False, colors=INK, labelsize=9)
    return figure, rows


def wrapped(count: int, together: int, *, height: float = 2.5) -> tuple[Figure, list[Axes]]:
    """Return `count` panels in rows of at most four. Groups of `together` panels stay in one row where possible."""
    most = NARROW_COLUMNS if is_narrow() else MOST_COLUMNS
    columns = min(count, most if together > most else most // together * together)
    figure, rows = grid(-(-count // columns), columns, height=height)
    panels = [axes for row in rows for axes in row]
    for unused in panels[count:]:
        unused.set_visible(False)
    return figure, panels[:count]


def share(panels: Sequence[Axes], values: Sequence[float] = ()) -> None:
    """Give all `panels` the same y axis, fitted to `values`, or to all drawn data."""
    for axes in panels[1:]:
        axes.sharey(panels[0])
    panels[0].autoscale(axis="y")
    if values:
        margin = 0.05 * (max(values) - min(values) or 1)
        panels[0].set_ylim(min(values) - margin, max(values) + margin)


def count_epochs(axes: Axes) -> None:
    """Place ticks at whole epochs only."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))


def in_units(axis: Axis, metric: Metric) -> None:
    """Label the ticks in the unit of the metric."""
    from matplotlib.ticker import PercentFormatter

    if metric.unit == "%":
        axis.set_major_formatter(PercentFormatter(1))


def title(axes: Axes, *parts: str) -> None:
    """Set the title of a panel, one line per part; empty parts are skipped."""
    axes.set_title(plain("\n".join(filter(None, parts))), fontsize=10, color=INK, loc="left")


def legend(figure: Figure, n_iters: Iterable[int | float]) -> None:
    """Add a legend of the sides of a comparison below all panels."""
    from matplotlib.lines import Line2D

    colour = colours(n_iters)
    handles = [Line2D([], [], color=colour[count], linewidth=2.2, label=side(count)) for count in sorted(set(n_iters))]
    below(figure, handles)


def below(figure: Figure, handles: Sequence[Artist]) -> None:
    """Add a legend below all panels, in as many columns as fit."""
    longest = max(len(str(handle.get_label())) for handle in handles)
    ncols = max(1, min(len(handles), int(12 * figure.get_figwidth() / (longest + 7))))
    figure.legend(handles=handles, loc="outside lower center", ncols=ncols, frameon=False, fontsize=10, labelcolor=INK)


def plain(text: str) -> str:
    """Escape dollar signs, which would start a formula."""
    return text.replace("$", r"\$")


def save(figure: Figure, path: Path | str | BinaryIO, kind: str | None = None) -> None:
    """Write `figure`; the suffix, or `kind`, chooses the format.

    Equal figures are equal files: no date, no random names inside.
    """
    import matplotlib

    kind = kind or Path(str(path)).suffix.lower().removeprefix(".")
    with matplotlib.rc_context({"svg.hashsalt": "sinkformers"}):
        figure.savefig(path, format=kind, dpi=140, metadata={"Date": None} if kind == "svg" else None)
