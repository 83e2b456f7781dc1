"""Our attention and mask functions in the registries of Hugging Face transformers, under the name "sinkhorn"."""

import inspect
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from sinkformers.conversion.adapter import CAUSAL
from sinkformers.conversion.attend import WARNED, attend, self_attention_masks
from sinkformers.conversion.hugging_face import NAME, from_config, stays_softmax
from sinkformers.conversion.settings import is_softmax, settings_of

# Arguments of attention functions that are not defined for Sinkhorn attention.
_REFUSED = ("softcap", "s_aux", "sliding_window", "cu_seq_lens_q", "cache")


def register() -> None:
    """Register attn_implementation="sinkhorn", with its mask function; without that, masks would silently be None."""
    if "allow_is_causal_skip" not in inspect.signature(sdpa_mask).parameters:
        raise RuntimeError(
            "sinkformers: sdpa_mask of this version of transformers has no argument allow_is_causal_skip, so causal "
            "masks would be lost. The tests pass with transformers 5.20 and 5.22."
        )
    AttentionInterface.register(NAME, sinkhorn_attention_forward)
    AttentionMaskInterface.register(NAME, sinkhorn_mask)


def sinkhorn_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return a boolean mask (batch, 1, n, m), True at valid entries. Causal masks are never replaced by None."""
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})


def sinkhorn_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the output (batch, n, heads, d), and the weights or None, of heads (batch, heads, n, d).

    The signature is that of transformers' attention functions. Causal and cross-attention use the library's SoftMax
    attention; a model that has nothing else is refused.
    """
    settings = settings_of(module)
    if settings is None:
        if is_causal or stays_softmax(module):
            _refuse_or_warn(module, bool(is_causal) or stays_softmax(module) == CAUSAL)
            options = {"scaling": scaling, "is_causal": is_causal, "position_bias": position_bias, **kwargs}
            return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, **options)
        settings = from_config(module.config)
        if query.shape[-2] != key.shape[-2] and not is_softmax(settings):
            raise ValueError(
                f"sinkformers: {type(module).__name__} looks like cross-attention ({query.shape[-2]} queries, "
                f'{key.shape[-2]} keys), and attn_implementation="{NAME}" is for self-attention. Load the model '
                "without it, and choose with to_sinkformer(model, select=…)."
            )
    elif is_causal and not is_softmax(settings):
        raise NotImplementedError(
            f"sinkformers: {type(module).__name__} was called with is_causal=True, where Sinkhorn would let earlier "
            "outputs see later tokens. Leave it out with `select`."
        )
    for name in _REFUSED:
        if kwargs.get(name) is not None and not is_softmax(settings):
            raise NotImplementedError(
                f"sinkformers: {type(module).__name__} asks for {name}, which Sinkhorn attention has no definition of. "
                "Load the model plainly: to_sinkformer(model) leaves such modules SoftMax, and says so."
            )
    masks = self_attention_masks(_four_axes(attention_mask), query, key)
    if position_bias is not None:
        mask = masks.get("attn_mask")
        if mask is None:
            masks["attn_mask"] = position_bias
        elif mask.dtype == torch.bool:
            masks["attn_mask"] = position_bias.masked_fill(~mask, -torch.inf)
        else:
            masks["attn_mask"] = position_bias + mask
    need_weights = bool(kwargs.get("output_attentions"))
    options: dict[str, Any] = {"scale": scaling, "need_weights": need_weights, **masks}
    options["enable_gqa"] = key.shape[1] != query.shape[1]
    out, weights = attend(module, settings, query, key, value, dropout_p=dropout, **options)
    return out.transpose(1, 2).contiguous(), weights


def _four_axes(mask: Any) -> Tensor | None:
    """Return a mask as (batch, heads or 1, n or 1, m); flash attention has masks (batch, m)."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"sinkformers: the attention mask must be a tensor; got {type(mask).__name__}. Load the model with "
            'attn_implementation="sdpa" before converting it.'
        )
    if mask.dim() == 2:
        return mask.bool()[:, None, None, :]
    return mask if mask.is_floating_point() else mask.bool()


def _refuse_or_warn(module: nn.Module, causal: bool) -> None:
    """Raise for a causal module of a model that has no encoder; warn, once, if the rest of the model is unknown.

    The configuration of a part does not tell what else the model has. CLIP, for example, has a vision tower besides its
    causal text tower, and the text tower can also be loaded alone.
    """
    config: Any = module.config
    has_encoder = config.is_encoder_decoder or getattr(config, "add_cross_attention", False)
    if config.base_config_key == "" and not has_encoder:
        raise ValueError(
            f'sinkformers: attn_implementation="{NAME}" was asked of a {config.model_type} model, whose '
            f"{type(module).__name__} is causal, and which has no bidirectional self-attention. Under a causal mask "
            "Sinkhorn would let earlier outputs see later tokens. If another part of a larger model was meant, load it "
            "plainly and use to_sinkformer(model)."
        )
    if causal and not config.is_encoder_decoder and not module.__dict__.get(WARNED):
        module.__dict__[WARNED] = True
        warnings.warn(
            f'sinkformers: attn_implementation="{NAME}" was asked of a {config.model_type}, whose '
            f"{type(module).__name__} is causal and stays SoftMax. If it is not part of a model with bidirectional "
            "self-attention, nothing here is Sinkhorn: watch_attention(model) raises then.",
            stacklevel=3,
        )
