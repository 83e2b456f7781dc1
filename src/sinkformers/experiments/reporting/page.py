"""The report: one page that needs nothing but itself, and beside it every figure and every table as a file."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sinkformers.experiments.artefact import ExperimentError
from sinkformers.experiments.reporting import curves, finals, tables, words
from sinkformers.experiments.reporting.panels import save
from sinkformers.experiments.reporting.summary import Summary

TEMPLATE = "page.html.jinja"
FORMATS = (".png", ".svg")

# Name, caption, and how it is drawn.
BY_EPOCH = (
    ("learning", "Training and test by epoch. Thin lines are runs, bold ones medians.", curves.learning),
    (
        "columns",
        "Column sums of the attention weights by epoch, epoch 0 being the untrained model. Bands hold 5 to 95 % and "
        "25 to 75 % of all columns; in a doubly stochastic matrix every column sums to 1.",
        curves.column_sums,
    ),
    (
        "errors",
        "Marginal error of each layer by epoch: the largest distance of a row or column sum from its target.",
        curves.marginal_errors,
    ),
)


@dataclass(frozen=True)
class Picture:
    """A figure as the page shows it; `source` is a data URI."""

    name: str
    caption: str
    alt: str
    source: str


@dataclass(frozen=True)
class Section:
    """One artefact at one scale, ready to be printed."""

    anchor: str
    summary: Summary
    finding: str
    notes: list[str]
    pictures: list[Picture]
    results: tables.Table
    costs: tables.Table
    runs: tables.Table
    layers: tables.Table
    scale: tables.Table


def write(summaries: Sequence[Summary], out: Path) -> Path:
    """Write `index.html`, the figures (PNG and SVG) and the tables (CSV and Markdown) to `out`; returns the page."""
    out.mkdir(parents=True, exist_ok=True)
    sections = [_section(summary, out) for summary in summaries]
    for section in sections:
        (out / f"{section.anchor}.csv").write_text(tables.comma_separated(section.summary), encoding="utf-8")
        (out / f"{section.anchor}.md").write_text(_markdown(section), encoding="utf-8")
    page = out / "index.html"
    page.write_text(fill(TEMPLATE, sections=sections), encoding="utf-8")
    return page


def fill(template: str, **values: Any) -> str:
    """A page from one of the templates beside this file. Everything that is put in is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)


def _section(summary: Summary, out: Path) -> Section:
    anchor = _file_name(f"{summary.artefact.name}-{summary.preset}")
    pictures = list(_pictures(summary, out / anchor)) if summary.records else []
    return Section(
        anchor,
        summary,
        words.finding(summary),
        words.notes(summary),
        pictures,
        tables.results(summary),
        tables.costs(summary),
        tables.runs(summary),
        tables.layers(summary),
        tables.scale(summary),
    )


def _pictures(summary: Summary, stem: Path) -> Iterator[Picture]:
    """Draw what the runs hold."""
    records = list(summary.records)
    setting = finals.swept(records)
    if setting is not None:
        caption = f"Final test {summary.metric} against {setting}. Dots are runs, lines go through medians."
        yield picture("against", caption, stem, lambda path: save(finals.against(records, setting), path))
    caption = f"Final test {summary.metric} of every run; the bar is the median."
    yield picture("runs", caption, stem, lambda path: save(finals.final_values(records), path))
    for name, caption, figure in BY_EPOCH:
        try:
            drawn = figure(records)
        except ExperimentError:
            continue  # not every experiment measures its attention
        yield picture(name, caption, stem, lambda path, drawn=drawn: save(drawn, path))


def picture(name: str, caption: str, stem: Path, write: Callable[[Path], None]) -> Picture:
    files = [stem.with_name(f"{stem.name}-{name}{suffix}") for suffix in FORMATS]
    for file in files:
        write(file)
    source = base64.b64encode(files[-1].read_bytes()).decode("ascii")
    alt = f"Figure: {caption} The numbers are in the tables."
    return Picture(name, caption, alt, f"data:image/svg+xml;base64,{source}")


def _markdown(section: Section) -> str:
    printed = [tables.markdown(table) for table in (section.results, section.runs, section.costs) if table.rows]
    parts = [section.finding, *section.notes, *printed]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text).strip(".-") or "report"
