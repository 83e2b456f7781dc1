"""Small random models of a family of transformers: configurations are made by shrinking the numbers of the default one.

A family is a folder of `transformers.models`. Nothing about a family is written down here: layers, widths, heads, sizes
of images and vocabularies are recognised by the names that the library gives them.
"""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

LARGEST = 60_000_000  # parameters of a model that is built
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "cls_token_id", "sep_token_id")

_LAYERS = re.compile(r"(^|_)(n_|num_)?(hidden_|conv_|encoder_|decoder_|dec_|enc_)*layers?$|^depth$|num_blocks$|_depth$")
_HEADS = re.compile(r"heads?$")
_KEY_HEADS = re.compile(r"key_value_heads$|kv_heads$|^multi_query_group_num$")
_HEAD_WIDTH = re.compile(r"head_dim$|^d_kv$|head_size$|^d_head$|kv_channels$")
_INNER = re.compile(r"intermediate|ffn|^d_inner$|^d_ff$|feed_?forward|inner_dim|mlp_dim|^n_inner$")
_WIDTH = re.compile(
    r"hidden_(size|dim)$|^d_model$|^n_embd$|^dim$|embed_?dim$|^width$|embedding_size$|projection_dim$|emb_dim$"
)
_POSITIONS = re.compile(r"^max_.*position|^n_positions$|^n_ctx$|^max_seq_len|^context_length$")
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
            if inspect.isclass(kind) and issubclass(kind, PreTrainedModel) and kind.__module__ == module.__name__:
                if kind.config_class is not None and "PreTrained" not in name and name not in map(_name, found):
                    found.append(kind)
    main = family.replace("_", "")
    return sorted(
        found, key=lambda kind: (kind.__name__.lower() != f"{main}model", not kind.__name__.endswith("Model"))
    )


def _name(kind: type) -> str:
    return kind.__name__


def small_models(kind: type[PreTrainedModel]) -> Iterator[PreTrainedModel]:
    """Yield models of a class, each by another way of shrinking; those that cannot be built are left out."""
    for widths in ("fixed", "divided", "kept"):
        try:
            config = kind.config_class(**_smaller(kind.config_class(), widths, family_tokens={}))
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in kind(config).parameters())
        except Exception:
            size = None  # some models cannot be built without values
        if size is not None and size > LARGEST:
            continue
        try:
            config = kind.config_class(**_smaller(kind.config_class(), widths, family_tokens={}))
            torch.manual_seed(0)
            model = kind(config)
        except Exception:
            continue
        if sum(parameter.numel() for parameter in model.parameters()) <= LARGEST:
            yield model.eval()


def _smaller(config: PreTrainedConfig, widths: str, family_tokens: dict[str, int]) -> dict[str, Any]:
    """Return the arguments of a configuration with smaller numbers."""
    smaller: dict[str, Any] = {}
    values = {key: value for key, value in vars(config).items() if not key.startswith("_")}
    divides = widths == "divided" or any(
        _HEADS.search(key) and isinstance(value, list) for key, value in values.items()
    )
    for key, value in values.items():
        if isinstance(value, PreTrainedConfig):
            smaller[key] = _smaller(value, widths, family_tokens)
        elif key.endswith("token_id") or key.endswith("token_index"):
            if isinstance(value, int) and not isinstance(value, bool):
                smaller[key] = (
                    TOKENS.index(key) if key in TOKENS else family_tokens.setdefault(key, 6 + len(family_tokens))
                )
        elif isinstance(value, bool) or value is None:
            continue
        elif isinstance(value, int):
            new = _smaller_number(key, value, widths, divides)
            if new is not None:
                smaller[key] = new
        elif isinstance(value, list | tuple) and value and all(type(each) is int for each in value):
            new = _smaller_list(key, list(value), widths)
            if new is not None:
                smaller[key] = type(value)(new)
    return smaller


def _smaller_number(key: str, value: int, widths: str, divides: bool) -> int | None:
    if "vocab_size" in key:
        return min(value, 99) if value > 30 else None
    if _POSITIONS.search(key):
        return min(value, 128)
    if _LAYERS.search(key):
        return min(value, 2)
    if key == "image_size":
        return min(value, 32 if widths != "kept" else 64)
    if key == "patch_size":
        return min(value, 8) if widths != "kept" else None
    if key in ("num_queries", "num_query_tokens"):
        return min(value, 8)
    if widths == "kept":
        return None
    if divides:
        if _WIDTH.search(key) or _INNER.search(key):
            return max(value // 4, 4)
        return None
    if _KEY_HEADS.search(key):
        return min(value, 2)
    if _HEADS.search(key):
        return min(value, 4)
    if _HEAD_WIDTH.search(key):
        return 8
    if _INNER.search(key):
        return min(value, 40)
    return 32 if _WIDTH.search(key) else None


def _smaller_list(key: str, value: list[int], widths: str) -> list[int] | None:
    if key == "image_size":
        return [min(each, 32) for each in value]
    if (
        _LIST_DEPTHS.search(key)
        and max(value) <= 50
        and "heads" not in key
        and "ids" not in key
        and "indices" not in key
    ):
        return [min(each, 1 if len(value) > 3 else 2) for each in value]
    if _LIST_WIDTHS.search(key) and widths != "kept" and min(value) >= 16:
        return [max(each // 8, 4) for each in value]
    return None
