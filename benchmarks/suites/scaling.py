"""Time and peak memory of one head against n, n_iters 5, with the exponents of both fitted where n is large."""

import math
import time
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.case import Case
from benchmarks.contest import compete
from benchmarks.measurement import FITTED, LEFT_OUT, Measurement
from benchmarks.progress import Progress
from benchmarks.rows import Row
from benchmarks.settings import Settings
from benchmarks.suites.entries import attention_entry
from benchmarks.suites.memory import peak_of
from benchmarks.summary import exponent
from benchmarks.timing import Plan
from benchmarks.units import duration

ROWS = ("sdpa", "native", "torch")
SIZES = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
QUICK_SIZES = (256, 512, 1024)
BUDGET = 240.0  # seconds for the whole suite
LONGEST = 20.0  # seconds per call, for rows that only stand beside ours
CALLS = 3  # check, one round, and the peak's own process
GROWTH = 4.5  # of a call's time, from one size to the next
FITTED_SIZES = 4  # the largest: small ones show fixed costs


def run(settings: Settings, progress: Progress) -> Iterator[Measurement]:
    results: list[Measurement] = []
    end = time.perf_counter() + BUDGET * settings.budget
    for n in QUICK_SIZES if settings.quick else SIZES:
        case = Case(1, 1, n, n_iters=5)
        rows, found = _affordable(settings.pick(ROWS), results, case, end - time.perf_counter())
        for measurement in found:
            progress.show(measurement)
        found += _at(case, rows, settings, progress)
        results += found
        yield from found
    for row in ROWS:
        yield from _fits(row, results, progress)


def _affordable(
    rows: list[Row], results: list[Measurement], case: Case, left: float
) -> tuple[list[Row], list[Measurement]]:
    """Rows that the time left suffices for, ours before the others, and the rest with their reason."""
    kept, out = [], []
    for row in sorted(rows, key=lambda row: row.name != "native"):
        call = GROWTH * _last_seconds(row.name, results)
        longest = math.inf if row.name == "native" else LONGEST
        if call > longest or CALLS * call > left:
            reason = f"a call would take about {duration(call)}, too long for this suite"
            n_iters = None if row.formula == "softmax" else case.n_iters
            out.append(Measurement("scaling", case.label, row.name, LEFT_OUT, n_iters, reason=reason, n=case.n))
        else:
            kept.append(row)
            left -= CALLS * call
    return kept, out


def _last_seconds(row: str, results: list[Measurement]) -> float:
    """The last call that was timed, grown over the sizes since that were not."""
    seconds = 0.0
    for m in (m for m in results if m.row == row):
        seconds = m.seconds.median if m.seconds else GROWTH * seconds
    return seconds


def _at(case: Case, rows: list[Row], settings: Settings, progress: Progress) -> list[Measurement]:
    large = case.n >= 8192
    plan = Plan(2.0 * settings.budget, least=1 if large or settings.quick else 5, most=30)
    timed = compete("scaling", case.label, [attention_entry(row, case) for row in rows], plan, progress)
    return [_with_peak(measurement, case, settings) for measurement in timed]


def _with_peak(measurement: Measurement, case: Case, settings: Settings) -> Measurement:
    if measurement.seconds is None:
        return measurement
    weighed = peak_of("scaling", measurement.row, case, settings.threads)
    return replace(measurement, peak_bytes=weighed.peak_bytes)


def _fits(row: str, results: list[Measurement], progress: Progress) -> Iterator[Measurement]:
    times = [(float(m.n), m.seconds.median) for m in results if m.row == row and m.n and m.seconds][-FITTED_SIZES:]
    peaks = [(float(m.n), float(m.peak_bytes)) for m in results if m.row == row and m.n and m.peak_bytes]
    peaks = peaks[-FITTED_SIZES:]
    fit = {
        name: exponent(*zip(*points, strict=True))
        for name, points in (("time exponent", times), ("memory exponent", peaks))
        if len(points) >= 3
    }
    if fit:
        label = f"n from {times[0][0]:.0f} to {times[-1][0]:.0f}"
        measurement = Measurement("scaling", label, row, FITTED, None if row == "sdpa" else 5, fit=fit)
        progress.show(measurement)
        yield measurement
