"""POT, Python Optimal Transport: `ot.bregman.sinkhorn_log`, which ends on a row step."""

import warnings

from torch import Tensor

from benchmarks.rows.row import peer
from benchmarks.solvers.solver import MOST_PRODUCTS, Solution, Solver, quarters


def _solve(scores: Tensor, goal: float) -> Solution:
    """`goal` is the root mean square of the relative column errors; POT takes the norm of errors of masses 1/n."""
    n = len(scores)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it did not converge is in the table
        plan, log = peer("ot.bregman", "test").sinkhorn_log(
            [], [], -scores, 1.0, numItermax=MOST_PRODUCTS // 2, stopThr=goal / n**0.5, log=True
        )
    return Solution(plan * n, 2 * (int(log["niter"]) + 1))


SOLVERS = [Solver("pot-limit", "POT, `ot.bregman.sinkhorn_log`", _solve, quarters)]
