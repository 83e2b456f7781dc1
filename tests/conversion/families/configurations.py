"""Small random models of a family of transformers: configurations are made by shrinking the numbers of the default one.

A family is a folder of `transformers.models`. Nothing about a family is written down here: layers, widths, heads, sizes
of images and vocabularies are recognised by the names that the library gives them.
"""

import copy
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

LARGEST = 30_000_000  # parameters of a model that is built
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "cls_token_id", "sep_token_id")

_LAYERS = re.compile(
    r"(^|_)(n_|num_)?(hidden_|conv_|encoder_|decoder_|dec_|enc_)*layers?$|^depth$|num_blocks$|_depth$|attends_per_block$"
)
_HEADS = re.compile(r"heads?$")
_KEY_HEADS = re.compile(r"key_value_heads$|kv_heads$|^multi_query_group_num$")
_HEAD_WIDTH = re.compile(r"head_dim$|^d_kv$|head_size$|^d_head$|kv_channels$")
_INNER = re.compile(r"intermediate|ffn|^d_inner$|^d_ff$|feed_?forward|inner_dim|mlp_dim|^n_inner$")
_WIDTH = re.compile(
    r"hidden_(size|dim)$|^d_model$|^n_embd$|^dim$|embed_?dim$|^width$|embedding_size$|projection_dim$|emb_dim$|^d_latents$"
)
_POSITIONS = re.compile(r"^max_.*position|^n_positions$|^n_ctx$|^max_seq_len|^context_length$")
_LARGEST = {"max_img_size": 64, "visual_prompt_size": 8, "resolution": 64, "base_channels": 32}
_LIST_DEPTHS = re.compile(r"depth|layers|blocks$")
_LIST_WIDTHS = re.compile(r"hidden_sizes|dims?$|channels$|widths?$")


def families() -> list[str]:
    """Return the names of all families that have modeling code."""
    found = []
    for each in pkgutil.iter_modules(transformers.models.__path__):
        if each.ispkg and not each.name.startswith(("auto", "deprecated")):
            found.append(each.name)
    return sorted(found)


def model_classes(family: str) -> list[type[PreTrainedModel]]:
    """Return the models of a family: those without a head first, in the order of their definition."""
    package = importlib.import_module(f"transformers.models.{family}")
    found: list[type[PreTrainedModel]] = []
    for each in pkgutil.iter_modules(package.__path__):
        if not each.name.startswith("modeling_"):
            continue
        module = importlib.import_module(f"{package.__name__}.{each.name}")
        for name, kind in vars(module).items():
            if not inspect.isclass(kind) or not issubclass(kind, PreTrainedModel) or kind.__module__ != module.__name__:
                continue
            if kind.config_class is not None and "PreTrained" not in name and kind not in found:
                found.append(kind)
    main = family.replace("_", "")
    return sorted(
        found, key=lambda kind: (kind.__name__.lower() != f"{main}model", not kind.__name__.endswith("Model"))
    )


def small_models(kind: type[PreTrainedModel], problems: list[str]) -> Iterator[PreTrainedModel]:
    """Yield models of a class, each by another way of shrinking; those that cannot be built become problems."""
    for widths in ("fixed", "divided", "images", "kept"):
        for parts in ("objects", "dictionaries"):
            try:
                config = kind.config_class(**_smaller(kind.config_class(), widths, parts, {}))
                if _size(kind, config) > LARGEST:
                    problems.append(f"{kind.__name__}: more than {LARGEST:,} parameters"[:200])
                    continue
                torch.manual_seed(0)
                model = kind(config)
            except Exception as error:  # what a class does not accept is not known before
                problems.append(f"{kind.__name__}: {type(error).__name__}: {error}"[:200])
                continue
            if sum(parameter.numel() for parameter in model.parameters()) <= LARGEST:
                yield model.eval()
                break


