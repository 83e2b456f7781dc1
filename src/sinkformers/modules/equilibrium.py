"""`EquilibriumAttention`: the minimiser of Sinkhorn attention's energy plus a quadratic pull to the inputs."""

import math
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sinkformers.core import ConvergenceWarning, checks
from sinkformers.core.modes import without_autocast
from sinkformers.modules.heads import head_width, join_heads, split_heads, zero_masked
from sinkformers.modules.limit_attention import limit_attention
from sinkformers.modules.newton import conjugate_gradients, find_zero, linearise, norm
from sinkformers.modules.representation import describe

CALLER = "EquilibriumAttention"


class EquilibriumInfo(NamedTuple):
    """The evidence returned by `EquilibriumAttention(...)(z, return_info=True)`, one value per sample."""

    error: Tensor
    """A bound on the distance to the minimiser, in the Euclidean norm of all tokens: |gradient| / pull."""
    steps: Tensor
    """Number of Newton steps."""
    converged: Tensor
    """Whether the error is at most √eps·|z| (1.5e-8 in float64, 3.5e-4 in float32); the aim is eps^¾."""


class EquilibriumAttention(nn.Module):
    """Map input tokens z to the minimiser x of `F^∞(x) + pull/(2n) · Σ_i |x_i − z_i|²`.

    `F^∞` is the energy that Sinkhorn attention descends: with scores `x_i·A x_j / eps`, `A = WᵀW` and `W_V = −A`, it is
    `−½ ∫ k^∞ log(k^∞/k⁰)` over pairs of tokens, summed over heads. At the minimiser, attention and input balance:
    `pull·(x_i − z_i) = T^∞(x_i) = −(1/eps) Σ_j K^∞_ij A x_j`. `F^∞` is convex, so there is one minimiser for every
    positive pull.

    Args:
        dim: number of features of a token.
        num_heads, head_dim: number of heads, and features of each; `head_dim` is `dim // num_heads` by default.
        pull: λ > 0, the strength of the pull to the input. A tensor that is a parameter is learned.
        eps: divides the scores; √head_dim by default. A tensor that is a parameter is learned.

    The gradient is that of the minimiser (implicit function theorem); only input and output are kept for it, for any
    number of steps. Masked tokens are returned unchanged, and change no other output and no gradient.

    Examples:
        >>> import torch
        >>> from sinkformers.modules import EquilibriumAttention
        >>> layer, z = EquilibriumAttention(12, 3, pull=0.5), torch.randn(2, 7, 12)
        >>> x, info = layer(z, mask=torch.arange(7) < torch.tensor([[7], [4]]), return_info=True)
        >>> x.shape, info.converged.tolist()
        (torch.Size([2, 7, 12]), [True, True])
    """

    pull: float | Tensor
    eps: float | Tensor

    def __init__(
        self,
        dim: int,
        num_heads: int = 1,
        head_dim: int | None = None,
        *,
        pull: float | Tensor = 1.0,
        eps: float | Tensor | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_width(CALLER, dim, num_heads, head_dim)
        self.pull = _positive("pull", pull)
        self.eps = _positive("eps", math.sqrt(self.head_dim) if eps is None else eps)
        self.project = nn.Linear(dim, self.num_heads * self.head_dim, bias=False)

    @overload
    def forward(self, z: Tensor, mask: Tensor | None = ..., *, return_info: Literal[False] = ...) -> Tensor: ...

    @overload
    def forward(
        self, z: Tensor, mask: Tensor | None = ..., *, return_info: Literal[True]
    ) -> tuple[Tensor, EquilibriumInfo]: ...

    def forward(
        self, z: Tensor, mask: Tensor | None = None, *, return_info: bool = False
    ) -> Tensor | tuple[Tensor, EquilibriumInfo]:
        """Return the minimiser (…, n, dim) for tokens z; `mask` (…, n) is True at valid tokens.

        With `return_info`, return `(x, EquilibriumInfo)`. Without it, samples that have not converged cause a
        `ConvergenceWarning`.
        """
        checks.tensor(CALLER, "z", z, min_dim=2)
        checks.one_device(CALLER, "z", z, mask=mask)
        anchors = zero_masked(CALLER, "mask", z, mask)
        pull, eps = (
            torch.as_tensor(_positive(name, value), dtype=z.dtype, device=z.device)
            for name, value in (("pull", self.pull), ("eps", self.eps))
        )
        with without_autocast(z.device):
            x, *evidence = _Minimiser.apply(anchors, self.project.weight, pull, eps, mask, self.num_heads)
        x, info = x if mask is None else torch.where(mask[..., None], x, z), EquilibriumInfo(*evidence)
        if return_info:
            return x, info
        late = ~info.converged & ~info.error.isnan()
        if late.any():
            warnings.warn(
                f"{CALLER}: {int(late.sum())} of {late.numel()} samples have not converged; the largest error is "
                f"{info.error[late].max().item():.2g}. Use a larger pull or eps, or float64.",
                ConvergenceWarning,
                stacklevel=2,
            )
        return x

    def extra_repr(self) -> str:
        head_dim = None if self.project.out_features == self.project.in_features else self.head_dim
        settings = {"pull": _shown(self.pull), "eps": _shown(self.eps)}
        return describe(num_heads=self.num_heads, **settings, head_dim=head_dim)


class _Minimiser(torch.autograd.Function):
    """The minimiser as a function of z, weight, pull and eps; the gradient solves one linear system."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, z: Tensor, weight: Tensor, pull: Tensor, eps: Tensor, mask: Tensor | None, num_heads: int
    ) -> tuple[Tensor, ...]:
        unit, stiffness = torch.finfo(z.dtype).eps, torch.linalg.matrix_norm(weight, 2).square() / eps
        # An error of eps^¾·|z|, or the rounding of a gradient with terms of this size.
        goal = torch.maximum(unit**0.75 * pull, 16 * unit * (pull + stiffness)) * norm(z)
        found = find_zero(_balance(z, weight, pull, eps, mask, num_heads), z, goal)
        ctx.save_for_backward(z, weight, pull, eps, mask, found.x)
        ctx.num_heads = num_heads
        error = found.size / pull
        evidence = [part[..., 0, 0] for part in (error, found.steps, error <= unit**0.5 * norm(z))]
        ctx.mark_non_differentiable(*evidence)
        return found.x, *evidence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: Tensor, *evidence: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        *inputs, mask, x = ctx.saved_tensors
        needs = ctx.needs_input_grad[:4]
        z, weight, pull, eps = (each.detach().requires_grad_(need) for each, need in zip(inputs, needs, strict=True))
        balance = _balance(z, weight, pull, eps, mask, ctx.num_heads)
        multiply, _ = linearise(balance, x)
        adjoint = conjugate_gradients(multiply, d_x, torch.finfo(x.dtype).eps ** 0.75)
        with torch.enable_grad():
            value = balance(x)
        wanted = [each for each in (z, weight, pull, eps) if each.requires_grad]
        grads = iter(torch.autograd.grad(value, wanted, -adjoint))
        return *(next(grads) if need else None for need in needs), None, None


def _balance(
    z: Tensor, weight: Tensor, pull: Tensor, eps: Tensor, mask: Tensor | None, num_heads: int
) -> Callable[[Tensor], Tensor]:
    """Return n times the gradient of the objective, as a function of x: `pull·(x − z) − T^∞(x)`."""
    heads_mask = None if mask is None else mask[..., None, :]

    def balance(x: Tensor) -> Tensor:
        attended = limit_attention(split_heads(F.linear(x, weight), num_heads), heads_mask, 1 / eps)
        return pull * (x - z) + F.linear(join_heads(attended), weight.T) / eps

    return balance


def _positive(name: str, value: float | Tensor) -> float | Tensor:
    """Return a positive number, or a tensor with one positive number; raise for anything else."""
    if not isinstance(value, Tensor):
        return checks.positive(CALLER, name, value)
    if value.numel() != 1 or not value.is_floating_point():
        raise ValueError(
            f"{CALLER}: a tensor {name} must hold one floating-point number; got shape {tuple(value.shape)}, "
            f"{value.dtype}."
        )
    if not value.item() > 0:
        raise ValueError(
            f"{CALLER}: {name} must be positive; got {value.item():.6g}. If {name} is learned, "
            "torch.nn.utils.parametrize can keep it positive, for example as an exponential."
        )
    return value


def _shown(value: float | Tensor) -> float | Tensor:
    return value if isinstance(value, Tensor) else round(value, 6)
