"""The authors' code for IMDb, where it differs from the paper; used by the preset `authors` of Figure 4.

- All 50,000 reviews are merged and split 40,000/10,000.
- The positional embeddings are overwritten by noise and not trained; there is no dropout on embeddings.
- Every text is padded to the full length. Padding has a position of its own. It is masked as a key but not as a query,
  so that it counts in the column sums, and it is included in the maximum pooling.
- The column potential is detached: gradients treat it as a constant.
- The loss applies SoftMax before a cross-entropy that applies it again.
- The rate is reduced before the twelfth epoch, not after it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinkformers import sinkhorn
from sinkformers.lab.artefacts.artefact import ExperimentError
from sinkformers.lab.data import Texts, TextSet
from sinkformers.lab.tasks.ragged import Ragged
from sinkformers.lab.tasks.texts import TextConfig, TextTask
from sinkformers.lab.tasks.vocabulary import PAD
from sinkformers.models import TextEncoder
from sinkformers.models.encoder import Encoder
from sinkformers.modules import SelfAttention

SPLIT_SEED = 0
TEST_SHARE = 0.2
EPSILON = 1e-6  # of LayerNorm


class AuthorsTask(TextTask):
    """The task of Figure 4 with all of these differences."""

    def __init__(self, config: TextConfig, seed: int, texts: TextSet) -> None:
        if config.n_iters % 2 == 0:
            raise ExperimentError(
                f"figure4, authors: their code ends with the rows, so n_iters must be odd or inf; got {config.n_iters}."
            )
        super().__init__(config, seed, texts)

    def lengths(self, texts: Ragged) -> Tensor:
        return torch.full_like(texts.lengths, self.config.length)

    def model(self) -> TextEncoder:
        return authors_model(self.config, self.reader.vocabulary.size, len(self.texts.classes))

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return softmax_twice(logits, labels)

    def observe(self, model: nn.Module) -> dict[str, Any]:
        """Measure attention between the tokens of a text, without padding."""
        return super().observe(copy.deepcopy(model))  # watch_attention replaces the class of attention modules


def authors_model(config: TextConfig, vocabulary: int, classes: int) -> TextEncoder:
    """Return a new model as in the authors' code."""
    model = PaddedEncoder(**config.sizes(vocabulary, classes))
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.__class__ = DetachedAttention  # only its methods differ
        elif isinstance(module, Encoder):
            module.__class__ = PaddedLayers
        elif isinstance(module, nn.LayerNorm):
            module.eps = EPSILON
    return model


class PaddedEncoder(TextEncoder):
    """A text encoder that pads all texts to the maximum length. Positional embeddings are noise, the first of them for
    padding, and the maximum pooling includes padding."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        del self.positions
        noise = torch.randn(self.length + 1, self.embed.embedding_dim)
        self.register_buffer("positions", noise)  # saved with the weights, since it is random

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        self._check(tokens)
        more = (0, self.length - tokens.shape[-1])
        mask = F.pad(torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask, more)
        places = torch.arange(1, self.length + 1, device=tokens.device).where(mask, 0)
        x = self.embed(F.pad(tokens, more, value=PAD)) + self.positions[places]
        return self.head(self.encoder(x, mask).amax(-2))


class PaddedLayers(Encoder):
    """Layers that do not zero padding."""

    def _enter(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return x


class DetachedAttention(SelfAttention):
    """Self-attention with Sinkhorn's weights and the gradient of SoftMax at its column potential. Masked tokens are
    masked as keys, but not as queries."""

    def _enter(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return x

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        if self.n_iters == 1:
            return super()._attend(query, key, value, None, key_mask)
        scores = query @ key.mT / self.head_dim**0.5
        mask = None if key_mask is None else key_mask[:, None, None, :].expand(scores.shape)
        return detached_sinkhorn(scores, mask, self.n_iters) @ value


def detached_sinkhorn(scores: Tensor, mask: Tensor | None, n_iters: int | float) -> Tensor:
    """Return `sinkhorn(scores)` for odd or infinite `n_iters`, with the gradient for a constant column potential g.

    log W = scores + f + g, so W is the SoftMax of scores + (f + g), and its gradient does not depend on f.
    """
    with torch.no_grad():
        weights = sinkhorn(scores, n_iters=n_iters, mask=mask)
        constant = torch.where(weights > 0, weights.log() - scores, -torch.inf)
        constant = constant.masked_fill(
            ~weights.any(-1, keepdim=True), 0.0
        )  # empty rows: uniform here, and masked below
    even = torch.softmax(scores + constant, -1)
    return even if mask is None else even * mask


def softmax_twice(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of cross-entropies with probabilities in place of logits."""
    return F.cross_entropy(logits.softmax(-1), labels, reduction="sum")


def merged(texts: TextSet) -> TextSet:
    """Merge training and test texts, and use a fixed random fifth of them for testing."""
    together = [*texts.train.texts, *texts.test.texts]
    labels = torch.cat([texts.train.labels, texts.test.labels])
    order = torch.randperm(len(together), generator=torch.Generator().manual_seed(SPLIT_SEED))
    n_test = round(TEST_SHARE * len(together))

    def part(which: Tensor) -> Texts:
        return Texts([together[index] for index in which.tolist()], labels[which])

    return TextSet(part(order[n_test:]), part(order[:n_test]), texts.classes, f"{texts.name}, merged and split again")
