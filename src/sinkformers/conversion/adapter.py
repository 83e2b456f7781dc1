"""`Adapter`: how one family of attention modules is recognised, converted and restored."""

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sinkformers.conversion.settings import LEARNED, Settings

# Classes that pool a set with one query, or a few. A doubly stochastic matrix with one row is uniform, so Sinkhorn
# would turn them into mean pooling.
_POOLING = re.compile(r"attention_?pool|attn_?pool|simpool|pool(ing)?_?(head|att)|^pma$|class_?att", re.IGNORECASE)

# Names of attributes that hold the cross-attention of a decoder.
CROSS_NAMES = re.compile(r"cross|encoder_att|enc_dec|encdec|encoder_decoder", re.IGNORECASE)

POOLING = "pools with few queries: a doubly stochastic matrix of one row is uniform, which is mean pooling"
CAUSAL = "causal: a column sum runs over later queries, so earlier outputs would see the future"
CROSS = "cross-attention of a decoder: a column sum runs over target positions, so earlier ones would see later ones"
ASK = '; convert it with causal="streaming", which normalises rows in order'
CONVERT = ""


class Place(NamedTuple):
    """A module, its name in the model, and the modules that contain it, outermost first."""

    name: str
    module: nn.Module
    ancestors: tuple[nn.Module, ...]

    @property
    def parent(self) -> nn.Module | None:
        return self.ancestors[-1] if self.ancestors else None

    def child(self, name: str, module: nn.Module) -> "Place":
        """Return the place of a child module that has this name in the module."""
        return Place(f"{self.name}.{name}" if self.name else name, module, (*self.ancestors, self.module))


class Undo(NamedTuple):
    """What a converted module keeps in order to be restored."""

    adapter: str
    kind: str  # the original class name
    state: Any  # the argument of `restore`


UNDO = "_sinkhorn_undo"


def undo_of(module: nn.Module) -> Undo:
    return module.__dict__[UNDO]


class Adapter(NamedTuple):
    """How one family of attention modules is recognised, converted and restored."""

    name: str
    # Returns None for a module of another family, CONVERT for bidirectional attention, or the reason not to convert:
    # CAUSAL and CROSS for attention of decoders, which `converts_causal` adapters convert on request.
    recognise: Callable[[Place], str | None]
    # Converts a module that already has its settings; returns the second argument of `restore`.
    convert: Callable[[Place], Any]
    restore: Callable[[nn.Module, Any], None]
    # Called with the model after any of its modules was changed.
    finish: Callable[[nn.Module], None] = lambda model: None
    # Returns the settings of a module that attends by Sinkhorn without having been converted.
    implied: Callable[[nn.Module], Settings | None] = lambda module: None
    converts_causal: bool = False
    # Whether the masks of a bidirectional module order its tokens, as in encoders that process a stream.
    is_ordered: Callable[[Place], bool] = lambda place: False


def is_pooling(place: Place) -> bool:
    """Return whether the class of the module or of its parent is known to pool a set."""
    around = [place.module, *([] if place.parent is None else [place.parent])]
    return any(_POOLING.search(type(module).__name__) for module in around)


def set_on_instance(module: nn.Module, names: Iterable[str] = ("forward",)) -> str | None:
    """Return the reason not to convert a module by another class, if it has methods of its own, which would go on."""
    found = [name for name in names if name in module.__dict__]
    if not found:
        return None
    return f"its {found[0]} is set on the module itself, as hooks of accelerate are: replacing the class has no effect"


@functools.cache
def names_used(kind: type[nn.Module]) -> frozenset[str]:
    """Return the global and attribute names in the code of a class's `forward`; none if it is not Python."""
    forward = getattr(kind, "forward", None)  # a class made by torch.jit has none
    code = None if forward is None else getattr(inspect.unwrap(forward), "__code__", None)
    return frozenset(() if code is None else code.co_names)


def initial_logits(caller: str, tau: float | str, places: Iterable[Place]) -> dict[int, Tensor | None]:
    """Return the initial logits of a learned `tau` by id of the module; raise if a number of heads is unknown."""
    return {id(place.module): _logits(caller, place) if tau == LEARNED else None for place in places}


def _logits(caller: str, place: Place) -> Tensor:
    around = [place.module, *([] if place.parent is None else [place.parent])]
    names = ("num_heads", "num_attention_heads", "n_heads", "heads")
    owners = [*around, getattr(place.module, "config", None)]
    values = (getattr(owner, name, None) for owner in owners for name in names)
    heads = next((value for value in values if isinstance(value, int)), None)
    if heads is None:
        raise ValueError(
            f'{caller}: tau="learned" needs the number of heads, and {place.name!r} ({type(place.module).__name__}) '
            "has no attribute that gives it. Add an attribute num_heads, or pass a number as tau."
        )
    like = next((parameter for module in around for parameter in module.parameters()), torch.empty(0))
    # tau = ½, where the sigmoid is steepest.
    return torch.zeros(heads, dtype=like.dtype, device=like.device)
