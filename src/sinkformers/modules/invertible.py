"""`InvertibleAttention`: a residual attention layer that can be run backwards."""

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

CALLER = "InvertibleAttention"
Product = Callable[[Tensor], Tensor]


class InvertibleAttention(nn.Module):
    """Residual L2 attention `y = x + branch(x)` whose branch is a contraction, so that `inverse(y)` gives x back.

    Queries, keys and values are one projection of the tokens. The branch is scaled down, where it has to be, until its
    Lipschitz bound is `contraction`; the bound counts the valid tokens.

    Args:
        dim: width of the tokens.
        num_heads, head_dim: how many heads, and how wide each is; `head_dim` is `dim // num_heads` if not given.
        n_iters: how many normalisations; 1 is SoftMax, `math.inf` the doubly stochastic limit. For these two the bound
            is proven. Between them it is not: the larger of both is used, `local_norm` measures at an input, and
            `inverse` checks as it runs.
        contraction: how far the branch may stretch a distance, in (0, 1).

    Masked tokens come out as they went in, and change no other output and no gradient.

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
        n_iters: float = 1,
        contraction: float = 0.9,
    ) -> None:
        super().__init__()
        if not 0 < checks.number(CALLER, "contraction", contraction) < 1:
            raise ValueError(
                f"{CALLER}: contraction must lie between 0 and 1, or nothing says that there is an inverse; "
                f"got {contraction!r}. 0.9 leaves the branch most of its size."
            )
        self.num_heads, self.head_dim = num_heads, head_width(CALLER, dim, num_heads, head_dim)
        self.n_iters = n_iters if n_iters == math.inf else checks.iterations(CALLER, n_iters)
        self.contraction = float(contraction)
        self.project = nn.Linear(dim, self.num_heads * self.head_dim, bias=False)
        self.out = nn.Linear(self.num_heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """`x + branch(x)` of tokens (…, n, dim); `mask` (…, n) is True at valid tokens."""
        self._check(x, mask)
        return x + zero_masked(self._gain(x, mask) * self._branch(x, mask), mask)

    @torch.no_grad()
    def inverse(self, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """The x with `forward(x, mask) = y`, by iterating `x ← y − branch(x)`; no gradient goes through it.

        It ends once a contraction cannot move any sample by more than `eps^¾·|y|` any more (2e-12 in float64, 6e-6 in
        float32). Until then each difference of successive iterates has to be smaller than the one before it; otherwise
        a RuntimeError says so.
        """
        self._check(y, mask)
        gain, eps, size = self._gain(y, mask), torch.finfo(y.dtype).eps, _size(zero_masked(y, mask))
        goal, rounding = eps**0.75 * size, 16 * eps * size
        # As many as it takes if every difference is `contraction` times the one before it.
        most = 2 + math.ceil(math.log(eps**0.75 * (1 - self.contraction)) / math.log(self.contraction))
        x, before, step = y, torch.full_like(size, math.inf), 0
        while True:
            step += 1
            new = y - gain * self._branch(x, mask)
            now = _size(zero_masked(new - x, mask))
            x, ratio, before = new, now / before, now
            rate = ratio.clamp(self.contraction, 1.0)
            # NaN will not get better; it ends too.
            going = (now > rounding) & (now * rate > goal * (1 - rate))
            if not going.any():
                return x
            if step == most or (going & (ratio >= 1)).any():
                raise RuntimeError(self._complaint(ratio[going].max().item(), step))

    @torch.no_grad()
    def local_norm(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """How far the branch stretches small changes of x at most: the spectral norm of its Jacobian *at this input*.

        One value a sample (…), by power iteration with products by the Jacobian and its transpose, to three digits and
        from below. It says nothing about other inputs; below 1 the layer can be inverted near this one.
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
        """The products with the Jacobian of attention at heads `tokens`, and with its transpose."""
        tokens = tokens.detach().requires_grad_()
        out = self._attend(tokens, mask, backend="reference")

        def pull(vector: Tensor) -> Tensor:
            return torch.autograd.grad(out, tokens, vector, retain_graph=True)[0]

        if self.n_iters == math.inf:  # symmetric
            return pull, pull
        probe = torch.zeros_like(out, requires_grad=True)
        (pulled,) = torch.autograd.grad(out, tokens, probe, create_graph=True)
        # What is linear in the probe has the transpose of a transpose for its own gradient.
        return lambda vector: torch.autograd.grad(pulled, probe, vector, retain_graph=True)[0], pull

    def _check(self, x: Tensor, mask: Tensor | None) -> None:
        checks.tensor(CALLER, "x", x, min_dim=2)
        checks.one_device(CALLER, "x", x, mask=mask)
        if mask is not None:
            checks.mask(CALLER, "mask", mask, x.shape[:-1], "the tokens")

    def _gain(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """What the branch is multiplied with (…, 1, 1): 1, or less where its bound exceeds `contraction`."""
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
        """Heads (…, heads, n, head_dim) of tokens (…, n, dim), the padding silenced."""
        return split_heads(self.project(zero_masked(x, mask)), self.num_heads)

    def _attend(self, tokens: Tensor, mask: Tensor | None, backend: str = "auto") -> Tensor:
        mask = None if mask is None else mask[..., None, :]
        if self.n_iters == math.inf:
            return limit_attention(tokens, mask, self.head_dim**-0.5)
        options: dict[str, Any] = {"n_iters": self.n_iters, "query_mask": mask, "key_mask": mask, "backend": backend}
        return sinkhorn_attention(tokens, tokens, tokens, cost="l2", **options)

    def _complaint(self, ratio: float, steps: int) -> str:
        remedy = "" if self.n_iters in (1, math.inf) else " n_iters=1 and n_iters=math.inf have a proven bound."
        return (
            f"{CALLER}: inverse does not converge at this y: after {steps} steps a difference of successive iterates "
            f"is {ratio:.3g} times the one before it, where contraction={self.contraction} was asked for. Build the "
            f"layer with a smaller contraction; local_norm(x, mask) tells how far it stretches.{remedy}"
        )

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, n_iters={self.n_iters}, contraction={self.contraction}"


def _size(x: Tensor) -> Tensor:
    """The Euclidean norm of each sample's tokens, (…, 1, 1)."""
    return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
