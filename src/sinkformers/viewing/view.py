"""`view_attention`: a page on which the attention of a model can be looked at, and its normalisation changed."""

import html
import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sinkformers.viewing.collect import collect
from sinkformers.viewing.page import page
from sinkformers.viewing.recorder import CALLER, Layer
from sinkformers.viewing.subject import check_tokens, image_subject, patch_names, points_subject, whole_characters


@dataclass(frozen=True)
class ShownModel:
    """The attention of one model."""

    name: str
    layers: list[Layer]
    notes: list[str]  # what is not shown, with the reason


class AttentionView:
    """The attention of one model, or of two side by side. Save it as a page, or show it in a notebook.

    `view_attention` returns it.

    Examples:
        >>> import torch, sinkformers
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> view = sinkformers.view_attention(layer, torch.randn(1, 4, 16), tokens=["the", "cat", "sat", "."])
        >>> len(view.models), view.to_html().startswith("<!doctype html>")
        (1, True)
    """

    def __init__(
        self, models: Sequence[ShownModel], tokens: list[str] | None, subject: dict[str, Any] | None, title: str
    ) -> None:
        self.models, self.tokens, self.subject, self.title = tuple(models), tokens, subject, title

    def to_html(self) -> str:
        """Return the page: one HTML document that loads nothing."""
        return page(self)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to a file, which opens in any browser, offline; return its path."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_html(), encoding="utf-8")
        return path

    def beside(self, other: "AttentionView") -> "AttentionView":
        """Return a view of two models side by side, this one and that of another view of the same tokens.

        Examples:
            >>> import copy, torch, sinkformers
            >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 4, batch_first=True), 2)
            >>> sinkformer = sinkformers.to_sinkformer(copy.deepcopy(model))
            >>> x = torch.randn(1, 7, 16)
            >>> first = sinkformers.view_attention(model, x, name="SoftMax")
            >>> first.beside(sinkformers.view_attention(sinkformer, x, name="Sinkformer"))
            AttentionView(SoftMax: 2 layers, 8 heads; Sinkformer: 2 layers, 8 heads)
        """
        if not isinstance(other, AttentionView):
            raise TypeError(f"beside: other must be an AttentionView; got {type(other).__name__}.")
        if len(self.models) + len(other.models) > 2:
            raise ValueError("beside: two models at most can be shown side by side; both views must have one.")
        if self.tokens != other.tokens:
            raise ValueError("beside: both views must be of the same tokens, since a token is looked up in both.")
        names = {model.name for model in self.models}
        models = [
            ShownModel(f"{model.name} (2)" if model.name in names else model.name, model.layers, model.notes)
            for model in other.models
        ]
        return AttentionView([*self.models, *models], self.tokens, self.subject or other.subject, self.title)

    def _repr_html_(self) -> str:
        source = html.escape(self.to_html(), quote=True)
        return (
            f'<iframe srcdoc="{source}" sandbox="allow-scripts allow-downloads" title="{html.escape(self.title)}" '
            'style="width: 100%; height: 860px; border: 1px solid #8884; border-radius: 6px"></iframe>'
        )

    def __repr__(self) -> str:
        counts = (
            f"{each.name}: {len(each.layers)} layers, {sum(len(layer.heads) for layer in each.layers)} heads"
            for each in self.models
        )
        return f"AttentionView({'; '.join(counts)})"


def view_attention(
    model: nn.Module,
    inputs: Any,
    *,
    tokens: Sequence[str] | None = None,
    image: Any = None,
    grid: tuple[int, int] | None = None,
    points: Tensor | None = None,
    example: int = 0,
    layers: Collection[int] | None = None,
    heads: Collection[int] | None = None,
    name: str | None = None,
    title: str = "Attention",
) -> AttentionView:
    """Run a model once, and return a view of its attention: a page for the browser, shown inline in notebooks.

    The page holds the scores, so that it computes the weights for any `n_iters` and `tau`. It works offline.

    Args:
        model: a converted model, one of ours, or any that `to_sinkformer` can convert. It stays as it is: a copy is run
            in evaluation mode, with the same parameters.
        inputs: a mapping of keyword arguments, a tuple of arguments, a function of the model that runs it, or the only
            argument.
        tokens: a text for each token; numbers by default.
        image: an image (channels, height, width), or a PIL image, whose patches are the last tokens.
        grid: rows and columns of its patches; by default, of square patches.
        points: coordinates (n, 3) or (n, 2) of the tokens.
        example: which one of the batch is shown.
        layers: numbers of the layers to show, from 0 in the order in which they are called; negative ones count from
            the end. All by default.
        heads: numbers of the heads to show.
        name: the name of the model on the page; its class by default.
        title: the title of the page.

    Returns:
        An `AttentionView`, with `save(path)` and `beside(view)`. A page holds up to 7 million scores, in 16 bits, or
        14 million in 8 bits; of more, it shows the heads whose column sums are the least even.

    Examples:
        >>> import torch, sinkformers
        >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 4, batch_first=True), 2)
        >>> view = sinkformers.view_attention(model, torch.randn(1, 3, 16), tokens=["to", "be", "or"])
        >>> view
        AttentionView(TransformerEncoder: 2 layers, 8 heads)
        >>> view.save("attention.html")  # doctest: +SKIP
    """
    if sum(each is not None for each in (image, points)) > 1:
        raise ValueError(f"{CALLER}: pass an image or points, not both.")
    if grid is not None and image is None:
        raise ValueError(f"{CALLER}: grid must come with an image; got grid={grid!r} alone.")
    names = check_tokens(tokens)
    subject = None if points is None else points_subject(points)
    found = collect(model, inputs, example=example, layers=layers, heads=heads)
    n_tokens = Counter(max(layer.shape) for layer in found.layers).most_common(1)[0][0]
    if image is not None:
        subject = image_subject(image, grid, n_tokens)
        names = names or patch_names(subject, n_tokens)
    _check_lengths(found.layers, names, None if points is None else len(points))
    name = type(model).__name__ if name is None else whole_characters(str(name))
    shown = ShownModel(name, found.layers, found.notes)
    return AttentionView([shown], names, subject, whole_characters(str(title)))


def _check_lengths(layers: list[Layer], tokens: list[str] | None, n_points: int | None) -> None:
    """Raise if no layer has as many tokens as there are texts or points."""
    sizes = sorted({size for layer in layers for size in layer.shape})
    for what, count in (("tokens", None if tokens is None else len(tokens)), ("points", n_points)):
        if count is not None and count not in sizes:
            raise ValueError(
                f"{CALLER}: {what} must have an entry for every token that the model attends to, special tokens and "
                f"padding included: {' or '.join(map(str, sizes))}; got {count}."
            )
