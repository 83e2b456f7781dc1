"""The blocks of Set Transformers (Lee et al. 2019): attention between two sets, within one, and pooling to a few seeds.

All of them are equivariant or invariant to the order of a set's elements, and take boolean masks for padding. The
scores of two sets are rectangular, n × m: Sinkhorn's rows sum to 1, and its columns tend to n/m.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sinkformers.modules.heads import Heads, join_heads, split_heads, zero_masked
from sinkformers.modules.representation import describe

ScaleBy = Literal["head", "width"]
Plan = Callable[[Tensor], Tensor]


class MAB(Heads):
    """Multi-head attention block: elements x (batch, n, dim_query) attend to elements y (batch, m, dim_key).

    With queries, keys and values of width `dim`, split into heads, the output (batch, n, dim) is
    `H = norm(Q + attention(Q, K, V))`, then `norm(H + relu(out(H)))`.

    Args:
        n_iters, tau: as in `sinkhorn`; `n_iters=1` is the Set Transformer's block, with the same parameters.
        norm: whether to use the two LayerNorms. Lee et al. define them, and their code leaves them out by default.
        scale_by: `"head"` divides scores by √(dim/num_heads), as all other attention here does; `"width"` divides by
            √dim, as Lee et al. and their code do.
        plan: function applied to the heads' output (batch, heads, n, dim/num_heads) before Q is added.

    Examples:
        >>> import torch
        >>> from sinkformers.modules import MAB
        >>> MAB(3, 5, 8, 2, n_iters=5)(torch.randn(2, 7, 3), torch.randn(2, 11, 5)).shape
        torch.Size([2, 7, 8])
    """

    def __init__(
        self,
        dim_query: int,
        dim_key: int,
        dim: int,
        num_heads: int,
        *,
        n_iters: int | float = 3,
        tau: float = 1.0,
        norm: bool = True,
        scale_by: ScaleBy = "head",
        plan: Plan | None = None,
    ) -> None:
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"MAB: num_heads must divide dim; got num_heads={num_heads}, dim={dim}.")
        if scale_by not in ("head", "width"):
            raise ValueError(f'MAB: scale_by must be "head" or "width"; got {scale_by!r}.')
        super().__init__(n_iters, tau, scale=dim**-0.5 if scale_by == "width" else None)
        self.num_heads, self.plan = num_heads, plan
        self.query, self.key, self.value = nn.Linear(dim_query, dim), nn.Linear(dim_key, dim), nn.Linear(dim_key, dim)
        self.out = nn.Linear(dim, dim)
        self.attention_norm, self.out_norm = (nn.LayerNorm(dim) if norm else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor, query_mask: Tensor | None = None, key_mask: Tensor | None = None) -> Tensor:
        """Return the output (batch, n, dim).

        `query_mask` (batch, n) and `key_mask` (batch, m) are True at valid elements. The contents of masked elements
        change no valid output and no gradient. The output at a masked element is that of an element 0 that attends to
        nothing.
        """
        x, y = zero_masked("MAB", "query_mask", x, query_mask), zero_masked("MAB", "key_mask", y, key_mask)
        query, key, value = (
            split_heads(tokens, self.num_heads) for tokens in (self.query(x), self.key(y), self.value(y))
        )
        attended = self._attend(query, key, value, query_mask, key_mask)
        attended = attended if self.plan is None else self.plan(attended)
        h = self.attention_norm(join_heads(query + attended))
        return self.out_norm(h + self.out(h).relu())

    def extra_repr(self) -> str:
        scale = None if self.scale is None else round(self.scale, 6)
        return describe(num_heads=self.num_heads, **self._settings(), scale=scale, plan=self.plan)


class SAB(nn.Module):
    """Self-attention block: a set (batch, n, dim_in) attends to itself, `MAB(x, x)`; time grows as n².

    Examples:
        >>> import torch
        >>> from sinkformers.modules import SAB
        >>> SAB(3, 8, 2)(torch.randn(2, 7, 3), mask=torch.arange(7) < torch.tensor([[7], [4]])).shape
        torch.Size([2, 7, 8])
    """

    def __init__(self, dim_in: int, dim: int, num_heads: int, **options: Any) -> None:
        """`options` are those of `MAB`."""
        super().__init__()
        self.mab = MAB(dim_in, dim_in, dim, num_heads, **options)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """`mask` (batch, n) is True at valid elements, as in `MAB`."""
        return self.mab(x, x, mask, mask)


class ISAB(nn.Module):
    """Induced self-attention block: a set attends to itself through a few learned points; time grows as n.

    Inducing points I (num_inducing, dim) attend to the set, and the set attends to their outputs: `MAB(x, MAB(I, x))`.

    Examples:
        >>> import torch
        >>> from sinkformers.modules import ISAB
        >>> ISAB(3, 8, 2, 4, n_iters=21)(torch.randn(2, 7, 3)).shape
        torch.Size([2, 7, 8])
    """

    def __init__(self, dim_in: int, dim: int, num_heads: int, num_inducing: int, **options: Any) -> None:
        """`options` are those of `MAB`."""
        super().__init__()
        self.inducing = _learned("ISAB", "num_inducing", num_inducing, dim)
        self.induce = MAB(dim, dim_in, dim, num_heads, **options)
        self.spread = MAB(dim_in, dim, dim, num_heads, **options)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """`mask` (batch, n) is True at valid elements, as in `MAB`."""
        return self.spread(x, self.induce(self.inducing, x, key_mask=mask), query_mask=mask)

    def extra_repr(self) -> str:
        return describe(num_inducing=self.inducing.shape[1])


class PMA(nn.Module):
    """Pooling by multi-head attention: seeds S attend to a set (batch, n, dim), `MAB(S, x)`: (batch, seeds, dim).

    The seeds are learned. A single seed uses SoftMax for any `n_iters`: a doubly stochastic matrix of one row is
    uniform, so from 3 iterations on it would be mean pooling, and its queries and keys would get no gradient.

    Args:
        literal: use Sinkhorn for a single seed too, as the paper's code does.

    Examples:
        >>> import torch
        >>> from sinkformers.modules import PMA
        >>> PMA(8, 2, 1, n_iters=5)(torch.randn(2, 7, 8)).shape, PMA(8, 2, 1, n_iters=5).mab.n_iters
        (torch.Size([2, 1, 8]), 1)
    """

    def __init__(self, dim: int, num_heads: int, num_seeds: int = 1, *, literal: bool = False, **options: Any) -> None:
        """`options` are those of `MAB`."""
        super().__init__()
        self.seeds, self.literal = _learned("PMA", "num_seeds", num_seeds, dim), literal
        self.mab = MAB(dim, dim, dim, num_heads, **options)
        if self.stays_softmax:
            self.mab.n_iters, self.mab.tau = 1, 1.0

    @property
    def stays_softmax(self) -> bool:
        return self.seeds.shape[1] == 1 and not self.literal

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """`mask` (batch, n) is True at valid elements, as in `MAB`."""
        return self.mab(self.seeds, x, key_mask=mask)

    def extra_repr(self) -> str:
        return describe(num_seeds=self.seeds.shape[1], literal=self.literal)


def _learned(caller: str, name: str, count: int, dim: int) -> nn.Parameter:
    """Return learned points (1, count, dim), the same for all samples of a batch."""
    if count < 1:
        raise ValueError(f"{caller}: {name} must be a whole number ≥ 1; got {count!r}.")
    return nn.Parameter(nn.init.xavier_uniform_(torch.empty(1, count, dim)))
