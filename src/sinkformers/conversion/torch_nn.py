"""torch.nn: `MultiheadAttention`, wherever it stands, and the Transformers built on it."""

from typing import Any

from torch import Tensor, nn

from sinkformers.conversion.adapter import CAUSAL, CONVERT, CROSS, POOLING, Adapter, Place, pools
from sinkformers.conversion.attend import REMEDY, attend
from sinkformers.conversion.settings import UnderSettings, settings_of
from sinkformers.modules import MultiheadAttention


class SinkhornMultiheadAttention(UnderSettings, MultiheadAttention):  # pyright: ignore[reportIncompatibleVariableOverride]
    """An `nn.MultiheadAttention` that was converted: the same object under another class, with its own parameters."""

    _one_way_caller, _one_way_remedy = "sinkformers: MultiheadAttention", REMEDY

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        queries: Tensor | None,
        keys: Tensor | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        masks: dict[str, Any] = {"query_mask": queries, "key_mask": keys, "need_weights": need_weights}
        masks["allow_one_way_mask"] = True  # `forward` has refused what is not allowed
        dropout = self.dropout if self.training else 0.0
        return attend(self, self.sinkhorn, query, key, value, mask, dropout, **masks)


def _recognise(place: Place) -> str | None:
    module, parent = place.module, place.parent
    if not isinstance(module, nn.MultiheadAttention):
        return None
    if isinstance(parent, nn.TransformerDecoderLayer):
        return CAUSAL if module is parent.self_attn else CROSS
    if isinstance(module, MultiheadAttention):
        return "a Sinkhorn module already: set its own n_iters and tau"
    if type(module) is not nn.MultiheadAttention:
        return f"{type(module).__name__} has a forward of its own, which replacing the class would lose"
    return POOLING if pools(place) else CONVERT


def _convert(place: Place) -> None:
    place.module.__class__ = SinkhornMultiheadAttention
    # A nested tensor has no padding to mask, and the fused kernels that it is made for run SoftMax.
    for encoder in place.ancestors:
        if isinstance(encoder, nn.TransformerEncoder) and "_sinkhorn_nested" not in encoder.__dict__:
            encoder.__dict__["_sinkhorn_nested"] = encoder.use_nested_tensor
            encoder.use_nested_tensor = False


def _restore(module: nn.Module, undo: Any) -> None:
    module.__class__ = nn.MultiheadAttention


def _finish(model: nn.Module) -> None:
    """Give encoders their nested tensors back, once nothing in them is converted."""
    for encoder in model.modules():
        if "_sinkhorn_nested" in encoder.__dict__ and all(settings_of(module) is None for module in encoder.modules()):
            encoder.use_nested_tensor = encoder.__dict__.pop("_sinkhorn_nested")


TORCH = Adapter("torch.nn", _recognise, _convert, _restore, _finish)
