"""Our attention and mask functions in the registries of Hugging Face transformers, under the name "sinkhorn"."""

import inspect
import math
import warnings
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from sinkformers.attention.mask_values import hides_nothing
from sinkformers.conversion.adapter import CAUSAL, UNDO, undo_of
from sinkformers.conversion.attend import WARNED, attend, refuse_unknown_cache, self_attention_masks
from sinkformers.conversion.hugging_face import NAME, PAST, from_config, is_causal_without_a_mask, stays_softmax
from sinkformers.conversion.hugging_face_cache import CarriesSums, carrier, refuse_counted
from sinkformers.conversion.hugging_face_masks import as_four_axes, capped_scores, masks_in_order, with_bias
from sinkformers.conversion.inline_masks import MASKED
from sinkformers.conversion.settings import Settings, is_softmax, settings_of
from sinkformers.distributed import refuse_in_parallel

# Arguments of attention functions that are not defined for Sinkhorn attention.
_REFUSED = ("s_aux", "cu_seq_lens_q", "cache")


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
        settings = _settings_by_name(module, query, key, is_causal)
        if settings is None:
            name = type(module).__name__
            refuse_in_parallel(name, "it stays SoftMax, and would attend to this rank's tokens alone.")
            options = {"scaling": scaling, "is_causal": is_causal, "position_bias": position_bias, **kwargs}
            return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, **options)
    if is_causal and settings.causal is None and not is_softmax(settings):
        raise NotImplementedError(
            f"sinkformers: {type(module).__name__} was called with is_causal=True, where Sinkhorn would let earlier "
            'outputs see later tokens. Convert it with causal="streaming" and a `select` that matches it, or leave it '
            "out with `select`."
        )
    _refuse_features(module, settings, kwargs)
    all_visible = False
    if isinstance(attention_mask, Tensor) and attention_mask.is_floating_point():
        all_visible = hides_nothing(attention_mask, MASKED)
        if not all_visible and not is_softmax(settings):  # MarkupLM masks by −10,000
            attention_mask = attention_mask.masked_fill(attention_mask <= MASKED, -math.inf)
    options: dict[str, Any]
    if settings.causal is None:
        _refuse_unsaid_triangle(module, attention_mask, query.shape[-2])
        _refuse_lost_window(module, settings, attention_mask, key.shape[-2], kwargs.get("sliding_window"))
        four = as_four_axes(attention_mask)
        options, layer = {**self_attention_masks(four, query, key, all_visible=all_visible)}, None
    else:
        past, is_cross = _given_cache(module)
        if is_cross:
            _refuse_unsaid_triangle(module, attention_mask, query.shape[-2])
        is_causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal) and not is_cross
        if is_softmax(settings) and attention_mask is None and is_causal and getattr(past, "is_compileable", False):
            n = query.shape[-2]  # static caches have room for later tokens, and no mask for the first
            key, value = (x if n == 1 else x[..., :n, :] for x in (key, value))
        options = masks_in_order(attention_mask, query, key, is_causal, is_cross, kwargs.get("sliding_window"))
        if is_softmax(settings):  # nothing is counted, and static caches have keys after those of the queries
            options.pop("query_mask", None)
        layer = _find_sums(module, settings, past, query, key, is_cross)
        options["cache"] = None if layer is None else layer.sums
    grouped = key.shape[1] != query.shape[1]
    if kwargs.get("softcap") is not None:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        position_bias = capped_scores(query, key, scaling, kwargs["softcap"], position_bias)
        # Scores are those that the bias says, with no features of queries and keys.
        query, key, grouped = query[..., :0], key[..., :0], False
    if position_bias is not None:
        options = with_bias(options, position_bias, query, key)
    options |= {"scale": scaling, "enable_gqa": grouped, "need_weights": bool(kwargs.get("output_attentions"))}
    out, weights = attend(module, settings, query, key, value, dropout_p=dropout, **options)
    if layer is not None:
        layer.counted(query.shape[-2], has_graph=out.requires_grad)
    return out.transpose(1, 2).contiguous(), weights


