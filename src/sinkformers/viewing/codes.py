"""Scores as whole numbers of 16 or 8 bits, which is how a page holds them."""

from typing import NamedTuple

import torch
from torch import Tensor

LEVELS = {16: 2**16 - 1, 8: 2**8 - 1}  # codes 1 to LEVELS are scores, and 0 is masked


class Codes(NamedTuple):
    """The scores of one head, `low + (code − 1)·step`; code 0 is masked."""

    codes: Tensor  # (n, m), uint16
    low: float
    step: float
    bits: int

    def bytes(self) -> bytes:
        """Return the codes row by row, each in one byte, or in two with the lower one first."""
        codes = self.codes.to(torch.int32)
        planes = [codes & 255] if self.bits == 8 else [codes & 255, codes >> 8]
        return bytes(torch.stack(planes, -1).flatten().tolist())

    def scores(self) -> Tensor:
        """Return the scores (n, m), float64, minus infinity where masked."""
        codes = self.codes.to(torch.float64)
        return (self.low + (codes - 1) * self.step).masked_fill(codes == 0, -torch.inf)


def encode(scores: Tensor, bits: int = 16) -> Codes:
    """Return scores (n, m), minus infinity where masked, as codes; each is off by half a step at most.

    No weight depends on a number that is added to a row, so that rows are stored less their maxima.
    """
    scores = scores.detach().double().cpu()
    valid = scores != -torch.inf
    top = scores.amax(-1, keepdim=True)
    shifted = (scores - top.masked_fill(top == -torch.inf, 0.0)).masked_fill(~valid, 0.0)
    low = float(shifted.min())
    step = -low / (LEVELS[bits] - 1)
    codes = ((shifted - low) / step).round() + 1 if step > 0 else torch.ones_like(shifted)
    return Codes(codes.masked_fill(~valid, 0.0).to(torch.int32).to(torch.uint16), low, step, bits)
