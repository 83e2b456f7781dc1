"""An encoder–decoder Transformer for translation; Sinkhorn's algorithm serves in the encoder's self-attention only."""

import math
from typing import NamedTuple

from torch import Tensor, nn

from sinkformers.models.decoder import Decoder, LayerState
from sinkformers.models.encoder import Encoder, Norm, sinusoids, valid_numbers


class State(NamedTuple):
    """A batch of targets being written: what the layers know, which tokens the sources have, how many are written."""

    layers: list[LayerState]
    mask: Tensor
    written: int

    def select(self, rows: Tensor) -> "State":
        """The rows of the batch numbered `rows`, which may repeat and leave out."""
        return State([layer.select(rows) for layer in self.layers], self.mask[rows], self.written)


class TranslationTransformer(nn.Module):
    """Source tokens (batch, n) and target tokens (batch, t) to logits (batch, t, target_vocabulary) of the next token.

    As fairseq's `transformer_iwslt_de_en`: embeddings times √dim plus sinusoids, the decoder's embedding used again to
    give logits, ReLU, LayerNorm after each sum unless `norm="pre"`. What `mask` leaves out of a source changes nothing,
    and no position of a target sees a later one.

    Args:
        length: the longest source or target.
        depth: of the encoder and of the decoder.
        n_iters, tau: of the encoder's `SelfAttention`. The decoder is SoftMax always.

    Examples:
        >>> import torch
        >>> from sinkformers.models import TranslationTransformer
        >>> sizes = {"length": 20, "dim": 16, "depth": 2, "heads": 4, "hidden": 32}
        >>> model = TranslationTransformer(source_vocabulary=50, target_vocabulary=40, **sizes, n_iters=3)
        >>> source, target = torch.randint(50, (3, 7)), torch.randint(40, (3, 5))
        >>> model(source, torch.ones(3, 7, dtype=torch.bool), target).shape
        torch.Size([3, 5, 40])
    """

    positions: Tensor

    def __init__(
        self,
        *,
        source_vocabulary: int,
        target_vocabulary: int,
        length: int,
        dim: int,
        depth: int,
        heads: int,
        hidden: int,
        norm: Norm = "post",
        n_iters: int = 3,
        tau: float = 1.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(source_vocabulary, dim), nn.Embedding(target_vocabulary, dim)
        self.register_buffer("positions", sinusoids(length, dim), persistent=False)
        self.dropout, self.scale = nn.Dropout(dropout), math.sqrt(dim)
        self.encoder = Encoder(
            dim=dim, depth=depth, heads=heads, hidden=hidden, norm=norm, n_iters=n_iters, tau=tau, dropout=dropout
        )
        self.decoder = Decoder(dim=dim, depth=depth, heads=heads, hidden=hidden, norm=norm, dropout=dropout)
        self.apply(_draw)

    def forward(self, source: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        """`mask` (batch, n) is True at the tokens of the source."""
        return self.follow(target, self.begin(source, mask))[0]

    def begin(self, source: Tensor, mask: Tensor) -> State:
        """Read a source; nothing is written yet."""
        memory = self.encoder(self._placed(self.source, valid_numbers(source, mask), 0), mask)
        return State(self.decoder.begin(memory), mask, 0)

    def follow(self, target: Tensor, state: State) -> tuple[Tensor, State]:
        """Logits of what comes after each of the tokens (batch, t) that follow those written, and the state then."""
        x, layers = self.decoder(self._placed(self.target, target, state.written), state.layers, state.mask)
        return x @ self.target.weight.T, State(layers, state.mask, state.written + target.shape[1])

    def _placed(self, embed: nn.Embedding, tokens: Tensor, first: int) -> Tensor:
        last, longest = first + tokens.shape[1], len(self.positions)
        if last > longest:
            raise ValueError(
                f"TranslationTransformer: sentences may have {longest} tokens; got {last}. Cut them, or build with "
                "length."
            )
        return self.dropout(self.scale * embed(tokens) + self.positions[first:last])


def _draw(module: nn.Module) -> None:
    """First weights by Xavier, and embeddings of variance 1/dim, as fairseq does in self-attention, whose three stacked
    projections get its gain of 1/√2 by that. Those of cross-attention and feed-forward networks it draws smaller."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
