"""An encoder–decoder Transformer for translation, with Sinkhorn's algorithm in the encoder or in all attentions."""

import math
from typing import Any, NamedTuple

from torch import Tensor, nn

from sinkformers.distributed import refuse_in_parallel
from sinkformers.models.decoder import Decoder, LayerState
from sinkformers.models.encoder import Encoder, Norm, sinusoids, valid_numbers


class State(NamedTuple):
    """The state of decoding a batch: the states of the layers, the mask of the sources, the number of tokens so far."""

    layers: list[LayerState]
    mask: Tensor
    written: int

    def select(self, rows: Tensor) -> "State":
        """Return the state of the samples with indices `rows`, which may repeat."""
        return State([layer.select(rows) for layer in self.layers], self.mask[rows], self.written)


class TranslationTransformer(nn.Module):
    """Map source tokens (batch, n) and target tokens (batch, t) to logits (batch, t, target_vocabulary) of the next.

    The architecture is that of fairseq's `transformer_iwslt_de_en`: embeddings times √dim plus sinusoids, the decoder's
    embedding shared with the output projection, ReLU, LayerNorm after each sum unless `norm="pre"`. Masked tokens of
    the source change no logit, and no position of the target depends on a later one.

    Args:
        length: largest number of tokens of a source or target.
        depth: number of layers of the encoder, and of the decoder.
        n_iters, tau: of the encoder's `SelfAttention`.
        causal: of both attentions of the decoder. By default they are SoftMax; with `"streaming"` they have `n_iters`
            normalisations too, with rows in the order of the target, as in `causal_sinkhorn`. All of them have the same
            parameters.

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
        n_iters: int | float = 3,
        tau: float | str = 1.0,
        dropout: float = 0.0,
        causal: str | None = None,
    ) -> None:
        super().__init__()
        ordered = _decoder_settings(causal, n_iters, tau)
        self.source, self.target = nn.Embedding(source_vocabulary, dim), nn.Embedding(target_vocabulary, dim)
        self.register_buffer("positions", sinusoids(length, dim), persistent=False)
        self.dropout, self.scale = nn.Dropout(dropout), math.sqrt(dim)
        self.encoder = Encoder(
            dim=dim, depth=depth, heads=heads, hidden=hidden, norm=norm, n_iters=n_iters, tau=tau, dropout=dropout
        )
        self.decoder = Decoder(dim=dim, depth=depth, heads=heads, hidden=hidden, norm=norm, dropout=dropout, **ordered)
        self.apply(_draw)

    def forward(self, source: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        """Return the logits; `mask` (batch, n) is True at valid tokens of the source."""
        return self.follow(target, self.begin(source, mask, keep=False))[0]

    def begin(self, source: Tensor, mask: Tensor, *, keep: bool = True) -> State:
        """Encode a source, and return the state before the first target token.

        Without `keep` nothing is stored of the target, which then has to follow at once, as in training.
        """
        refuse_in_parallel("TranslationTransformer", "its positions would count from this rank's first token.")
        memory = self.encoder(self._placed(self.source, valid_numbers(source, mask), 0), mask)
        return State(self.decoder.begin(memory, keep=keep), mask, 0)

    def follow(self, target: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the logits after each of the next target tokens (batch, t), and the state after them."""
        x, layers = self.decoder(self._placed(self.target, target, state.written), state.layers, state.mask)
        return x @ self.target.weight.T, State(layers, state.mask, state.written + target.shape[1])

    def _placed(self, embed: nn.Embedding, tokens: Tensor, first: int) -> Tensor:
        last, longest = first + tokens.shape[1], len(self.positions)
        if last > longest:
            raise ValueError(
                f"TranslationTransformer: sentences may have at most {longest} tokens; got {last}. Cut them, or build "
                "the model with a larger length."
            )
        return self.dropout(self.scale * embed(tokens) + self.positions[first:last])


def _decoder_settings(causal: str | None, n_iters: int | float, tau: float | str) -> dict[str, Any]:
    """Return `n_iters` and `tau` of the decoder."""
    if causal is None:
        return {}
    if causal != "streaming":
        raise ValueError(
            f'TranslationTransformer: causal must be None, for SoftMax in the decoder, or "streaming"; got {causal!r}.'
        )
    return {"n_iters": n_iters, "tau": tau}


def _draw(module: nn.Module) -> None:
    """Initialise linear layers by Xavier, and embeddings with variance 1/dim.

    For self-attention this is fairseq's initialisation, whose gain of 1/√2 follows from stacking three projections.
    fairseq initialises cross-attention and feed-forward networks with smaller weights.
    """
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
