"""`InvertibleAttention`: a residual attention layer with an inverse."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinkformers.attention import sinkhorn_attention
from sinkformers.attention.masks import zero_masked
from sinkformers.core import checks
from sinkformers.modules.heads import head_width, join_heads, split_heads
from sinkformers.modules.limit_attention import limit_attention
from sinkformers.modules.lipschitz import limit_bound, softmax_bound
from sinkformers.modules.representation import describe

CALLER = "InvertibleAttention"
Product = Callable[[Tensor], Tensor]


class InvertibleAttention(nn.Module):
    """Residual L2 attention `y = x + branch(x)`; the branch is a contraction, so `inverse(y)` returns x.

    Queries, keys and values are one projection of the tokens. If the Lipschitz bound of the branch exceeds
    `contraction`, the branch is scaled down to it. The bound depends on the number of valid tokens.

    Args:
        dim: number of features of a token.
        num_heads, head_dim: number of heads, and features of each; `head_dim` is `dim // num_heads` by default.
        n_iters: number of normalisations; 1 is SoftMax, `math.inf` the doubly stochastic limit. The bound is proven for
            these two. For other numbers the larger of both bounds is used, without proof; `local_norm` measures the
            Lipschitz constant at an input, and `inverse` raises if it does not converge.
        contraction: the largest Lipschitz constant of the branch, in (0, 1).

    Masked tokens are returned unchanged, and change no other output and no gradient.

    Examples:
        >>> import math, torch
        >>> from sinkformers.modules import InvertibleAttention
        >>> layer = InvertibleAttention(12, 3, n_iters=math.inf).double()
        >>> x, real = torch.randn(2, 7, 12, dtype=torch.float64), torch.arange(7) < torch.tensor([[7], [4]])
        >>> torch.allclose(layer.inverse(layer(x, real), real), x, atol=1e-10, rtol=0)
        True
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int | None = None,
        *,
        n_iters: int | float = 1,
        contraction: float = 0.9,
    ) -> None:
        super().__init__()
        if not 0 < checks.number(CALLER, "contraction", contraction) < 1:
            raise ValueError(
                f"{CALLER}: contraction must lie between 0 and 1, or the layer may have no inverse; "
                f"got {contraction!r}. Use 0.9, for example."
            )
        self.num_heads, self.head_dim = num_heads, head_width(CALLER, dim, num_heads, head_dim)
        self.n_iters = checks.iterations(CALLER, n_iters)
        self.contraction = float(contraction)
        self.project = nn.Linear(dim, self.num_heads * self.head_dim, bias=False)
        self.out = nn.Linear(self.num_heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return `x + branch(x)` for tokens (…, n, dim); `mask` (…, n) is True at valid tokens."""
        self._check(x, mask)
        return x + zero_masked(self._gain(x, mask) * self._branch(x, mask), mask)

    @torch.no_grad()
    def inverse(self, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the x with `forward(x, mask) = y`, by iterating `x ← y − branch(x)`; it has no gradient.

        The iteration ends when a contraction can move no sample by more than `eps^¾·|y|` (2e-12 in float64, 6e-6 in
        float32). If the differences of successive iterates do not shrink until then, it raises a RuntimeError.
        """
        self._check(y, mask)
        gain, eps, size = self._gain(y, mask), torch.finfo(y.dtype).eps, _size(zero_masked(y, mask))
        goal, rounding = eps**0.75 * size, 16 * eps * size
        # The number of steps needed if every difference is `contraction` times the one before it.
        most = 2 + math.ceil(math.log(eps**0.75 * (1 - self.contraction)) / math.log(self.contraction))
        x, before, step = y, torch.full_like(size, math.inf), 0
        while True:
            step += 1
            new = y - gain * self._branch(x, mask)
            now = _size(zero_masked(new - x, mask))
            x, ratio, before = new, now / before, now
            rate = ratio.clamp(self.contraction, 1.0)
            # NaN compares as false, so samples with NaN end here.
            going = (now > rounding) & (now * rate > goal * (1 - rate))
            if not going.any():
                return x
            if step == most or (going & (ratio >= 1)).any():
                raise RuntimeError(self._message(ratio[going].max().item(), step))

    @torch.no_grad()
    def local_norm(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the spectral norm of the branch's Jacobian *at this input*, one value per sample (…).

        It is computed by power iteration with the Jacobian and its transpose, from below, to three digits. If it is
        below 1, the layer can be inverted near this input; it gives no bound at other inputs.
        """
        self._check(x, mask)
        gain, (push, pull) = self._gain(x, mask), self._products(self._heads(x, mask), mask)
        vector = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype).to(x.device)
        norm = torch.zeros_like(gain)
        for _ in range(1000):
            vector = vector / _size(vector).clamp_min(torch.finfo(x.dtype).tiny)
            image = gain * self.out(join_heads(push(self._heads(vector, mask))))
            change = pull(split_heads(F.linear(image, self.out.weight.T), self.num_heads))
            vector = gain * F.linear(join_heads(change), self.project.weight.T)
            previous, norm = norm, _size(image)
            if not (norm - previous > 1e-5 * norm).any():
                break
        return norm[..., 0, 0]

    @torch.enable_grad()
    def _products(self, tokens: Tensor, mask: Tensor | None) -> tuple[Product, Product]:
        """Return the products with the Jacobian of attention at heads `tokens`, and with its transpose."""
        tokens = tokens.detach().requires_grad_()
        out = self._attend(tokens, mask, backend="reference")

        def pull(vector: Tensor) -> Tensor:
            return torch.autograd.grad(out, tokens, vector, retain_graph=True)[0]

        if self.n_iters == math.inf:  # symmetric
            return pull, pull
        probe = torch.zeros_like(out, requires_grad=True)
        (pulled,) = torch.autograd.grad(out, tokens, probe, create_graph=True)
        # `pulled` is linear in the probe, by the transposed Jacobian; its own gradient transposes that again.
        return lambda vector: torch.autograd.grad(pulled, probe, vector, retain_graph=True)[0], pull

    def _check(self, x: Tensor, mask: Tensor | None) -> None:
        checks.tensor(CALLER, "x", x, min_dim=2)
        checks.one_device(CALLER, "x", x, mask=mask)
        if mask is not None:
            checks.mask(CALLER, "mask", mask, x.shape[:-1], "the tokens")

    def _gain(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the factor of the branch (…, 1, 1): 1, or less if its bound exceeds `contraction`."""
        if mask is None:
            count = x.new_full(x.shape[:-2], x.shape[-2])
        else:
            count = mask.expand(x.shape[:-1]).sum(-1).to(x.dtype)
        count = count.clamp_min(1.0)
        bound = softmax_bound(count) if self.n_iters == 1 else limit_bound(count)
        if 1 < self.n_iters < math.inf:
            bound = torch.maximum(bound, softmax_bound(count))
        matrices = (self.project.weight, self.out.weight)
        stretch = math.prod(torch.linalg.matrix_norm(each, 2) for each in matrices)
        return (self.contraction / (bound * stretch).clamp_min(self.contraction))[..., None, None]

    def _branch(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.out(join_heads(self._attend(self._heads(x, mask), mask)))

    def _heads(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return heads (…, heads, n, head_dim) of tokens (…, n, dim); masked tokens are zero."""
        return split_heads(self.project(zero_masked(x, mask)), self.num_heads)

    def _attend(self, tokens: Tensor, mask: Tensor | None, backend: str = "auto") -> Tensor:
        mask = None if mask is None else mask[..., None, :]
        if self.n_iters == math.inf:
            return limit_attention(tokens, mask, self.head_dim**-0.5)
        options: dict[str, Any] = {"n_iters": self.n_iters, "query_mask": mask, "key_mask": mask, "backend": backend}
        return sinkhorn_attention(tokens, tokens, tokens, cost="l2", **options)

    def _message(self, ratio: float, steps: int) -> str:
        remedy = "" if self.n_iters in (1, math.inf) else " n_iters=1 and n_iters=math.inf have a proven bound."
        return (
            f"{CALLER}: inverse does not converge at this y: after {steps} steps a difference of successive iterates "
            f"is {ratio:.3g} times the one before it, but contraction={self.contraction} is required. Build the "
            f"layer with a smaller contraction; local_norm(x, mask) measures its Lipschitz constant.{remedy}"
        )

    def extra_repr(self) -> str:
        head_dim = None if self.project.out_features == self.project.in_features else self.head_dim
        settings = {"n_iters": self.n_iters, "contraction": self.contraction}
        return describe(num_heads=self.num_heads, **settings, head_dim=head_dim)


def _size(x: Tensor) -> Tensor:
    """Return the Euclidean norm of each sample's tokens, (…, 1, 1)."""
    return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
