"""Attention rows as entries of a contest."""

from collections.abc import Iterable
from dataclasses import replace

from benchmarks import agreement
from benchmarks.case import Case, draw
from benchmarks.contest import Entry
from benchmarks.rows import Row

# batch, heads and n of the shapes that every comparison uses, and the seconds their rounds may take together.
SHAPES = {
    "256 × 64": Case(32, 8, 64),
    "64 × 128": Case(8, 8, 128),
    "128 × 197": Case(16, 8, 197),
    "16 × 512": Case(2, 8, 512),
    "8 × 1024": Case(1, 8, 1024),
    "2 × 4096": Case(1, 2, 4096),
}
SECONDS = {64: 15.0, 128: 15.0, 197: 25.0, 512: 30.0, 1024: 45.0, 4096: 60.0}


def attention_entry(row: Row, case: Case, variant: str = "") -> Entry:
    """Return a row as it is timed; SoftMax rows have no number of iterations."""
    softmax = row.formula == "softmax"
    case = replace(case, n_iters=1, tol=None) if softmax else case
    settings = {"n": case.n, "variant": variant} | ({} if softmax else {"n_iters": case.iterations})
    return Entry(
        row.name,
        build=lambda: row.prepare(draw(case)),
        check=lambda: agreement.check_attention(case, row.prepare, row.formula),
        settings=settings,
        compiled=row.compiled,
    )


def attention_entries(rows: Iterable[Row], case: Case, counts: Iterable[int], variant: str = "") -> list[Entry]:
    """Return every row at every number of iterations, SoftMax rows once."""
    counts = tuple(counts)
    return [
        attention_entry(row, replace(case, n_iters=n_iters), variant)
        for row in rows
        for n_iters in (counts[:1] if row.formula == "softmax" else counts)
    ]
