"""`sinkhorn_limit`, by Newton's method and by Sinkhorn's iterations alone."""

from collections.abc import Callable

from torch import Tensor

from benchmarks.solvers.solver import MOST_PRODUCTS, Solution, Solver
from sinkformers import sinkhorn_limit


def _by(method: str) -> Callable[[Tensor, float], Solution]:
    def solve(scores: Tensor, tol: float) -> Solution:
        weights, info = sinkhorn_limit(scores, tol=tol, max_iters=MOST_PRODUCTS, method=method, return_info=True)
        return Solution(weights, int(info.products))

    return solve


SOLVERS = [
    Solver("newton", "**`sinkhorn_limit`**", _by("auto"), lambda tol: [tol]),
    Solver("sinkhorn", '`sinkhorn_limit(method="sinkhorn")`', _by("sinkhorn"), lambda tol: [tol]),
]
