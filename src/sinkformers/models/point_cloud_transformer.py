"""The classifier of Point Cloud Transformers; with `n_iters` > 1 a Sinkformer with the same parameters."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sinkformers.distributed import refuse_in_parallel
from sinkformers.modules import OffsetAttention
from sinkformers.modules.neighbours import Neighbourhoods, neighbourhoods, take_points
from sinkformers.modules.offset_attention import PointNorm


def embedding(width_in: int, width: int) -> nn.Sequential:
    """Return a linear map of each point, with BatchNorm over all points and a ReLU."""
    return nn.Sequential(nn.Linear(width_in, width, bias=False), PointNorm(width), nn.ReLU())


class NeighbourEmbedding(nn.Module):
    """Map features (batch, n, width) to features of centres (batch, s, 2·width), the maximum over their neighbours.

    A neighbour is described by its difference from the centre, and by the centre.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.pair = nn.Linear(2 * width, 2 * width, bias=False)
        self.pair_norm = PointNorm(2 * width)
        self.embed = embedding(2 * width, 2 * width)

    def forward(self, x: Tensor, around: Neighbourhoods) -> Tensor:
        centres, neighbours = (indices.long() for indices in around)
        # pair(neighbour − centre, centre), with one product per point instead of one per pair.
        difference, centre = self.pair.weight.chunk(2, -1)
        own = take_points(x, centres) @ (centre - difference).mT
        pairs = take_points(x @ difference.mT, neighbours) + own[:, :, None]
        return self.embed(self.pair_norm(pairs).relu()).amax(-2)


class PointCloudTransformer(nn.Module):
    """Classify point clouds (batch, n, features): logits (batch, classes), independent of the order of the points.

    Each point is embedded in `dim` features. Each stage then embeds the neighbourhoods of fewer centres in twice as
    many features. `layers` layers of offset attention follow. Their outputs and their input are mapped to `fused`
    features per point, whose maxima and means over the points go into a perceptron.

    The defaults are those of Guo et al. 2021. Centres start from the point farthest from the mean, not from the first
    one, so that the order of the points does not matter. Their paper pools by maximum and mean, their code by maximum
    only.

    Args:
        sizes, neighbours: number of centres of each stage, and of neighbours of each centre.
        hidden: width of the perceptron's first layer; its second layer has half of it.
        mean_pool: whether to pool by mean as well as by maximum.
        n_iters, tau, port: of every `OffsetAttention`. `n_iters=1` is SoftMax, `n_iters=2, port=True` as published.

    Examples:
        >>> import torch
        >>> from sinkformers.models import PointCloudTransformer
        >>> model = PointCloudTransformer(classes=40, dim=8, sizes=(32, 16), neighbours=8, fused=64, hidden=32)
        >>> model(torch.randn(2, 64, 3)).shape
        torch.Size([2, 40])
    """

    def __init__(
        self,
        *,
        classes: int,
        features: int = 3,
        dim: int = 64,
        sizes: Sequence[int] = (512, 256),
        neighbours: int = 32,
        layers: int = 4,
        fused: int = 1024,
        hidden: int = 512,
        dropout: float = 0.5,
        mean_pool: bool = True,
        n_iters: int | float = 3,
        tau: float = 1.0,
        port: bool = False,
    ) -> None:
        super().__init__()
        if not sizes or any(size < neighbours for size in sizes[:-1]) or list(sizes) != sorted(sizes, reverse=True):
            raise ValueError(
                "PointCloudTransformer: sizes must fall from stage to stage, and all but the last must be at least "
                f"neighbours; got sizes={tuple(sizes)}, neighbours={neighbours}."
            )
        self.sizes, self.neighbours, self.mean_pool = tuple(sizes), neighbours, mean_pool
        self.embed = nn.Sequential(embedding(features, dim), embedding(dim, dim))
        self.stages = nn.ModuleList(NeighbourEmbedding(dim * 2**stage) for stage in range(len(sizes)))
        channels = dim * 2 ** len(sizes)
        self.mix = nn.Sequential(embedding(channels, channels), embedding(channels, channels))
        self.attention = nn.ModuleList(
            OffsetAttention(channels, channels // 4, n_iters=n_iters, tau=tau, port=port) for _ in range(layers)
        )
        self.fuse = nn.Sequential(
            nn.Linear((layers + 1) * channels, fused, bias=False), PointNorm(fused), nn.LeakyReLU(0.2)
        )
        self.head = nn.Sequential(
            nn.Linear((1 + mean_pool) * fused, hidden, bias=False),
            nn.BatchNorm1d(hidden),
            nn.LeakyReLU(0.2),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden // 2),
            nn.BatchNorm1d(hidden // 2),
            nn.LeakyReLU(0.2),
            nn.Dropout(dropout),
            nn.Linear(hidden // 2, classes),
        )

    def forward(self, points: Tensor, around: Sequence[Neighbourhoods] | None = None) -> Tensor:
        """Return the logits; `around` can be given as `self.neighbourhoods(points)` if it was computed before."""
        refuse_in_parallel("PointCloudTransformer", "neighbours are looked for among this rank's points only.")
        around = self.neighbourhoods(points) if around is None else around
        x = self.embed(points)
        for stage, own in zip(self.stages, around, strict=True):
            x = stage(x, own)
        outputs = [x]
        x = self.mix(x)
        for layer in self.attention:
            x = layer(x)
            outputs.append(x)
        x = self.fuse(torch.cat(outputs, -1))
        pooled = [x.amax(1), x.mean(1)] if self.mean_pool else [x.amax(1)]
        return self.head(torch.cat(pooled, -1))

    def neighbourhoods(self, points: Tensor) -> tuple[Neighbourhoods, ...]:
        """Return the centres of each stage and their neighbours, which depend on the points only, not on weights."""
        least = max(self.sizes[0], self.neighbours)
        if points.shape[1] < least:
            raise ValueError(
                f"PointCloudTransformer: a cloud must have at least {least} points, for {self.sizes[0]} centres with "
                f"{self.neighbours} neighbours each; got {points.shape[1]}. Sample more, or give smaller sizes."
            )
        return neighbourhoods(points[..., :3], self.sizes, self.neighbours)
