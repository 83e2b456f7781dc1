"""A plain pre-LN Transformer with the attention function passed in; what differs between rows is that function."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norm_attention, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.to_qkv, self.to_out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.to_qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        x = x + self.to_out(self.attend(query, key, value).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class Encoder(nn.Module):
    """`stem` turns a batch into (batch, tokens, dim); the first token is read out."""

    def __init__(
        self, stem: nn.Module, attend: Attend, *, dim: int, depth: int, heads: int, tokens: int, classes: int
    ) -> None:
        super().__init__()
        self.stem, self.position = stem, nn.Parameter(0.02 * torch.randn(tokens, dim))
        self.blocks = nn.Sequential(*(Block(dim, heads, attend) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, batch: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.stem(batch) + self.position))[:, 0])


class Patches(nn.Module):
    """Images (batch, 3, 224, 224) to a class token and 14 × 14 patches."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.project, self.first = nn.Conv2d(3, dim, 16, 16), nn.Parameter(torch.zeros(1, 1, dim))

    def forward(self, images: Tensor) -> Tensor:
        patches = self.project(images).flatten(2).mT
        return torch.cat([self.first.expand(len(patches), -1, -1), patches], dim=1)


def vit(attend: Attend) -> Encoder:
    return Encoder(Patches(128), attend, dim=128, depth=6, heads=8, tokens=197, classes=2)


def text_encoder(attend: Attend) -> Encoder:
    return Encoder(nn.Embedding(10_000, 256), attend, dim=256, depth=6, heads=8, tokens=512, classes=2)


class TrainingStep:
    """Forward, cross-entropy, backward and AdamW on one fixed batch; resetting the gradients is part of the step."""

    def __init__(self, model: nn.Module, batch: Tensor, labels: Tensor) -> None:
        self.model, self.batch, self.labels = model, batch, labels
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        self.loss: Tensor | None = None

    def reset(self) -> None:
        self.loss = None

    def call(self) -> None:
        self.backward()
        self.optimizer.step()

    def backward(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = F.cross_entropy(self.model(self.batch), self.labels)
        self.loss.backward()

    def outcome(self) -> list[Tensor]:
        """The loss, and all gradients in one vector: some are zero up to rounding and have no scale of their own."""
        assert self.loss is not None
        gradients = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
        return [self.loss.detach(), torch.cat(gradients)]
