"""The page: prose stays, what is between the markers is written from the records."""

import re
from pathlib import Path

from benchmarks.measurement import Measurement
from benchmarks.records import DOCTOR, Newest
from benchmarks.report import doctor, limit, plots, products, tables
from benchmarks.report.targets import targets

MARKED = re.compile(r"(<!-- benchmark: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
PICTURES = {
    "scaling": {"time-n": "Time against n", "memory-n": "Peak memory against n"},
    "limit": {"limit-products": "Column error against products"},
    "operator": {"time-iterations": "Time of `sinkhorn` against n_iters"},
}
TRANSPOSED = ("conversion", "bias")  # many shapes, few rows


def fill(page: Path, newest: Newest) -> list[Path]:
    """Rewrite the marked parts of the page, draw its pictures, and name what was written."""
    text = page.read_text(encoding="utf-8")
    if not MARKED.search(text):
        raise ValueError(f"{page.name} has no markers <!-- benchmark: NAME --> … <!-- end -->; nothing to fill.")
    pictures = plots.draw({suite: found for suite, (_, found) in newest.items()}, page.parent / "assets")

    def section(match: re.Match[str]) -> str:
        return f"{match[1]}\n{render(match[2], newest, pictures, page.parent)}\n\n{match[3]}"

    page.write_text(MARKED.sub(section, text), encoding="utf-8")
    return [page, *pictures.values()]


def render(name: str, newest: Newest, pictures: dict[str, Path], folder: Path) -> str:
    """One marked part: a suite's table, or the table of targets."""
    if name == "targets":
        return _targets({suite: found for suite, found in newest.items() if not suite.startswith(DOCTOR)})
    if name == "doctor":
        return doctor.section(newest)
    if name not in newest:
        return f"Not recorded yet: `python -m benchmarks {name}`."
    run, found = newest[name]
    if name == "peak":
        return f"{tables.provenance(run)}\n\n{products.section(newest)}"
    parts = [tables.provenance(run), *_pictures(name, pictures, folder)]
    parts += [limit.section(found)] if name == "limit" else [_table(name, found), tables.fits(found)]
    return "\n\n".join(filter(None, parts))


def _targets(newest: Newest) -> str:
    if not newest:
        return "Not recorded yet: `make bench`."
    runs = {run.started: run for run, _ in newest.values()}
    sources = "\n\n".join(tables.provenance(runs[started]) for started in sorted(runs))
    return sources + "\n\n" + tables.target_table(targets({suite: found for suite, (_, found) in newest.items()}))


def _table(name: str, found: list[Measurement]) -> str:
    cells = {"memory": tables.memory_cell, "scaling": tables.scaling_cell}
    line, column = tables.label, tables.shape
    if name in TRANSPOSED:
        line, column = column, line
    return tables.grid(found, line, column, cells.get(name, tables.ratio_cell))


def _pictures(name: str, pictures: dict[str, Path], folder: Path) -> list[str]:
    wanted = PICTURES.get(name, {})
    return [
        f"![{title}]({pictures[key].relative_to(folder).as_posix()})"
        for key, title in wanted.items()
        if key in pictures
    ]
