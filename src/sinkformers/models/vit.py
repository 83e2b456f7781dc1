"""The Vision Transformer; with `n_iters` > 1 a Sinkformer with the same parameters."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from sinkformers.distributed import refuse_in_parallel
from sinkformers.modules import SelfAttention

Readout = Literal["cls", "mean"]


class Block(nn.Module):
    """Attention, then a feed-forward network, each after a LayerNorm and with a skip connection.

    With `mlp_dim=0` there is no feed-forward network.
    """

    def __init__(self, dim: int, attention: SelfAttention, mlp_dim: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(dim), attention
        self.dropout = nn.Dropout(dropout)
        self.mlp = (
            nn.Sequential(
                nn.LayerNorm(dim), nn.Linear(dim, mlp_dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(mlp_dim, dim)
            )
            if mlp_dim
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x if self.mlp is None else x + self.dropout(self.mlp(x))


class ViT(nn.Module):
    """Classify images (batch, channels, image, image): logits (batch, classes).

    An image is cut into square patches, which are embedded linearly and get learned positions; the tokens go through
    `depth` blocks. With `readout="cls"` the head reads an additional CLS token; with `"mean"` it reads the mean of all
    patches. Positions and the CLS token start from a standard normal distribution.

    Mean pooling directly after a converged layer depends on the mean of its values only, since the columns sum to one.
    So with `depth=1` and many iterations, queries and keys get almost no gradient.

    Args:
        n_iters, tau, tie_qk: of every `SelfAttention`. `n_iters=1` is a Transformer.
        mlp_dim: width of the feed-forward networks; 0 leaves them out.

    Examples:
        >>> import torch
        >>> from sinkformers.models import ViT
        >>> model = ViT(image=28, patch=7, channels=1, classes=10, dim=32, depth=2, heads=4, mlp_dim=64, n_iters=3)
        >>> model(torch.randn(5, 1, 28, 28)).shape
        torch.Size([5, 10])
    """

    def __init__(
        self,
        *,
        image: int,
        patch: int,
        channels: int,
        classes: int,
        dim: int,
        depth: int,
        heads: int,
        head_dim: int | None = None,
        mlp_dim: int,
        readout: Readout = "cls",
        n_iters: int | float = 3,
        tau: float = 1.0,
        tie_qk: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if image % patch:
            raise ValueError(f"ViT: patch must divide the image's side; got image={image} and patch={patch}.")
        if readout not in ("cls", "mean"):
            raise ValueError(f'ViT: readout must be "cls" or "mean"; got {readout!r}.')
        self.patch, self.readout = patch, readout
        tokens = (image // patch) ** 2
        self.embed = nn.Linear(channels * patch**2, dim)
        self.cls = nn.Parameter(torch.randn(1, 1, dim)) if readout == "cls" else None
        self.positions = nn.Parameter(torch.randn(1, tokens + (readout == "cls"), dim))
        self.dropout = nn.Dropout(dropout)
        options = {"n_iters": n_iters, "tau": tau, "tie_qk": tie_qk, "dropout": dropout}
        self.blocks = nn.Sequential(
            *(Block(dim, SelfAttention(dim, heads, head_dim, **options), mlp_dim, dropout) for _ in range(depth))
        )
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, classes))

    def forward(self, images: Tensor) -> Tensor:
        refuse_in_parallel("ViT", "it cuts whole images. Pass this rank's embedded tokens to model.blocks.")
        x = self.embed(self._patches(images))
        if self.cls is not None:
            x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
        x = self.blocks(self.dropout(x + self.positions))
        return self.head(x[:, 0] if self.readout == "cls" else x.mean(1))

    def _patches(self, images: Tensor) -> Tensor:
        """(batch, channels, h·p, w·p) → (batch, h·w, channels·p·p)."""
        tokens = images.unflatten(-1, (-1, self.patch)).unflatten(-3, (-1, self.patch)).permute(0, 2, 4, 1, 3, 5)
        expected = math.isqrt(self.positions.shape[1])
        if tokens.shape[1:3] != (expected, expected):
            side = expected * self.patch
            raise ValueError(f"ViT: images must be {side}×{side}; got {tuple(images.shape)}.")
        return tokens.flatten(1, 2).flatten(2)
