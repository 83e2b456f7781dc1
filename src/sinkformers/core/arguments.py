"""Check the tensors of a call on scores, and give them one rank."""

import torch
from torch import Tensor

from sinkformers.core import checks
from sinkformers.core.modes import autocasts


def check_problem(
    caller: str, scores: Tensor, mask: Tensor | None, row_mass: Tensor | None, col_mass: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Check the tensors of a call; give mask and masses the rank of the scores."""
    checks.tensor(caller, "scores", scores, min_dim=2)
    if mask is not None or row_mass is not None or col_mass is not None:
        checks.one_device(caller, "scores", scores, mask=mask, row_mass=row_mass, col_mass=col_mass)
    *lead, n, m = scores.shape
    if mask is not None:
        checks.mask(caller, "mask", mask, scores.shape, "scores")
        mask = with_rank(mask, scores.dim())
    if row_mass is not None:
        row_mass = checks.mass(caller, "row_mass", row_mass, torch.Size((*lead, n)))
        row_mass = with_rank(row_mass, scores.dim() - 1)
    if col_mass is not None:
        col_mass = checks.mass(caller, "col_mass", col_mass, torch.Size((*lead, m)))
        col_mass = with_rank(col_mass, scores.dim() - 1)
    if autocasts(scores.device) and scores.dtype in (torch.float16, torch.bfloat16):
        scores = scores.float()
    return scores, mask, row_mass, col_mass


def relaxation_tensor(tau: float | Tensor, scores: Tensor) -> Tensor | None:
    """`tau` with the rank of the leading axes, or None for 1, which costs nothing."""
    if isinstance(tau, Tensor):
        return with_rank(tau, scores.dim() - 2)
    return None if tau == 1 else with_rank(torch.tensor(tau, dtype=torch.float64, device="cpu"), scores.dim() - 2)


def with_rank(tensor: Tensor, rank: int) -> Tensor:
    return tensor.reshape((1,) * (rank - tensor.dim()) + tuple(tensor.shape))


def empty_weights(scores: Tensor, tau: float | Tensor | None) -> Tensor:
    """The weights of scores without entries; a tensor `tau` has the gradient zero, not none."""
    weights = scores.softmax(-1)
    return weights + tau.reshape(-1)[:0].sum().to(weights) if isinstance(tau, Tensor) else weights
