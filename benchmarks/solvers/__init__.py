"""Every solver of the limit by name, in the order of the table."""

from benchmarks.solvers import geomloss, ott, ours, pot
from benchmarks.solvers.solver import Solution, Solver

SOLVERS: dict[str, Solver] = {solver.name: solver for family in (ours, pot, ott, geomloss) for solver in family.SOLVERS}
NEWTON, SINKHORN, POT = "newton", "sinkhorn", "pot-limit"
EXTRAS = ("ott-anderson", "ott-momentum", "geomloss-limit")

__all__ = ["EXTRAS", "NEWTON", "POT", "SINKHORN", "SOLVERS", "Solution", "Solver"]
