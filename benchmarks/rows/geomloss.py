"""GeomLoss: averaged updates under an annealed temperature, differentiated through the last one.

That is another map than `n_iters` normalisations, so its row is expected to be refused, with the measured deviation.
"""

import math

from torch import Tensor

from benchmarks.case import Case, Masks
from benchmarks.rows.row import Row, of_torch, peer, refuse_mask


def _geomloss(query: Tensor, key: Tensor, value: Tensor, case: Case, masks: Masks) -> Tensor:
    refuse_mask(masks, "GeomLoss, as timed here,")
    solver = peer("geomloss.ot", "peers-geomloss")
    scores = (query @ key.mT / math.sqrt(query.shape[-1])).flatten(0, 1)
    plan = solver.solve_batch(-scores, reg=1.0, max_iter=max(1, case.n_iters // 2)).plan
    return (plan * case.n).view(*query.shape[:2], case.n, case.n) @ value


ROWS = [Row("geomloss", "GeomLoss, its own schedule", of_torch(_geomloss), matrices=12, matrices_per_step=1)]
