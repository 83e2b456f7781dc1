"""The classifier of Set Transformers; with `n_iters` > 1 a Sinkformer with the same parameters."""

from typing import Any

from torch import Tensor, nn

from sinkformers.modules import ISAB, PMA, SAB
from sinkformers.modules.set_blocks import Plan, ScaleBy


def unscaled_plan(attended: Tensor) -> Tensor:
    """Return the heads' output (batch, heads, n, d) as it is with rows that sum to 1/n, as in the paper's own code.

    That code uses Sinkhorn's transport plan, whose entries sum to 1, as the attention matrix.
    """
    return attended / attended.shape[-2]


class SetTransformer(nn.Module):
    """Classify sets (batch, n, features): logits (batch, classes), independent of the order of the elements.

    As in the paper: two ISAB, a SAB, a PMA and a linear head. The SAB compares all pairs of elements in time n². The
    authors' code leaves it out (`sab=False`), and uses dropout before and after the PMA (`dropout=0.5`).

    Args:
        dim, heads, inducing: number of features of an element, of heads, and of inducing points of each ISAB.
        seeds: number of seeds of the PMA; the head takes all of them. A single one uses SoftMax, unless `literal_pool`.
        norm, scale_by, plan: as in `MAB`, for every one; `unscaled_plan` is the authors' plan.
        n_iters, tau: as in `MAB`, for every one. `n_iters=1` is the Set Transformer.

    Examples:
        >>> import torch
        >>> from sinkformers.models import SetTransformer
        >>> model = SetTransformer(classes=40, dim=32, heads=4, inducing=16, n_iters=21)
        >>> model(torch.randn(2, 100, 3), mask=torch.arange(100) < torch.tensor([[100], [60]])).shape
        torch.Size([2, 40])
    """

    def __init__(
        self,
        *,
        classes: int,
        features: int = 3,
        dim: int = 256,
        heads: int = 4,
        inducing: int = 16,
        sab: bool = True,
        seeds: int = 1,
        literal_pool: bool = False,
        norm: bool = True,
        dropout: float = 0.0,
        scale_by: ScaleBy = "head",
        plan: Plan | None = None,
        n_iters: int | float = 3,
        tau: float = 1.0,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {
            "norm": norm,
            "scale_by": scale_by,
            "plan": plan,
            "n_iters": n_iters,
            "tau": tau,
        }
        self.encoder = nn.ModuleList(ISAB(width, dim, heads, inducing, **options) for width in (features, dim))
        self.sab = SAB(dim, dim, heads, **options) if sab else None
        self.pool = PMA(dim, heads, seeds, literal=literal_pool, **options)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(seeds * dim, classes)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the logits; `mask` (batch, n) is True at valid elements; others change no logit and no gradient."""
        for block in self.encoder:
            x = block(x, mask)
        if self.sab is not None:
            x = self.sab(x, mask)
        x = self.pool(self.dropout(x), mask)
        return self.head(self.dropout(x).flatten(1))
