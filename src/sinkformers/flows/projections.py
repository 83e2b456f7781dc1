"""The three matrices of an attention head, and the scores of two points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sinkformers.core import checks as core_checks
from sinkformers.flows import checks

Cost = Literal["dot", "l2"]


@dataclass(frozen=True, eq=False)
class Projections:
    """`W_Q` and `W_K` (k, d), `W_V` (d, d), acting on columns: a query is `W_Q x`.

    The paper's Assumption 1 is `W_KᵀW_Q = W_QᵀW_K = −W_V`; `Projections.tied` sets `W_V` accordingly.

    Examples:
        >>> import torch
        >>> from sinkformers.flows import Projections
        >>> Projections.tied(torch.eye(2)).value.diagonal().tolist()
        [-1.0, -1.0]
    """

    query: Tensor
    key: Tensor
    value: Tensor

    def __post_init__(self) -> None:
        checks.matrix("Projections", "query", self.query, (None, None))
        core_checks.one_device("Projections", "query", self.query, key=self.key, value=self.value)
        checks.matrix("Projections", "key", self.key, tuple(self.query.shape))  # pyright: ignore[reportArgumentType]
        checks.matrix("Projections", "value", self.value, (self.dim, self.dim))

    @classmethod
    def tied(cls, query: Tensor, key: Tensor | None = None) -> Projections:
        """Return projections with `W_V = −W_QᵀW_K`; `W_K` is `W_Q` by default."""
        key = query if key is None else key
        return cls(query, key, -(query.mT @ key))

    @property
    def dim(self) -> int:
        return self.query.shape[1]

    @property
    def interaction(self) -> Tensor:
        """`W_QᵀW_K` (d, d): the scores are `xᵀ W_QᵀW_K x'`."""
        return self.query.mT @ self.key

    def root(self) -> Tensor | None:
        """Return the symmetric square root R of `W_QᵀW_K`, or None if that is not symmetric positive semi-definite.

        With R the scores are, up to terms of one point each, `−½|Rx − Rx'|²`: symmetric and positive semi-definite, as
        the averaged update of Sinkhorn's algorithm requires.
        """
        interaction = self.interaction
        slack = checks.slack(interaction)
        if (interaction - interaction.mT).abs().max() > slack:
            return None
        values, vectors = torch.linalg.eigh((interaction + interaction.mT) / 2)
        if values[0] < -slack:
            return None
        return (vectors * values.clamp_min(0).sqrt()) @ vectors.mT


@dataclass(frozen=True, eq=False)
class Scores:
    """`c(x, x')/ε`, with `c = (W_Q x)ᵀ W_K x'` for the cost "dot" and `c = −½|W_Q x − W_K x'|²` for "l2"."""

    query: Tensor
    key: Tensor
    eps: float
    cost: Cost

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the scores (n, m) of points (n, d) and (m, d)."""
        queries, keys = x @ self.query.mT / self.eps, y @ self.key.mT
        scores = queries @ keys.mT
        if self.cost == "l2":
            scores = scores - (keys.square().sum(-1) / (2 * self.eps))
            scores = scores - (queries.square().sum(-1, keepdim=True) * (self.eps / 2))
        return scores

    def diagonal(self, x: Tensor) -> Tensor:
        """Return `c(x, x)/ε` (n,) for points (n, d)."""
        queries, keys = x @ self.query.mT, x @ self.key.mT
        if self.cost == "l2":
            return (queries - keys).square().sum(-1) / (-2 * self.eps)
        return (queries * keys).sum(-1) / self.eps
