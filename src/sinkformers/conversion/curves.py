"""Curves over the calls of watched modules: as a matplotlib figure, and as SVG without it."""

import html
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMALLEST = 1e-8  # the end of a logarithmic axis: errors below are those of rounding
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 360, 170, 46, 24, 22
MOST_POINTS = 400  # of a curve in SVG


class Curve(NamedTuple):
    """The values of one module, call by call; NaN where there is none."""

    name: str
    values: list[float]


class Curves(NamedTuple):
    """One panel: a curve per module."""

    title: str
    curves: list[Curve]
    logarithmic: bool


def colours(count: int) -> list[str]:
    """Return a colour per module, from light to dark violet in their order."""
    light, dark = (0xB3, 0xAD, 0xF0), (0x1D, 0x17, 0x55)
    places = [number / max(1, count - 1) for number in range(count)]
    return ["#" + "".join(f"{round(a + (b - a) * t):02x}" for a, b in zip(light, dark, strict=True)) for t in places]


def curves_figure(panels: Sequence[Curves]) -> "Figure":
    """Return a matplotlib figure with one panel each."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "watch.plot() needs matplotlib: pip install matplotlib. In a notebook, the watch alone shows the same."
        ) from error
    figure = Figure(figsize=(9.6, 6.0), layout="constrained")
    for axes, panel in zip(figure.subplots(2, 2).flat, panels, strict=True):
        for curve, colour in zip(panel.curves, colours(len(panel.curves)), strict=True):
            values = [max(value, SMALLEST) if panel.logarithmic else value for value in curve.values]
            axes.plot(range(1, len(values) + 1), values, color=colour, label=curve.name, marker="." * (len(values) < 2))
        if panel.logarithmic:
            axes.set_yscale("log")
        else:
            axes.axhline(1.0, color="#c9551f", linewidth=0.9, linestyle="--")
        axes.set_title(panel.title, fontsize=10)
        axes.set_xlabel("call", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    if panels and panels[0].curves:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def curves_svg(panels: Sequence[Curves]) -> str:
    """Return the panels as one SVG element with a legend, or nothing where no module was called."""
    if not any(curve.values for panel in panels for curve in panel.curves):
        return ""
    names = [curve.name for curve in panels[0].curves]
    parts = []
    for number, panel in enumerate(panels):
        place = f"translate({number % 2 * WIDTH} {number // 2 * HEIGHT})"
        parts.append(f'<g transform="{place}">{_panel(panel)}</g>')
    below = (len(panels) + 1) // 2 * HEIGHT
    for number, (name, colour) in enumerate(zip(names, colours(len(names)), strict=True)):
        x, y = 10 + number % 2 * WIDTH, below + 14 + number // 2 * 16
        parts.append(f'<rect x="{x}" y="{y - 8}" width="14" height="3" fill="{colour}"/>')
        parts.append(_text(x + 20, y - 3, name))
    height = below + 24 + (len(names) + 1) // 2 * 16
    title = "Column sums and marginal errors over the calls, one line per module; the table has their extremes."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {height}" role="img" '
        'style="max-width: 760px; width: 100%; background: #fff" font-family="sans-serif" font-size="10">'
        f"<title>{title}</title>{''.join(parts)}</svg>"
    )


def _panel(panel: Curves) -> str:
    """Return the title, the axes and the lines of one panel."""
    shown = [_spread(curve.values) for curve in panel.curves]
    known = [value for values in shown for _, value in values if math.isfinite(value)]
    if panel.logarithmic:
        known = [math.log10(max(value, SMALLEST)) for value in known]
        low, high = math.floor(min(known, default=-8.0)), math.ceil(max(known, default=0.0))
    else:
        low, high = 0.0, 1.05 * max([1.0, *known])
    high = high if high > low else low + 1
    calls = max(2, *(len(curve.values) for curve in panel.curves), 2)
    wide, tall = WIDTH - LEFT - 14, HEIGHT - TOP - BOTTOM

    def at(call: int, value: float) -> str:
        value = math.log10(max(value, SMALLEST)) if panel.logarithmic else value
        return f"{LEFT + wide * call / (calls - 1):.1f},{TOP + tall * (high - value) / (high - low):.1f}"

    parts = [_text(LEFT, 14, panel.title, weight="600")]
    ends = [f"1e{high:.0f}", f"1e{low:.0f}"] if panel.logarithmic else [f"{high:.3g}", "0"]
    parts += [_text(LEFT - 5, y, end, anchor="end") for y, end in zip((TOP + 6, TOP + tall), ends, strict=True)]
    parts += [_text(LEFT, HEIGHT - 8, "call 1"), _text(WIDTH - 14, HEIGHT - 8, str(calls), anchor="end")]
    parts.append(f'<path d="M{LEFT} {TOP}v{tall}h{wide}" fill="none" stroke="#8a90a6"/>')
    if not panel.logarithmic:
        parts.append(f'<path d="M{at(0, 1.0)}L{at(calls - 1, 1.0)}" stroke="#c9551f" stroke-dasharray="4 3"/>')
    for values, colour in zip(shown, colours(len(shown)), strict=True):
        points = " ".join(at(call, value) for call, value in values if math.isfinite(value))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.4"/>')
        if " " not in points and points:  # a single call
            x, y = points.split(",")
            parts.append(f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>')
    return "".join(parts)


def _spread(values: list[float]) -> list[tuple[int, float]]:
    """Return at most `MOST_POINTS` calls and their values: of each stretch, the one that is furthest from 1."""
    stretch = max(1, math.ceil(len(values) / MOST_POINTS))
    chunks = (list(enumerate(values))[start : start + stretch] for start in range(0, len(values), stretch))
    return [max(chunk, key=lambda point: abs(point[1] - 1) if math.isfinite(point[1]) else -1.0) for chunk in chunks]


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "400") -> str:
    return (
        f'<text x="{x}" y="{y}" fill="#1f2433" text-anchor="{anchor}" font-weight="{weight}">{html.escape(text)}</text>'
    )
