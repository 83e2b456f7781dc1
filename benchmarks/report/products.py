"""What part of the machine's peak the products of attention reach."""

from benchmarks.measurement import Measurement
from benchmarks.records import Newest, Run
from benchmarks.report import tables
from benchmarks.suites import half
from benchmarks.suites.entries import SHAPES
from benchmarks.suites.peak import RATE, flops

CASES = {"attention": SHAPES, "half": half.CASES}
ROWS = ("sdpa", "native")


def section(newest: Newest) -> str:
    """Return the table of peaks and the table of the parts reached, from runs on the same machine and threads."""
    run, found = newest["peak"]
    peaks = {m.shape: m.fit[RATE] for m in found if RATE in m.fit}
    body = [[dtype, f"{peak:.0f}"] for dtype, peak in peaks.items()]
    return "\n\n".join([tables.table(["precision", f"peak, {RATE}"], body), _parts(newest, run, peaks)])


def _parts(newest: Newest, peak_run: Run, peaks: dict[str, float]) -> str:
    timed = [
        m
        for suite, cases in CASES.items()
        if suite in newest and _machine(newest[suite][0]) == _machine(peak_run)
        for m in newest[suite][1]
        if m.row in ROWS and m.seconds and m.shape in cases and cases[m.shape].dtype in peaks
    ]
    if not timed:
        return "Parts of the peak need the suite `attention` on the same machine with the same threads."
    return tables.grid(timed, tables.label, tables.shape, lambda m: _part(m, peaks))


def _part(m: Measurement, peaks: dict[str, float]) -> str:
    case = CASES[m.suite][m.shape]
    assert m.seconds is not None
    peak = max(peaks[case.dtype], peaks.get("float32", 0.0))  # a kernel for half precision may compute in float32
    return f"{100e-9 * flops(case) / m.seconds.median / peak:.0f} %"


def _machine(run: Run) -> list[object]:
    """Return what two runs must have in common; one name may stand for processors with other instructions."""
    return [run.machine[name] for name in ("cpu", "isa", "threads")]
