"""A page of predictions that opens offline, with every figure as a file."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

from sinkformers.lab.reporting.html import Picture, data_uri, file_name, render
from sinkformers.lab.reporting.panels import save
from sinkformers.lab.reporting.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATE = "predictions.html.jinja"
LONGEST_NAME, LONGEST_TITLE = 40, 160


@dataclass(frozen=True)
class Shown:
    """One input: its name, the prediction and a figure."""

    name: str
    table: Table
    figure: Figure
    caption: str


def write(title: str, shown: Sequence[Shown], out: Path) -> Path:
    """Write `index.html` and a PNG per input to `out`; return the page."""
    out.mkdir(parents=True, exist_ok=True)
    sections = []
    for number, each in enumerate(shown, 1):
        file = out / f"{number:02}-{file_name(each.name)[:LONGEST_NAME]}.png"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # a text may hold characters that the font lacks
            save(each.figure, file)
        alt = f"Figure: {each.caption}"
        name = shorten(each.name, LONGEST_TITLE, placeholder=" …")
        sections.append({"name": name, "table": each.table, "picture": Picture(each.caption, alt, data_uri(file))})
    page = out / "index.html"
    page.write_text(render(TEMPLATE, title=title, sections=sections), encoding="utf-8")
    return page
