"""Our own models: built with any `n_iters`, and changed, watched and turned back like models of others."""

from typing import Any

from torch import Tensor, nn

from sinkformers.conversion.adapter import CONVERT, Adapter, Place
from sinkformers.conversion.attend import attend
from sinkformers.conversion.settings import Settings, UnderSettings
from sinkformers.modules import SelfAttention


class SinkhornSelfAttention(UnderSettings, SelfAttention):
    """A `SelfAttention` under the settings that conversion gave it."""

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return attend(self, self.sinkhorn, query, key, value, None, dropout, query_mask=mask, key_mask=mask)[0]


def _recognise(place: Place) -> str | None:
    return CONVERT if isinstance(place.module, SelfAttention) else None


def _convert(place: Place) -> None:
    for name in ("n_iters", "tau"):  # the settings speak from now on
        place.module.__dict__.pop(name, None)
    place.module.__class__ = SinkhornSelfAttention


def _restore(module: nn.Module, undo: Any) -> None:
    module.__class__ = SelfAttention
    module.__dict__.update(n_iters=1, tau=1.0)


def _implied(module: nn.Module) -> Settings | None:
    if not isinstance(module, SelfAttention):
        return None
    assert isinstance(module.tau, float)  # only conversion makes it a tensor
    return Settings(module.n_iters, module.tau)


NATIVE = Adapter("sinkformers", _recognise, _convert, _restore, implied=_implied)
