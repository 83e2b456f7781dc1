"""Tolerances for two computations of the same numbers, by the number of roundings in which they may differ."""

import torch


def rounding(count, dtype=torch.float64, size=1.0):
    """Return the tolerances of `assert_close` for values up to `size` that differ by `count` roundings.

    The error of a sum of n terms counts as n roundings, its worst case, so a layer of small width has a few hundred.
    """
    return {"atol": count * size * torch.finfo(dtype).eps, "rtol": 0}
