"""The adapter for torch.nn: `MultiheadAttention` in any model, torch's Transformers included."""

from typing import Any

from torch import Tensor, nn

from sinkformers.conversion.adapter import CAUSAL, CONVERT, CROSS, POOLING, Adapter, Place, is_pooling, set_on_instance
from sinkformers.conversion.attend import REMEDY, attend
from sinkformers.conversion.settings import ReadsSettings, settings_of
from sinkformers.modules import MultiheadAttention
from sinkformers.modules.multihead import check_fused_kernel_is_off

NESTED = "_sinkhorn_nested"  # the `use_nested_tensor` of an encoder before conversion


class SinkhornMultiheadAttention(ReadsSettings, MultiheadAttention):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A converted `nn.MultiheadAttention`: the same object and parameters with another class."""

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
        masks["allow_one_way_mask"] = True  # `forward` has checked the mask
        dropout = self.dropout if self.training else 0.0
        return attend(self, self.sinkhorn, query, key, value, mask, dropout, **masks)


def _recognise(place: Place) -> str | None:
    module, parent = place.module, place.parent
    if not isinstance(module, nn.MultiheadAttention):
        return None
    if isinstance(module, MultiheadAttention):
        return "a Sinkhorn module already: set its own n_iters and tau"
    if type(module) is not nn.MultiheadAttention:
        return f"{type(module).__name__} has a forward of its own, which replacing the class would lose"
    if isinstance(parent, nn.TransformerDecoderLayer):
        return CAUSAL if module is parent.self_attn else CROSS
    if is_pooling(place):
        return POOLING
    check_fused_kernel_is_off(module)
    return set_on_instance(module) or CONVERT


def _convert(place: Place) -> None:
    place.module.__class__ = SinkhornMultiheadAttention
    # Nested tensors have no padding to mask, and the fused kernels that they serve compute SoftMax. If torch does not
    # have the attribute, it is not needed, or a nested tensor reaches the module, which raises.
    for encoder in place.ancestors:
        if not isinstance(encoder, nn.TransformerEncoder) or not hasattr(encoder, "use_nested_tensor"):
            continue
        if NESTED not in encoder.__dict__:
            encoder.__dict__[NESTED] = encoder.use_nested_tensor
            encoder.use_nested_tensor = False


def _restore(module: nn.Module, undo: Any) -> None:
    module.__class__ = nn.MultiheadAttention


def _finish(model: nn.Module) -> None:
    """Restore `use_nested_tensor` of encoders in which no module is converted any more."""
    for encoder in model.modules():
        if NESTED in encoder.__dict__ and all(settings_of(module) is None for module in encoder.modules()):
            encoder.use_nested_tensor = encoder.__dict__.pop(NESTED)


TORCH = Adapter("torch.nn", _recognise, _convert, _restore, _finish, converts_causal=True)
