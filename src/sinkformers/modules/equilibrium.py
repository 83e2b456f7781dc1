"""`EquilibriumAttention`: tokens at rest between their inputs and the energy whose flow Sinkhorn attention is."""

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

CALLER = "EquilibriumAttention"


class EquilibriumInfo(NamedTuple):
    """The evidence that comes with `EquilibriumAttention(...)(z, return_info=True)`, one value a sample."""

    error: Tensor
    """The minimiser is at most this far away, in the Euclidean norm of all tokens: |gradient| / pull."""
    steps: Tensor
    """Newton steps taken."""
    converged: Tensor
    """Whether the error is at most √eps·|z| (1.5e-8 in float64, 3.5e-4 in float32); the aim is eps^¾."""


class EquilibriumAttention(nn.Module):
    """The minimiser x of `F^∞(x) + pull/(2n) · Σ_i |x_i − z_i|²`, of input tokens z.

    `F^∞` is the energy that Sinkhorn attention descends: with scores `x_i·A x_j / eps`, `A = WᵀW` and `W_V = −A`, it is
    `−½ ∫ k^∞ log(k^∞/k⁰)` over pairs of tokens, summed over heads. So each token rests where its attention and its
    input balance: `pull·(x_i − z_i) = T^∞(x_i) = −(1/eps) Σ_j K^∞_ij A x_j`. `F^∞` is convex, so that every positive
    pull has one minimiser.

    Args:
        dim: width of the tokens.
        num_heads, head_dim: how many heads, and how wide each is; `head_dim` is `dim // num_heads` if not given.
        pull: λ, how strongly a token is held at its input; positive. A tensor that is a parameter is learned.
        eps: divides the scores; √head_dim by default. A tensor that is a parameter is learned.

    The gradient is that of the minimiser (implicit function theorem): input and output are kept for it, however many
    steps were taken. Masked tokens come out as they went in, and change no other output and no gradient.

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
        """The minimiser (…, n, dim) for tokens z; `mask` (…, n) is True at valid tokens.

        With `return_info`, `(x, EquilibriumInfo)`; without, samples that have not converged are reported in a
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
        return f"num_heads={self.num_heads}, pull={_shown(self.pull)}, eps={_shown(self.eps)}"


class _Minimiser(torch.autograd.Function):
    """z, weight, pull and eps to the minimiser; its gradient by one linear system at the minimiser."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, z: Tensor, weight: Tensor, pull: Tensor, eps: Tensor, mask: Tensor | None, num_heads: int
    ) -> tuple[Tensor, ...]:
        unit, stiffness = torch.finfo(z.dtype).eps, torch.linalg.matrix_norm(weight, 2).square() / eps
        # An error of eps^¾·|z|, or what rounding leaves of a gradient whose terms are as large as these.
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
    """n times the gradient of what is minimised, as a function of x: `pull·(x − z) − T^∞(x)`."""
    alive = None if mask is None else mask[..., None, :]

    def balance(x: Tensor) -> Tensor:
        attended = limit_attention(split_heads(F.linear(x, weight), num_heads), alive, 1 / eps)
        return pull * (x - z) + F.linear(join_heads(attended), weight.T) / eps

    return balance


def _positive(name: str, value: float | Tensor) -> float | Tensor:
    """A positive number, or a tensor that holds one."""
    if not isinstance(value, Tensor):
        return checks.positive(CALLER, name, value)
    if value.numel() != 1 or not value.is_floating_point():
        raise ValueError(
            f"{CALLER}: a tensor {name} must hold one floating-point number; got shape {tuple(value.shape)}, "
            f"{value.dtype}."
        )
    if not value.item() > 0:
        raise ValueError(
            f"{CALLER}: {name} must be positive, and any positive {name} will do; got {value.item():.6g}. "
            f"Where {name} is learned, torch.nn.utils.parametrize can keep it positive, as an exponential."
        )
    return value


def _shown(value: float | Tensor) -> float:
    return round(float(value), 6)
