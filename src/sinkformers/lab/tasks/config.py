"""The configurations of the tasks: what all arms of a preset share.

They are plain values and do not import torch, so that the command line can read the presets without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sinkformers.lab.workbench.task import Recipe, WarmRecipe
    from sinkformers.models import LanguageModel, TextEncoder
    from sinkformers.modules.neighbours import Neighbourhoods

SHAPES = ""  # the data set of presets that read no files

Config = TypeVar("Config", bound="TaskConfig")


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Plain values that determine a training, apart from its seed and its data. Records hold them as `config`."""

    recipe: Recipe
    n_iters: int | float = 1  # math.inf is the limit

    def with_settings(self: Config, settings: Mapping[str, Any]) -> Config:
        """Return the configuration of an arm: its settings replace the fields of the same name, here or in the recipe.

        Raises:
            TypeError: if a setting is a field of neither.
        """
        names = {field.name for field in fields(self)}
        own = {name: value for name, value in settings.items() if name in names}
        recipe = {name: value for name, value in settings.items() if name not in names}
        return replace(self, **{"recipe": replace(self.recipe, **recipe), **own})


@dataclass(frozen=True, kw_only=True)
class VisionConfig(TaskConfig):
    image: int
    patch: int
    dim: int
    depth: int
    heads: int
    head_dim: int
    mlp_dim: int
    readout: str
    crop: tuple[float, float] | None = None  # area of random crops in training, which are also flipped
    tie_qk: bool = False


@dataclass(frozen=True, kw_only=True)
class PointConfig(TaskConfig):
    """Test shapes are not augmented: their first `points` are used, standardised if training shapes are."""

    points: int  # per shape
    subset: bool = False  # in training, draw random points of a shape each time instead of its first ones
    standardise: bool = False
    scale: tuple[float, float] | None = None  # range of random factors, one per axis
    shift: float = 0.0  # largest random shift along each axis
    turn: float = 0.0  # largest random rotation about z, in radians
    drop: float = 0.0  # largest share of points that is dropped

    def model(self, classes: int) -> nn.Module:
        """Return a new model."""
        raise NotImplementedError

    def neighbourhoods(self, points: Tensor) -> tuple[Neighbourhoods, ...] | None:
        """Return the neighbourhoods in points (batch, n, 3) that the model uses; None if it uses none."""
        return None

    @property
    def keeps_points(self) -> bool:
        """Whether a shape has the same points in every epoch, so that its neighbourhoods can be cached."""
        return not self.subset and self.drop == 0


@dataclass(frozen=True, kw_only=True)
class TextConfig(TaskConfig):
    vocabulary: int
    length: int  # texts are truncated to so many tokens
    dim: int
    depth: int
    heads: int
    hidden: int
    norm: str = "post"
    positions: str = "sinusoidal"
    dropout: float = 0.1
    lower: bool = False  # convert texts to lower case
    authors: bool = False  # follow the authors' code where it differs from the paper

    def model(self, vocabulary: int, classes: int) -> TextEncoder:
        """Return a new model."""
        from sinkformers.models import TextEncoder

        return TextEncoder(**self.sizes(vocabulary, classes))

    def sizes(self, vocabulary: int, classes: int) -> dict[str, Any]:
        """Return the arguments of `TextEncoder`."""
        names = ("length", "dim", "depth", "heads", "hidden", "norm", "positions", "dropout", "n_iters")
        return {"vocabulary": vocabulary, "classes": classes, **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True, kw_only=True)
class TranslationConfig(TaskConfig):
    """The recipe's batch size is in tokens of the longer side, with special tokens and padding."""

    recipe: WarmRecipe
    vocabulary: int | None  # size of the shared vocabulary; None if the files already hold subword tokens
    length: int  # of the longest sentence; longer pairs are not used in training
    dim: int
    depth: int
    heads: int
    hidden: int
    norm: str = "post"
    dropout: float = 0.3
    smoothing: float = 0.1
    beam: int = 5
    penalty: float = 1.0
    room: tuple[float, int] = (1.5, 10)  # (a, b): the translation of n tokens has at most a n + b tokens
    causal: str | None = None  # "streaming": the decoder's attentions have n_iters normalisations too


@dataclass(frozen=True, kw_only=True)
class LanguageConfig(TaskConfig):
    """An epoch has `steps` batches of sequences, drawn at random."""

    steps: int
    length: int  # tokens that the model reads
    dim: int
    depth: int
    heads: int
    hidden: int
    vocabulary: int = 256  # bytes
    positions: str = "rotary"
    tau: float | str = 1.0
    causal: str = "streaming"
    dropout: float = 0.0
    tested: int = 512  # sequences of the test set
    pairs: int | None = None  # for associative recall: pairs of a key and a value in a sequence; None for texts

    def model(self) -> LanguageModel:
        """Return a new model."""
        from sinkformers.models import LanguageModel

        names = ("vocabulary", "length", "dim", "depth", "heads", "hidden", "positions", "dropout", "n_iters", "tau")
        return LanguageModel(causal=self.causal, **{name: getattr(self, name) for name in names})
