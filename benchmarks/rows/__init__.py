"""Every row by name, in the order of the tables."""

from benchmarks.rows import geomloss, keops, loops, ott, ours, pot, softmax
from benchmarks.rows.row import Row

ROWS: dict[str, Row] = {
    row.name: row for family in (softmax, ours, loops, pot, geomloss, keops, ott) for row in family.ROWS
}
EXTRAS = ("geomloss", "keops", "ott")

__all__ = ["EXTRAS", "ROWS", "Row"]
