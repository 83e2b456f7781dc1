"""A text classifier: an encoder, and a maximum over its tokens. At `n_iters=1` it is a Transformer."""

from typing import Literal

import torch
from torch import Tensor, nn

from sinkformers.distributed import refuse_in_parallel
from sinkformers.models.encoder import Encoder, Norm, sinusoids, valid_numbers

Positions = Literal["sinusoidal", "learned"]


class TextEncoder(nn.Module):
    """Classify texts of token ids (batch, n): logits (batch, classes), which do not depend on masked tokens.

    Tokens are embedded with their positions; after `depth` layers each feature is pooled by its maximum over the
    tokens. Texts have at most `length` tokens.

    Args:
        vocabulary: number of token ids.
        hidden: width of the feed-forward networks.
        norm: `"post"`, LayerNorm after each sum, or `"pre"`, before each layer.
        positions: `"sinusoidal"`, without parameters, or `"learned"`.
        n_iters, tau: of every `SelfAttention`. `n_iters=1` is a Transformer.
        dropout: probability of dropping an entry of the embedded tokens, and of what each layer adds.

    Examples:
        >>> import torch
        >>> from sinkformers.models import TextEncoder
        >>> sizes = {"vocabulary": 100, "length": 30, "classes": 2, "dim": 16, "depth": 2, "heads": 4, "hidden": 32}
        >>> tokens, mask = torch.randint(100, (5, 12)), torch.arange(12) < torch.tensor([[12], [7], [3], [1], [9]])
        >>> TextEncoder(**sizes, n_iters=3)(tokens, mask).shape
        torch.Size([5, 2])
    """

    positions: Tensor

    def __init__(
        self,
        *,
        vocabulary: int,
        length: int,
        classes: int,
        dim: int,
        depth: int,
        heads: int,
        hidden: int,
        norm: Norm = "post",
        positions: Positions = "sinusoidal",
        n_iters: int | float = 3,
        tau: float = 1.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.length, self.embed = length, nn.Embedding(vocabulary, dim)
        if positions == "learned":
            self.positions = nn.Parameter(torch.randn(length, dim))
        elif positions == "sinusoidal":
            self.register_buffer("positions", sinusoids(length, dim), persistent=False)
        else:
            raise ValueError(f'TextEncoder: positions must be "sinusoidal" or "learned"; got {positions!r}.')
        self.dropout = nn.Dropout(dropout)
        self.encoder = Encoder(
            dim=dim, depth=depth, heads=heads, hidden=hidden, norm=norm, n_iters=n_iters, tau=tau, dropout=dropout
        )
        self.head = nn.Linear(dim, classes)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the logits; `mask` (batch, n) is True at valid tokens. A text without any is pooled to zeros."""
        refuse_in_parallel(
            "TextEncoder",
            "its positions would count from this rank's first token, and its maximum would be over this rank's tokens. "
            "Pass this rank's embedded tokens to model.encoder.",
        )
        self._check(tokens)
        x = self.dropout(self.embed(valid_numbers(tokens, mask)) + self.positions[: tokens.shape[-1]])
        return self.head(self.pool(self.encoder(x, mask), mask))

    def _check(self, tokens: Tensor) -> None:
        if tokens.dim() != 2 or not tokens.shape[1]:
            raise ValueError(
                f"TextEncoder: tokens must have the shape (batch, n) with n ≥ 1; got {tuple(tokens.shape)}."
            )
        if tokens.shape[1] > self.length:
            raise ValueError(
                f"TextEncoder: texts may have {self.length} tokens; got {tokens.shape[1]}. Cut them, or build "
                "the model with a larger length."
            )

    def pool(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the maximum of each feature over the valid tokens: (batch, n, dim) to (batch, dim)."""
        if mask is None:
            return x.amax(-2)
        most = x.masked_fill(~mask[..., None], -torch.inf).amax(-2)
        return most.masked_fill(~mask.any(-1, keepdim=True), 0.0)
