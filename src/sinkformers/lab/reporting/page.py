"""The report: one self-contained page, and every figure and every table as a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sinkformers.lab.artefacts.artefact import ExperimentError
from sinkformers.lab.reporting import attention_maps, curves, finals, tables, words
from sinkformers.lab.reporting.html import Picture, drawn, file_name, render
from sinkformers.lab.reporting.summary import Summary

TEMPLATE = "page.html.jinja"

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
class Section:
    """One preset of an artefact, as the page shows it."""

    anchor: str
    summary: Summary
    finding: str
    notes: list[str]
    maps: Picture | None  # of attention before and after training
    commands: list[tuple[str, str]]  # what to do next, and the command
    pictures: list[Picture]
    results: tables.Table
    trend: str
    uneven: list[str]
    costs: tables.Table
    equal_time: tables.Table | None  # where the artefact asks for it
    columns: tables.Table
    runs: tables.Table
    layers: tables.Table
    scale: tables.Table


def write(summaries: Sequence[Summary], out: Path) -> Path:
    """Write `index.html`, the figures (PNG and SVG) and the tables (CSV and Markdown) to `out`; return the page."""
    out.mkdir(parents=True, exist_ok=True)
    sections = [_section(summary, out) for summary in summaries]
    for section in sections:
        (out / f"{section.anchor}.csv").write_text(tables.comma_separated(section.summary), encoding="utf-8")
        (out / f"{section.anchor}.md").write_text(_markdown(section), encoding="utf-8")
    page = out / "index.html"
    page.write_text(render(TEMPLATE, sections=sections), encoding="utf-8")
    return page


def _section(summary: Summary, out: Path) -> Section:
    anchor = file_name(f"{summary.artefact.name}-{summary.preset}")
    pictures = list(_pictures(summary, out / anchor)) if summary.records else []
    return Section(
        anchor,
        summary,
        words.finding(summary),
        words.notes(summary),
        _maps(summary, out / anchor),
        attention_maps.commands(summary),
        pictures,
        tables.results(summary),
        words.trend(summary),
        words.uneven(summary),
        tables.costs(summary),
        tables.equal_time(summary) if summary.artefact.equal_time else None,
        tables.columns(summary),
        tables.runs(summary),
        tables.layers(summary),
        tables.scale(summary),
    )


def _pictures(summary: Summary, stem: Path) -> Iterator[Picture]:
    """Draw all figures for which the runs hold data."""
    records = list(summary.records)
    setting = finals.swept(records)
    if setting is not None:
        caption = f"Final test {summary.metric.label} against {setting}. Dots are runs, lines go through medians."
        yield drawn("against", caption, stem, lambda: finals.against(records, setting))
    caption = f"Final test {summary.metric.label} of every run; the bar is the median."
    yield drawn("runs", caption, stem, lambda: finals.final_values(records))
    for name, caption, figure in BY_EPOCH:
        try:
            yield drawn(name, caption, stem, partial(figure, records))
        except ExperimentError:
            continue  # not every experiment measures its attention


def _maps(summary: Summary, stem: Path) -> Picture | None:
    """Draw the attention of trained models on an image, where the runs hold images."""
    maps = attention_maps.find(summary.records)
    if maps is None:
        return None
    return drawn("attention", attention_maps.caption(maps), stem, partial(attention_maps.draw, maps))


def _markdown(section: Section) -> str:
    shown = (section.results, section.runs, section.costs, section.equal_time)
    printed = [tables.markdown(table) for table in shown if table is not None and table.rows]
    parts = [section.finding, *section.notes, *printed]
    return "\n\n".join(part.strip() for part in parts) + "\n"
