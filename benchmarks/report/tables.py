"""Records as Markdown tables."""

from collections.abc import Callable, Iterable, Sequence

from benchmarks.measurement import FITTED, Measurement
from benchmarks.records import Run
from benchmarks.report.target import Target
from benchmarks.rows import ROWS
from benchmarks.solvers import SOLVERS
from benchmarks.units import duration, size


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    wrong = [line for line in lines if len(line) != len(head)]
    if wrong:
        raise ValueError(f"table: every line needs {len(head)} cells; got {wrong[0]}.")
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def provenance(run: Run) -> str:
    machine = run.machine
    isa = ", ".join(machine["isa"])
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    commit = f"; commit {run.commit}" if run.commit else ""  # an installed package knows none
    commit += ", with uncommitted changes" if run.dirty else ""
    return (
        f"`{run.command}`, {run.started[:10]}: {machine['cpu']} ({isa}), {machine['cores']} cores, "
        f"{machine['threads']} threads; {versions}{commit}."
    )


def grid(
    found: Sequence[Measurement],
    line: Callable[[Measurement], str],
    column: Callable[[Measurement], str],
    cell: Callable[[Measurement], str],
) -> str:
    """Lines by columns, in the order of their first appearance; notes under the table say why a row has no number."""
    found = [m for m in found if m.status != FITTED]
    columns = list(dict.fromkeys(column(m) for m in found))
    names = list(dict.fromkeys(line(m) for m in found))
    cells = {(line(m), column(m)): ("–" if m.reason else cell(m)) for m in found}
    body = [[name, *(cells.get((name, head), "") for head in columns)] for name in names]
    kept = [line for line in body if any(text not in ("", "–") for text in line[1:])]
    return "\n\n".join(filter(None, [table(["", *columns], kept), notes(found)])) if kept else notes(found)


def label(m: Measurement) -> str:
    return ", ".join(filter(None, [_title(m.row), f"n_iters {m.n_iters}" if m.n_iters else "", m.variant]))


def _title(row: str) -> str:
    known = ROWS.get(row) or SOLVERS.get(row)
    return known.title if known else row


def shape(m: Measurement) -> str:
    return m.shape


def notes(found: Iterable[Measurement]) -> str:
    """One line for each row and reason, with the shapes it is about."""
    about: dict[tuple[str, str, str], list[str]] = {}
    for m in found:
        if m.reason:
            name = _title(m.row)
            where = m.shape + (f" at n_iters {m.n_iters}" if m.n_iters else "")
            about.setdefault((name, m.status, m.reason), []).append(where)
    return "\n".join(
        f"- {name}: {status}, {reason} ({_places(where)})." for (name, status, reason), where in about.items()
    )


def _places(where: list[str]) -> str:
    return ", ".join(where) if len(where) <= 3 else f"{len(where)} of its cells"


def ratio_cell(m: Measurement) -> str:
    """The ratio and its quartiles; the baseline itself shows its time."""
    if m.ratio is None or m.seconds is None:
        return duration(m.seconds.median) if m.seconds else "–"
    if m.row == m.baseline and not m.variant:
        return f"1 ({duration(m.seconds.median)})"
    return f"{m.ratio.median:.2f} ({m.ratio.first:.2f}–{m.ratio.third:.2f})"


def scaling_cell(m: Measurement) -> str:
    time = duration(m.seconds.median) if m.seconds else "–"
    return time if m.peak_bytes is None else f"{time}, {size(m.peak_bytes)}"


def memory_cell(m: Measurement) -> str:
    return "–" if m.peak_bytes is None else size(m.peak_bytes)


def fits(found: Iterable[Measurement]) -> str:
    lines = [
        f"- {label(m)}, {m.shape}: " + ", ".join(f"{name} {_number(value)}" for name, value in m.fit.items())
        for m in found
        if m.fit
    ]
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:.2f}" if abs(value) >= 0.01 else f"{value:.1e}"


def target_table(found: Sequence[Target]) -> str:
    met, unknown = (sum(target.verdict == verdict for target in found) for verdict in ("met", "not measured"))
    body = [[target.text, target.wanted, target.measured, target.verdict] for target in found]
    summary = f"{met} of {len(found)} met" + (f", {unknown} not measured" if unknown else "")
    return f"{summary}.\n\n" + table(["target", "wanted", "measured", ""], body)
