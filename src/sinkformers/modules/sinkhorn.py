"""`Sinkhorn`: the operator as a module, to replace an `nn.Softmax`."""

from torch import Tensor, nn

from sinkformers.core import checks, sinkhorn
from sinkformers.modules.representation import describe


class Sinkhorn(nn.Module):
    """Normalise the last two axes of scores by Sinkhorn's algorithm; replaces `nn.Softmax(dim=-1)`.

    Args:
        n_iters: number of normalisations; 1 is SoftMax, `math.inf` the limit.
        tau: relaxes the column steps, from 0 (SoftMax) to 1. A tensor that is a parameter is learned.

    Examples:
        >>> import torch, sinkformers
        >>> sinkformers.Sinkhorn(n_iters=5)(torch.zeros(2, 3, 4)).sum(-1).shape
        torch.Size([2, 3])
    """

    tau: float | Tensor

    def __init__(self, n_iters: int | float = 3, tau: float | Tensor = 1.0) -> None:
        super().__init__()
        self.n_iters = checks.iterations("Sinkhorn", n_iters)
        self.tau = checks.setting("Sinkhorn", tau)

    def forward(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return weights (…, n, m) for scores (…, n, m). `mask` is boolean and True at valid entries."""
        return sinkhorn(scores, n_iters=self.n_iters, tau=self.tau, mask=mask)

    def extra_repr(self) -> str:
        return describe(n_iters=self.n_iters, tau=self.tau)
