"""The adapter for our own models, which can be built with any `n_iters`, and converted, watched and restored too."""

from typing import Any

from torch import Tensor, nn

from sinkformers.attention import CacheLayer
from sinkformers.conversion.adapter import CAUSAL, CONVERT, CROSS, POOLING, Adapter, Place
from sinkformers.conversion.attend import WARNED, WATCHER, attend
from sinkformers.conversion.settings import ReadsSettings, Settings
from sinkformers.modules import MAB, PMA, OffsetAttention, SelfAttention
from sinkformers.modules.decoder_attention import CausalAttention, CrossAttention
from sinkformers.modules.heads import DecoderHeads, Heads


class SinkhornHeads(ReadsSettings, Heads):
    """Converted `Heads`."""

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        options: dict[str, Any] = {"scale": self.scale, "query_mask": query_mask, "key_mask": key_mask}
        return attend(self, self.sinkhorn, query, key, value, None, dropout, **options)[0]

    def _attend_in_order(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        *,
        triangle: bool,
        cache: CacheLayer | None = None,
    ) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        options: dict[str, Any] = {"scale": self.scale, "query_mask": query_mask, "key_mask": key_mask}
        options |= {"is_causal": triangle, "cache": cache}
        return attend(self, self.sinkhorn, query, key, value, None, dropout, **options)[0]


class SinkhornSelfAttention(SinkhornHeads, SelfAttention):
    """A converted `SelfAttention`."""


class SinkhornCausalAttention(SinkhornHeads, CausalAttention):
    """A converted self-attention of a decoder."""


class SinkhornCrossAttention(SinkhornHeads, CrossAttention):
    """A converted attention of a decoder to a source."""


class SinkhornMAB(SinkhornHeads, MAB):
    """A converted `MAB`."""


class SinkhornOffsetAttention(OffsetAttention, SinkhornHeads):
    """A converted `OffsetAttention`."""

    def _report_weights(self, weights: Tensor) -> None:
        watcher = self.__dict__.get(WATCHER)
        if watcher is not None:
            watcher.record(weights.detach(), None, None, None)


# The class of each module after conversion.
KINDS: dict[type[Heads], type[Heads]] = {
    SelfAttention: SinkhornSelfAttention,
    CausalAttention: SinkhornCausalAttention,
    CrossAttention: SinkhornCrossAttention,
    MAB: SinkhornMAB,
    OffsetAttention: SinkhornOffsetAttention,
}


def _kind(module: nn.Module) -> type[Heads] | None:
    return next((kind for kind in KINDS if isinstance(module, kind)), None)


def _recognise(place: Place) -> str | None:
    if _kind(place.module) is None:
        return None
    if isinstance(place.module, DecoderHeads):
        return {"causal": CAUSAL, "cross": CROSS}[place.module.kind]
    if isinstance(place.module, SelfAttention) and place.module.causal is not None:
        return CAUSAL
    return POOLING if isinstance(place.parent, PMA) and place.parent.stays_softmax else CONVERT


def _convert(place: Place) -> tuple[type[Heads], str | None]:
    kind = _kind(place.module)
    assert kind is not None
    for name in ("n_iters", "tau"):  # they are properties now, which read the settings
        place.module.__dict__.pop(name, None)
    causal = place.module.__dict__.pop("causal")
    if isinstance(place.parent, PMA):
        place.module.__dict__[WARNED] = True  # literal=True asked for Sinkhorn with a single seed
    place.module.__class__ = KINDS[kind]
    return kind, causal


def _restore(module: nn.Module, undo: Any) -> None:
    module.__class__, causal = undo
    module.__dict__.update(n_iters=1, tau=1.0, causal=causal)


def _implied(module: nn.Module) -> Settings | None:
    if not isinstance(module, Heads) or module.causal == "prefix":
        return None
    if isinstance(module, DecoderHeads) and module.n_iters == 1:
        return None  # a decoder stays as it is unless it was built or converted otherwise
    assert not isinstance(module.tau, Tensor)  # only converted modules have a tensor here
    return Settings(module.n_iters, module.tau, causal=module.causal)


OWN_MODELS = Adapter("sinkformers", _recognise, _convert, _restore, implied=_implied, converts_causal=True)
