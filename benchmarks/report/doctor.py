"""What users measured on their devices with `sinkformers doctor --bench --json`."""

from collections.abc import Sequence

from benchmarks.measurement import MEASURED, Measurement
from benchmarks.records import DOCTOR, Newest
from benchmarks.report import tables


def section(newest: Newest) -> str:
    """Return for each device the newest record: agreement with float64, and times beside SDPA."""
    parts = [
        _device(suite.removeprefix(DOCTOR), tables.provenance(run), found)
        for suite, (run, found) in sorted(newest.items())
        if suite.startswith(DOCTOR)
    ]
    return "\n\n".join(parts) or "No record yet: `sinkformers doctor --bench --json gpu.jsonl` writes one."


def _device(name: str, provenance: str, found: Sequence[Measurement]) -> str:
    timed = [m for m in found if m.n is not None]
    compared = [m for m in found if m.n is None]
    return "\n\n".join(
        filter(
            None,
            [
                f"### {name}",
                provenance,
                "Largest deviation from float64, divided by the largest entry, of outputs and gradients:",
                tables.grid(compared, tables.shape, _row, _deviation),
                tables.grid(timed, tables.label, tables.shape, tables.ratio_cell),
            ],
        )
    )


def _row(m: Measurement) -> str:
    return m.row


def _deviation(m: Measurement) -> str:
    return f"{m.deviation:.0e}" if m.status == MEASURED and m.deviation is not None else "–"
