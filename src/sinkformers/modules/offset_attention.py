"""`OffsetAttention`: the layer of Point Cloud Transformers (Guo et al. 2021)."""

from torch import Tensor, nn

from sinkformers.core import sinkhorn
from sinkformers.distributed import refuse_in_parallel
from sinkformers.modules.heads import Heads
from sinkformers.modules.representation import describe

PORT_ITERS = 2


def port_weights(scores: Tensor) -> Tensor:
    """Return the weights of scores (…, n, n) as published with PCT: columns are normalised first, then rows.

    The published code applies SoftMax to the rows, divides by the sums of the columns, and uses the transposed result.
    So rows sum to 1 and columns do not. These are two normalisations of Sinkhorn's algorithm, in the opposite order of
    this library's, which starts with rows.
    """
    return sinkhorn(scores.mT, n_iters=PORT_ITERS).mT


class PointNorm(nn.BatchNorm1d):
    """BatchNorm of features (…, channels) over all axes but the last one."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.reshape(-1, input.shape[-1])).view_as(input)


class OffsetAttention(Heads):
    """Offset attention on points (batch, n, channels): `x + relu(norm(out(x − attended)))`.

    One head, with one projection of width `key_dim` for queries and keys; dot products are not scaled.

    Args:
        n_iters, tau: as in `sinkhorn`; `n_iters=1` is SoftMax, with the same parameters.
        port: normalise as the published code of PCT does, columns first (`port_weights`); `n_iters` must then be 2. If
            the layer is converted to another number of iterations, rows come first as usual.

    Examples:
        >>> import torch
        >>> from sinkformers.modules import OffsetAttention
        >>> OffsetAttention(12, 3, n_iters=5)(torch.randn(2, 7, 12)).shape
        torch.Size([2, 7, 12])
    """

    num_heads = 1

    def __init__(
        self, channels: int, key_dim: int, *, n_iters: int | float = 3, tau: float = 1.0, port: bool = False
    ) -> None:
        super().__init__(n_iters, tau, scale=1.0)
        if port and (n_iters != PORT_ITERS or tau != 1):
            raise ValueError(
                f"OffsetAttention: port=True makes two iterations, columns first: n_iters must be 2 and tau 1; "
                f"got n_iters={n_iters}, tau={tau}. Leave port out for Sinkhorn."
            )
        self.port = port
        self.key = nn.Linear(channels, key_dim, bias=False)
        self.value, self.out = nn.Linear(channels, channels), nn.Linear(channels, channels)
        self.norm = PointNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        key, value = self.key(x)[:, None], self.value(x)[:, None]
        attended = self._attend(key, key, value)[:, 0]
        return x + self.norm(self.out(x - attended)).relu()

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        if not self._is_port:
            return super()._attend(query, key, value, query_mask, key_mask)
        refuse_in_parallel("OffsetAttention(port=True)", "its columns would be sums over this rank's tokens.")
        weights = port_weights(query @ key.mT)
        self._report_weights(weights)
        return weights @ value

    @property
    def _is_port(self) -> bool:
        return self.port and self.n_iters == PORT_ITERS and isinstance(self.tau, float) and self.tau == 1

    def _report_weights(self, weights: Tensor) -> None:
        """Called with the weights (batch, 1, n, n); converted modules pass them to a watcher."""

    def extra_repr(self) -> str:
        return describe(**self._settings(), port=self.port)
