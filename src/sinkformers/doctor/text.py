"""The findings as tables of text."""

import statistics
from collections.abc import Iterator, Sequence

import torch

from sinkformers.core.timing import duration
from sinkformers.doctor.agreement import DTYPES, Finding
from sinkformers.doctor.benchmark import SDPA, Timed


def agreement_table(found: Sequence[Finding]) -> Iterator[str]:
    """The lines of one problem: a backend each, with the deviations of output and gradients in each dtype."""
    by_backend: dict[str, dict[str, Finding]] = {}
    for finding in found:
        by_backend.setdefault(finding.backend, {})[str(finding.dtype)] = finding
    head = "".join(f"{_name(dtype):<20}" for dtype in DTYPES)
    yield f"{found[0].problem}, n_iters {found[0].n_iters}".ljust(38) + head.rstrip()
    for backend, by_dtype in by_backend.items():
        reasons = dict.fromkeys(finding.cannot for finding in by_dtype.values() if finding.cannot)
        if all(finding.cannot for finding in by_dtype.values()):
            yield f"  {backend:<36}cannot serve: {'; '.join(reasons)}"
            continue
        cells = [_cell(by_dtype.get(str(dtype))) for dtype in DTYPES]
        yield f"  {backend:<36}" + "".join(f"{cell:<20}" for cell in cells).rstrip()
        yield from (f"  {'':<36}–: {reason}" for reason in reasons)
    yield from (f"  {each.backend}, {each.dtype}: it raised {each.raised}" for each in found if each.raised)


def _cell(finding: Finding | None) -> str:
    if finding is None:
        return ""
    if finding.raised:
        return "RAISED"
    if finding.cannot:
        return "–"
    numbers = f"{finding.output:.0e} {finding.gradients:.0e}"
    return numbers + (" WRONG" if finding.disagrees else " auto" if finding.automatic else "")


def benchmark_table(found: Sequence[Timed]) -> Iterator[str]:
    """The lines of one shape: median time of forward and backward, and its ratio to that of SDPA in the same round."""
    yield f"{found[0].shape}, {_name(found[0].dtype)}"
    for timed in found:
        name = timed.row if timed.n_iters is None else f"{timed.row}, n_iters {timed.n_iters}"
        if timed.reason:
            yield f"  {name:<24}{timed.reason}"
            continue
        ratio = "" if timed.row == SDPA else f"{statistics.median(timed.ratios):>8.2f} × SDPA"
        yield f"  {name:<24}{duration(statistics.median(timed.seconds)):>9}{ratio}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
