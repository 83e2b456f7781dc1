"""A language model: a decoder that writes texts token by token. At `n_iters=1` it is a Transformer."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from sinkformers.attention import CacheLayer, SinkhornCache
from sinkformers.distributed import refuse_in_parallel
from sinkformers.models.encoder import FeedForward, Residual
from sinkformers.modules import SelfAttention

Positions = Literal["rotary", "learned"]
STD = 0.02  # of first weights, as in GPT-2


class Layer(nn.Module):
    """Causal self-attention, then a feed-forward network, each after a LayerNorm and with a skip connection."""

    def __init__(self, attention: SelfAttention, dim: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attention, self.around_attention = attention, Residual(dim, "pre", dropout)
        self.feed_forward, self.around_feed_forward = FeedForward(dim, hidden), Residual(dim, "pre", dropout)

    def forward(self, x: Tensor, cache: CacheLayer | None = None) -> Tensor:
        x = self.around_attention.leave(x, self.attention(self.around_attention.enter(x), cache=cache))
        return self.around_feed_forward.leave(x, self.feed_forward(self.around_feed_forward.enter(x)))


class LanguageModel(nn.Module):
    """Map tokens (batch, n) to logits (batch, n, vocabulary) of the token after each; none depends on a later token.

    A decoder with LayerNorm before each layer and after the last one; the embedding is shared with the output
    projection. Texts have at most `length` tokens. The paper has no causal model.

    Args:
        vocabulary: number of token ids.
        hidden: width of the feed-forward networks.
        positions: `"rotary"`, without parameters, or `"learned"`, added to the embedded tokens.
        n_iters, tau, causal: of every `SelfAttention`; `n_iters` is odd, and 1 is a Transformer with the same
            parameters. `tau="learned"` adds one parameter per head.
        dropout: probability of dropping an entry of the embedded tokens, and of what each layer adds.

    Examples:
        >>> import torch
        >>> from sinkformers.models import LanguageModel
        >>> model = LanguageModel(vocabulary=256, length=64, dim=32, depth=2, heads=4, hidden=64, n_iters=3)
        >>> model(torch.randint(256, (5, 12))).shape
        torch.Size([5, 12, 256])
        >>> model.eval().generate(torch.tensor([list(b"Once")]), tokens=8).shape
        torch.Size([1, 12])
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        length: int,
        dim: int,
        depth: int,
        heads: int,
        hidden: int,
        positions: Positions = "rotary",
        n_iters: int = 3,
        tau: float | str = 1.0,
        causal: str = "streaming",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if positions not in ("rotary", "learned"):
            raise ValueError(f'LanguageModel: positions must be "rotary" or "learned"; got {positions!r}.')
        if causal not in ("streaming", "prefix"):  # None would be attention to later tokens
            raise ValueError(f'LanguageModel: causal must be "streaming" or "prefix"; got {causal!r}.')
        self.length, self.causal = length, causal
        self.embed, self.dropout = nn.Embedding(vocabulary, dim), nn.Dropout(dropout)
        self.positions = nn.Parameter(torch.empty(length, dim)) if positions == "learned" else None
        options = {"n_iters": n_iters, "tau": tau, "causal": causal, "bias": True, "rotary": positions == "rotary"}
        self.layers = nn.ModuleList(
            Layer(SelfAttention(dim, heads, **options), dim, hidden, dropout) for _ in range(depth)
        )
        self.last = nn.LayerNorm(dim)
        self.apply(_draw)
        if self.positions is not None:
            nn.init.normal_(self.positions, std=STD)

    def forward(self, tokens: Tensor, cache: SinkhornCache | None = None) -> Tensor:
        """Return the logits after each token; with a cache, of tokens that follow those in it, and are added to it."""
        refuse_in_parallel("LanguageModel", "its positions would count from this rank's first token.")
        first = 0 if cache is None else len(cache[0])
        self._check(tokens, first)
        x = self.embed(tokens)
        if self.positions is not None:
            x = x + self.positions[first : first + tokens.shape[1]]
        x = self.dropout(x)
        for number, layer in enumerate(self.layers):
            x = layer(x, None if cache is None else cache[number])
        return self.last(x) @ self.embed.weight.T

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        *,
        tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        use_cache: bool = True,
    ) -> Tensor:
        """Return the prompt (batch, n), continued by so many tokens: (batch, n + tokens).

        Dropout stays active in training mode: call `model.eval()` first.

        Args:
            temperature: 0 takes the likeliest token each time; otherwise tokens are drawn, by logits divided by it.
            top_k: draw among so many of the likeliest tokens; all by default.
            generator: of the random numbers; torch's own by default.
            use_cache: keep keys, values and column sums, so that a token costs O(n) instead of a whole pass. Texts do
                not depend on it. `causal="prefix"` has no cache.
        """
        self._check_generation(prompt, tokens, temperature, top_k)
        cache = SinkhornCache() if use_cache and self.causal == "streaming" else None
        text, new = prompt, prompt
        for _ in range(tokens):
            logits = self(text if cache is None else new, cache)[:, -1]
            new = _next(logits, temperature, top_k, generator)
            text = torch.cat([text, new], 1)
        return text

    def _check(self, tokens: Tensor, first: int) -> None:
        if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.is_complex():
            got = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
            raise TypeError(f"LanguageModel: tokens must be a tensor of whole numbers (batch, n); got {got}.")
        if tokens.dim() != 2 or not tokens.shape[1]:
            raise ValueError(
                f"LanguageModel: tokens must have the shape (batch, n) with n ≥ 1; got {tuple(tokens.shape)}."
            )
        if first + tokens.shape[1] > self.length:
            raise ValueError(
                f"LanguageModel: texts may have {self.length} tokens; got {first + tokens.shape[1]}. Cut them, or "
                "build the model with a larger length."
            )

    def _check_generation(self, prompt: Tensor, tokens: int, temperature: float, top_k: int | None) -> None:
        if isinstance(tokens, bool) or not isinstance(tokens, int):
            raise TypeError(f"LanguageModel.generate: tokens must be a whole number; got {tokens!r}.")
        self._check(prompt, max(0, tokens))
        if tokens < 0 or not 0 <= temperature < math.inf or (top_k is not None and top_k < 1):
            raise ValueError(
                "LanguageModel.generate: tokens and temperature must be ≥ 0 and finite, and top_k ≥ 1 or None; "
                f"got tokens={tokens}, temperature={temperature}, top_k={top_k}."
            )


def _next(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Return one token (batch, 1) for logits (batch, vocabulary)."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    likeliest, which = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]))
    below = (likeliest - likeliest[:, :1]).double() / temperature  # so that no quotient but 0 can overflow
    drawn = below.softmax(-1).multinomial(1, generator=generator)
    return which.gather(1, drawn)


def _draw(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
