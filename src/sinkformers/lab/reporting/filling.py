"""Tables of a report in a Markdown page, so that the page always agrees with the records.

A place in the page is `<!-- results: ARTEFACT PRESET PART -->` with `<!-- end -->` below it. Everything between them is
replaced. A place that is empty may wait for its records.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from sinkformers.lab.artefacts.artefact import ExperimentError
from sinkformers.lab.reporting import tables, words
from sinkformers.lab.reporting.summary import Summary

PLACE = re.compile(r"(<!-- results: (\S+) (\S+) (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
PARTS: dict[str, Callable[[Summary], str]] = {
    "finding": lambda summary: "\n\n".join([words.finding(summary), *words.notes(summary)]) + "\n",
    "results": lambda summary: tables.markdown(tables.results(summary)),
    "runs": lambda summary: tables.markdown(tables.runs(summary)),
    "costs": lambda summary: tables.markdown(tables.costs(summary)),
    "equal-time": lambda summary: tables.markdown(tables.equal_time(summary)),
    "columns": lambda summary: f"{words.trend(summary)}\n\n{tables.markdown(tables.columns(summary))}",
    "limit": lambda summary: tables.markdown(tables.limit(summary)),
    "layers": lambda summary: tables.markdown(tables.layers(summary)),
}


def filled(page: str, summaries: Sequence[Summary]) -> str:
    """Return the page with all places filled. Text whose records are missing raises `ExperimentError`."""
    found = {(summary.artefact.name, summary.preset): summary for summary in summaries}

    def fill(place: re.Match[str]) -> str:
        begin, artefact, preset, part, text, end = place.groups()
        if part not in PARTS:
            raise ExperimentError(f"a page asks for the part {part!r} of {artefact}; choose one of {', '.join(PARTS)}.")
        if (artefact, preset) not in found and not text.strip():
            return place[0]
        if (artefact, preset) not in found:
            raise ExperimentError(f"a page asks for {artefact}, {preset}, and no run of it is there; name its folder.")
        return f"{begin}\n{PARTS[part](found[artefact, preset])}\n{end}"

    if not PLACE.search(page):
        raise ExperimentError("the page has no place to fill: <!-- results: ARTEFACT PRESET PART --> … <!-- end -->.")
    return PLACE.sub(fill, page)
