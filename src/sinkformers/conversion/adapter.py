"""One row of the table: how a family of attention modules is recognised, converted, and put back."""

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sinkformers.conversion.settings import LEARNED, Settings

# Modules that read a set out with one query, or a few. A doubly stochastic matrix of one row is uniform: Sinkhorn
# would turn them into mean pooling.
_POOLING = re.compile(r"attention_?pool|attn_?pool|simpool|pool(ing)?_?(head|att)|^pma$|class_?att", re.IGNORECASE)

POOLING = "pools with few queries: a doubly stochastic matrix of one row is uniform, which is mean pooling"
CAUSAL = "causal: a column sum runs over later queries, so earlier outputs would see the future"
CROSS = "cross-attention of a decoder: a column sum runs over target positions, so earlier ones would see later ones"
CONVERT = ""


class Place(NamedTuple):
    """A module, with its name in the model and everything around it, outermost first."""

    name: str
    module: nn.Module
    ancestors: tuple[nn.Module, ...]

    @property
    def parent(self) -> nn.Module | None:
        return self.ancestors[-1] if self.ancestors else None


class Undo(NamedTuple):
    """What a converted module keeps to become again what it was."""

    adapter: str
    kind: str  # its class, as its author named it
    state: Any  # what `restore` needs


UNDO = "_sinkhorn_undo"


def undo_of(module: nn.Module) -> Undo:
    return module.__dict__[UNDO]


class Adapter(NamedTuple):
    name: str
    # None: not of this family. CONVERT: bidirectional attention. Anything else: why the module stays as it is.
    recognise: Callable[[Place], str | None]
    # Turns the module, which already has its settings, and returns what `restore` needs.
    convert: Callable[[Place], Any]
    restore: Callable[[nn.Module, Any], None]
    # After every change to any module of a model: what the model as a whole has to know.
    finish: Callable[[nn.Module], None] = lambda model: None
    # The settings of a module that attends by Sinkhorn although nobody converted it.
    implied: Callable[[nn.Module], Settings | None] = lambda module: None


def pools(place: Place) -> bool:
    """Whether the module, or the one that holds it, is known to read a set out."""
    around = [place.module, *([] if place.parent is None else [place.parent])]
    return any(_POOLING.search(type(module).__name__) for module in around)


@functools.cache
def names_used(kind: type[nn.Module]) -> frozenset[str]:
    """The global and attribute names that the code of a class's `forward` uses; none where it is not Python."""
    forward = getattr(kind, "forward", None)  # a class that torch.jit made has none
    code = None if forward is None else getattr(inspect.unwrap(forward), "__code__", None)
    return frozenset(() if code is None else code.co_names)


def logits_for(caller: str, tau: float | str, places: Iterable[Place]) -> dict[int, Tensor | None]:
    """The first logits of a learned `tau`, by id of the module; refuses before anything changes."""
    return {id(place.module): _logits(caller, place) if tau == LEARNED else None for place in places}


def _logits(caller: str, place: Place) -> Tensor:
    around = [place.module, *([] if place.parent is None else [place.parent])]
    names = ("num_heads", "num_attention_heads", "n_heads", "heads")
    told = (getattr(module, name, None) for module in around for name in names)
    heads = next((value for value in told if isinstance(value, int)), None)
    if heads is None:
        raise ValueError(
            f'{caller}: tau="learned" needs the number of heads, and {place.name!r} ({type(place.module).__name__}) '
            "does not tell it. Give it an attribute num_heads, or a fixed tau."
        )
    like = next((parameter for module in around for parameter in module.parameters()), torch.empty(0))
    # Half way: far enough from both ends for the sigmoid to have a slope.
    return torch.zeros(heads, dtype=like.dtype, device=like.device)
