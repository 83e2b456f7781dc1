"""What the authors' code for IMDb does otherwise than the paper says; the preset `authors` does the same.

All 50,000 reviews are merged and split 40,000/10,000. The table of positions is overwritten by noise, which is not
trained. The column potential is detached: gradients take it for a constant. The maximum runs over padding too. The loss
applies SoftMax before a cross-entropy that applies it again.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinkformers import sinkhorn
from sinkformers.data import Texts, TextSet
from sinkformers.experiments.texts import TextConfig, TextTask
from sinkformers.models import TextEncoder
from sinkformers.modules import SelfAttention

SPLIT_SEED = 0
TEST_SHARE = 0.2


class AuthorsTask(TextTask):
    """The task of Figure 4 with all of these at once."""

    def model(self) -> TextEncoder:
        return authors_model(self.config, self.reader.vocabulary.size, len(self.texts.classes))

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return softmax_twice(logits, labels)

    def observe(self, model: nn.Module) -> dict[str, Any]:
        return super().observe(copy.deepcopy(model))  # watching gives attention its own class


def authors_model(config: TextConfig, vocabulary: int, classes: int) -> TextEncoder:
    model = PaddedPooling(**config.sizes(vocabulary, classes))
    model.positions = torch.randn_like(model.positions)
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.__class__ = DetachedAttention  # it differs in a method only
    return model


class PaddedPooling(TextEncoder):
    """A text encoder whose maximum runs over all places, those of padding included."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        table = self._buffers.pop("positions")
        assert table is not None
        self.register_buffer("positions", table)  # noise cannot be made again: it is kept with the weights

    def pool(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return x.amax(-2)


class DetachedAttention(SelfAttention):
    """Self-attention with the weights of Sinkhorn's algorithm and the gradient of SoftMax at its column potential."""

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        if self.n_iters == 1:
            return super()._attend(query, key, value, query_mask, key_mask)
        scores = query @ key.mT / self.head_dim**0.5
        # A text's tokens are its queries and its keys: one mask serves for both.
        pairs = None if key_mask is None else (key_mask[:, :, None] & key_mask[:, None, :])[:, None]
        return detached_sinkhorn(scores, pairs, self.n_iters) @ value


def detached_sinkhorn(scores: Tensor, mask: Tensor | None, n_iters: int) -> Tensor:
    """`sinkhorn(scores)` for odd `n_iters`, differentiated as if the last column potential g were a constant.

    log W = scores + f + g, so W is the SoftMax of scores + (f + g), whose gradient does not see the rows' constant f.
    """
    with torch.no_grad():
        weights = sinkhorn(scores, n_iters=n_iters, mask=mask)
        constant = torch.where(weights > 0, weights.log() - scores, -torch.inf)
        constant = constant.masked_fill(~weights.any(-1, keepdim=True), 0.0)  # rows of padding: even, then left out
    even = torch.softmax(scores + constant, -1)
    return even if mask is None else even * mask


def softmax_twice(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum of the cross-entropies of probabilities that are taken for logits."""
    return F.cross_entropy(logits.softmax(-1), labels, reduction="sum")


def merged(texts: TextSet) -> TextSet:
    """Training and test texts together, a fifth of them, drawn once and for all, for testing."""
    together = [*texts.train.texts, *texts.test.texts]
    labels = torch.cat([texts.train.labels, texts.test.labels])
    order = torch.randperm(len(together), generator=torch.Generator().manual_seed(SPLIT_SEED))
    n_test = round(TEST_SHARE * len(together))

    def part(which: Tensor) -> Texts:
        return Texts([together[index] for index in which.tolist()], labels[which])

    return TextSet(part(order[n_test:]), part(order[:n_test]), texts.classes, f"{texts.name}, merged and split again")