def _size(kind: type[PreTrainedModel], config: PreTrainedConfig) -> int:
    """Return the number of parameters, without making them; 0 where a model cannot be built without values."""
    try:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in kind(copy.deepcopy(config)).parameters())
    except Exception:
        return 0


def _smaller(config: PreTrainedConfig, widths: str, parts: str, tokens: dict[str, int]) -> dict[str, Any]:
    """Return the arguments of a configuration with smaller numbers; `tokens` numbers those that are special."""
    smaller: dict[str, Any] = {}
    values = {key: value for key, value in vars(config).items() if not key.startswith("_")}
    lists = any(_HEADS.search(key) and isinstance(value, list) for key, value in values.items())
    for key, value in values.items():
        if isinstance(value, transformers.TimmBackboneConfig | transformers.SwinConfig) and key == "backbone_config":
            smaller[key] = _resnet(len(value.out_indices or ()) or 1)
        elif isinstance(value, PreTrainedConfig):
            inner = _smaller(value, widths, parts, tokens)
            smaller[key] = type(value)(**inner) if parts == "objects" else {"model_type": value.model_type, **inner}
        elif key.endswith(("token_id", "token_index")) and type(value) is int:
            smaller[key] = TOKENS.index(key) if key in TOKENS else tokens.setdefault(key, 6 + len(tokens))
        elif key == "vocab_size" and value is None:
            smaller[key] = 33
        elif _KEY_HEADS.search(key) and "kv_lora_rank" in values and type(value) is int:
            smaller[key] = min(value, 4)  # as many as heads of queries
        elif type(value) is int:
            smaller[key] = _smaller_number(key, value, "divided" if lists and widths == "fixed" else widths)
        elif key in ("rope_parameters", "rope_scaling") and "mrope_section" in (value or {}):
            smaller[key] = value | {"mrope_section": [1, 1, 2]}
        elif isinstance(value, list | tuple) and value and all(type(each) is int for each in value):
            smaller[key] = type(value)(_smaller_list(key, list(value), widths))
    return {key: value for key, value in smaller.items() if key == "model_type" or value != values[key]}


def _resnet(outputs: int) -> PreTrainedConfig:
    """Return a small backbone that needs no other library, with so many outputs."""
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 1, 1], "layer_type": "basic"}
    return transformers.ResNetConfig(**sizes, out_features=[f"stage{number}" for number in range(1, 5)][-outputs:])


def _smaller_number(key: str, value: int, widths: str) -> int:
    if "vocab_size" in key:
        return min(value, 99) if value > 30 else value
    if _POSITIONS.search(key):
        return min(value, 128)
    if _LAYERS.search(key) and "feat_extract" not in key and "conv" not in key:
        return min(value, 2)
    if key in _LARGEST:
        return min(value, _LARGEST[key])
    if key in ("image_size", "patch_size") and widths in ("fixed", "divided"):
        return min(value, {"image_size": 32, "patch_size": 8}[key])
    if key in ("num_queries", "num_query_tokens", "num_latents"):
        return min(value, 8)
    if widths == "kept":
        return value
    if widths != "fixed":
        return max(value // 4, min(value, 4)) if _WIDTH.search(key) or _INNER.search(key) else value
    sizes = ((_KEY_HEADS, 2), (_HEADS, 4), (_HEAD_WIDTH, 8), (_INNER, 40), (_WIDTH, 32))
    return min(value, next((size for pattern, size in sizes if pattern.search(key)), value))


def _smaller_list(key: str, value: list[int], widths: str) -> list[int]:
    if key == "image_size" and widths in ("fixed", "divided"):
        return [min(each, 32) for each in value]
    if _LIST_DEPTHS.search(key) and max(value) <= 50 and not re.search("heads|ids|indices|conv", key):
        return [min(each, 1 if len(value) > 3 else 3) for each in value]
    if _LIST_WIDTHS.search(key) and widths != "kept" and min(value) >= 16:
        return [max(each // 8, 4) for each in value]
    return value