def _settings_by_name(module: nn.Module, query: Tensor, key: Tensor, is_causal: bool | None) -> Settings | None:
    """Return the settings of a module that was not converted, of a model loaded by our name; None for SoftMax."""
    settings = from_config(module.config)
    if settings.causal is not None and not is_softmax(settings):
        raise ValueError(
            f'sinkformers: config.sinkhorn says causal="{settings.causal}", which attention chosen by name for the '
            "whole model cannot use, since it is not given the cache. Load the model without "
            f'attn_implementation="{NAME}", then to_sinkformer(model, **model.config.sinkhorn).'
        )
    if not hasattr(module, "is_causal"):
        raise ValueError(
            f'sinkformers: attn_implementation="{NAME}" was asked of a model whose '
            f"{type(module).__name__} has no attribute is_causal, so that a function chosen by name cannot tell "
            "whether it is causal. Load the model plainly and use to_sinkformer(model), which reads what masks it "
            "builds."
        )
    if is_causal or stays_softmax(module):
        _refuse_or_warn(module, bool(is_causal) or stays_softmax(module) == CAUSAL)
        return None
    if query.shape[-2] != key.shape[-2] and not is_softmax(settings):
        raise ValueError(
            f"sinkformers: {type(module).__name__} looks like cross-attention ({query.shape[-2]} queries, "
            f'{key.shape[-2]} keys), and attn_implementation="{NAME}" is for self-attention. Load the model '
            "without it, and choose with to_sinkformer(model, select=…)."
        )
    return replace(settings, causal=None)


def _refuse_features(module: nn.Module, settings: Settings, kwargs: dict[str, Any]) -> None:
    for name in _REFUSED:
        if kwargs.get(name) is not None and not is_softmax(settings):
            raise NotImplementedError(
                f"sinkformers: {type(module).__name__} asks for {name}, which Sinkhorn attention has no definition of. "
                "Load the model plainly: to_sinkformer(model) leaves such modules SoftMax, and says so."
            )


def _refuse_unsaid_triangle(module: nn.Module, mask: Any, n: int) -> None:
    """Raise if the original module would be causal in this call only because it does not say that it is not."""
    by_name = UNDO not in module.__dict__
    if mask is None and n > 1 and not by_name and is_causal_without_a_mask(module):
        raise NotImplementedError(
            f"sinkformers: {type(module).__name__} was called without a mask and has no attribute is_causal. "
            "transformers makes it causal then, except with eager attention, though the model builds no causal mask. "
            'Load the model with attn_implementation="eager" before converting it, or pass an attention mask.'
        )


def _refuse_lost_window(module: nn.Module, settings: Settings, mask: Any, m: int, window: int | None) -> None:
    """Raise if a module asks for a window that its mask does not show, as flash attention's masks do not."""
    shown = isinstance(mask, Tensor) and mask.dim() > 2
    if window is not None and window < m and not shown and not is_softmax(settings):
        raise NotImplementedError(
            f"sinkformers: {type(module).__name__} asks for a window of {window} tokens, which its mask does not show. "
            'Load the model with attn_implementation="sdpa" before converting it.'
        )


def _given_cache(module: nn.Module) -> tuple[Any, bool]:
    """Return the cache that the module was given in this call, or None, and whether it attends to a source."""
    past = module.__dict__.get(PAST)
    if past is None:
        return None, undo_of(module).state.is_cross
    del module.__dict__[PAST]
    return past


def _find_sums(
    module: nn.Module, settings: Settings, past: Any, query: Tensor, key: Tensor, is_cross: bool
) -> CarriesSums | None:
    """Return the layer of the cache that carries the module's column sums; None without a cache, or with SoftMax."""
    if is_softmax(settings):
        if past is not None:
            refuse_counted(module, settings, past, is_cross=is_cross)
        return None
    if past is not None:
        return carrier(module, settings, past, query, key, is_cross=is_cross)
    if not is_cross:
        refuse_unknown_cache(module, settings, query.shape[-2], key.shape[-2])
    return None


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
            "Sinkhorn would let earlier outputs see later tokens. Load it plainly and use to_sinkformer(model, "
            'causal="streaming"), or to_sinkformer(model) if another part of a larger model was meant.'
        )
    if causal and not config.is_encoder_decoder and not module.__dict__.get(WARNED):
        module.__dict__[WARNED] = True
        warnings.warn(
            f'sinkformers: attn_implementation="{NAME}" was asked of a {config.model_type}, whose '
            f"{type(module).__name__} is causal and stays SoftMax. If it is not part of a model with bidirectional "
            "self-attention, nothing here is Sinkhorn: watch_attention(model) raises then.",
            stacklevel=3,
        )
