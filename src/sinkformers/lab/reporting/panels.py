"""How the figures of a report look: colours, axes, grids of panels, and files that are equal when their runs are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sinkformers.lab.reporting.comparison import side

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Orange against violet holds for every kind of colour blindness, and they differ in lightness where there is no colour.
INK, FAINT, RULE = "#1f2433", "#8a90a6", "#e4e6ee"
SOFTMAX, TARGET = "#d9622b", "#d9622b"
SINKHORN = ("#4a44a8", "#8f87d8", "#14103f")  # of one count; lightest and darkest of several
WIDTH = 12.6
MOST_COLUMNS = 4


def colours(n_iters: Iterable[int]) -> dict[int, str]:
    """SoftMax is orange, Sinkhorn violet, and darker the more often it normalises."""
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    counts = sorted({count for count in n_iters if count != 1})
    shades = LinearSegmentedColormap.from_list("violet", [SINKHORN[1], SINKHORN[0], SINKHORN[2]])
    drawn = {count: to_hex(shades(place / max(1, len(counts) - 1))) for place, count in enumerate(counts)}
    return {1: SOFTMAX} | (drawn if len(counts) > 1 else dict.fromkeys(counts, SINKHORN[0]))


def grid(n_rows: int, n_columns: int, *, height: float = 2.5) -> tuple[Figure, list[list[Axes]]]:
    """Panels on an opaque white ground, which reads the same on a light and on a dark page."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    size = min(WIDTH, 1.2 + 4.4 * n_columns), 0.6 + height * n_rows
    figure = Figure(figsize=size, facecolor="white", layout=ConstrainedLayoutEngine(w_pad=0.09, h_pad=0.08))
    rows = [list(row) for row in figure.subplots(n_rows, n_columns, squeeze=False)]
    for axes in (axes for row in rows for axes in row):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(FAINT)
        axes.grid(axis="y", color=RULE, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(which="both", left=False, colors=INK, labelsize=9)
    return figure, rows


def wrapped(count: int, together: int, *, height: float = 2.5) -> tuple[Figure, list[Axes]]:
    """`count` panels in rows of at most four; `together` of them share a row where four allow it."""
    columns = MOST_COLUMNS if together > MOST_COLUMNS else MOST_COLUMNS // together * together
    columns = min(columns, count)
    figure, rows = grid(-(-count // columns), columns, height=height)
    panels = [axes for row in rows for axes in row]
    for unused in panels[count:]:
        unused.set_visible(False)
    return figure, panels[:count]


def share(panels: Sequence[Axes], values: Sequence[float] = ()) -> None:
    """One scale of y for all of `panels`: that of `values`, or of all that is drawn."""
    for axes in panels[1:]:
        axes.sharey(panels[0])
    panels[0].autoscale(axis="y")
    if values:
        margin = 0.05 * (max(values) - min(values) or 1)
        panels[0].set_ylim(min(values) - margin, max(values) + margin)


def count_epochs(axes: Axes) -> None:
    """There is no epoch 2.5."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))


def in_units(axis: Axis, metric: str) -> None:
    """Accuracy in per cent; what has no unit is left as it is."""
    from matplotlib.ticker import PercentFormatter

    if metric == "accuracy":
        axis.set_major_formatter(PercentFormatter(1))


def title(axes: Axes, *parts: str) -> None:
    """Parts that are empty are left out."""
    axes.set_title(plain("\n".join(filter(None, parts))), fontsize=10, color=INK, loc="left")


def legend(figure: Figure, n_iters: Iterable[int]) -> None:
    """The sides of a comparison, below all panels."""
    from matplotlib.lines import Line2D

    colour = colours(n_iters)
    handles = [Line2D([], [], color=colour[count], linewidth=2.2, label=side(count)) for count in sorted(set(n_iters))]
    below(figure, handles)


def below(figure: Figure, handles: Sequence[Artist]) -> None:
    """A legend below all panels, in as many columns as its labels leave room for."""
    longest = max(len(str(handle.get_label())) for handle in handles)
    ncols = max(1, min(len(handles), int(12 * figure.get_figwidth() / (longest + 7))))
    figure.legend(handles=handles, loc="outside lower center", ncols=ncols, frameon=False, fontsize=10, labelcolor=INK)


def plain(text: str) -> str:
    """A dollar sign is a dollar sign, and no formula."""
    return text.replace("$", r"\$")


def save(figure: Figure, path: Path | str) -> None:
    """Write `figure`; the suffix chooses the format. Equal figures are equal files: no date, no random names inside."""
    import matplotlib

    dated = Path(path).suffix.lower() == ".svg"
    with matplotlib.rc_context({"svg.hashsalt": "sinkformers"}):
        figure.savefig(path, dpi=140, metadata={"Date": None} if dated else None)
