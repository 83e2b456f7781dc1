"""GeomLoss: averaged updates under an annealed temperature.

It has no stopping criterion, so the number of its iterations is doubled until the tolerance is reached. The last row
step is ours.
"""

from torch import Tensor

from benchmarks.rows.row import peer
from benchmarks.solvers.solver import MOST_PRODUCTS, Solution, Solver

FEWEST = 32
OTHERS = 2  # a first and a last update of both potentials, beside the iterations


def _solve(scores: Tensor, iterations: float) -> Solution:
    solver = peer("geomloss.ot", "peers-geomloss")
    plan = solver.solve_batch(-scores[None], reg=1.0, max_iter=int(iterations)).plan[0]
    return Solution(plan / plan.sum(-1, keepdim=True), 2 * (int(iterations) + OTHERS))


def _counts(tol: float) -> list[float]:
    most = MOST_PRODUCTS // 2 - OTHERS
    doubled = [FEWEST * 2**power for power in range(most.bit_length())]
    return [*(float(count) for count in doubled if count < most), float(most)]


SOLVERS = [Solver("geomloss-limit", "GeomLoss, its own schedule", _solve, _counts)]
