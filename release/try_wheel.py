"""Try an installed sinkformers: `python try_wheel.py --kernels`, or `--no-kernels` for the wheel without them.

Compares outputs and gradients of the backend that serves a call on the CPU with the definition in float64. Needs torch
and nothing else, no compiler and no source.
"""

import argparse
import sys
import warnings
from pathlib import Path

import torch

import sinkformers
from sinkformers import backend_for, sinkhorn, sinkhorn_attention
from sinkformers.kernels import native


def results(dtype: torch.dtype, **options: object) -> list[torch.Tensor]:
    """Output and gradients of attention, then weights and gradient of the operator."""
    torch.manual_seed(0)
    tokens = [torch.randn(2, 3, 37, 17, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(3)]
    scores = torch.randn(4, 29, 31, dtype=torch.float64).to(dtype).requires_grad_()
    out = sinkhorn_attention(*tokens, n_iters=5, **options)  # pyright: ignore[reportArgumentType]
    weights = sinkhorn(scores, n_iters=5, **options)  # pyright: ignore[reportArgumentType]
    gradients = torch.autograd.grad(out.sin().sum() + weights.sin().sum(), [*tokens, scores])
    return [out, weights, *gradients]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--kernels", action="store_true", help="the compiled kernels must be there")
    which.add_argument("--no-kernels", action="store_true", help="they must be missing, with a reason")
    kernels = parser.parse_args().kernels
    place, missing = Path(sinkformers.__file__).parent, native.missing()
    if "site-packages" not in place.parts:
        sys.exit(f"{place} is a source tree, not an installed package.")
    if (missing is None) != kernels:
        sys.exit(f"The compiled kernels are {missing or 'there'}.")
    warnings.simplefilter("ignore")  # one says that the kernels are missing
    exact = results(torch.float64, backend="reference")
    for dtype in (torch.float32, torch.float64):
        # The largest of some 100 roundings of numbers of size 1, in sums of some 40 terms.
        tolerance = 100 * torch.finfo(dtype).eps * max(x.abs().max().item() for x in exact)
        error = max((a.double() - b).abs().max().item() for a, b in zip(results(dtype), exact, strict=True))
        print(f"{dtype!s:14} {backend_for(*torch.randn(3, 1, 9, 8, dtype=dtype)):7} error {error:.1e}")
        if not error <= tolerance:
            sys.exit(f"An error of {error:.1e} is more than {tolerance:.1e}.")
    how = f"{native.instruction_set()}, {native.one_thread() or 'threads'}" if kernels else missing
    print(f"sinkformers {sinkformers.__version__} on {sys.platform}: {how}")


if __name__ == "__main__":
    main()
