"""Words for the names of settings and facts that records hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# A setting as it is written after the name of a model, by its value; {} is the value.
SETTINGS: dict[str, Any] = {
    "batch": "batches of {}",
    "causal": {"streaming": "causal, streaming", "prefix": "causal, prefix"},
    "epochs": "{} epochs",
    "length": "{} tokens",
    "patch": "patches of {}",
    "port": {True: "as in the authors' code", False: ""},
    "positions": "{} positions",
    "rate": "rate {}",
    "readout": {"cls": "CLS token", "mean": "mean of the tokens"},
    "tau": {"learned": "learned tau"},
    "tie_qk": {True: "W_Q = W_K", False: ""},
}

# A fact about the runs: its name, and words for some of its values.
FACTS: dict[str, tuple[str, Mapping[Any, str]]] = {
    "accumulate": ("parts that a batch is split into", {}),
    "batch": ("examples in a batch", {}),
    "commit": ("version of the source", {}),
    "crop": ("area of random crops", {"null": "no random crops"}),
    "depth": ("layers", {}),
    "dim": ("width", {}),
    "drops": ("the rate is divided by ten after epochs", {"[]": "none"}),
    "finished": ("finished", {}),
    "head_dim": ("width of a head", {}),
    "hidden": ("width of the feed-forward networks", {}),
    "image": ("side of an image, in pixels", {}),
    "length": ("longest text, in tokens", {}),
    "mlp_dim": ("width of the feed-forward networks", {"0": "no feed-forward networks"}),
    "patch": ("side of a patch, in pixels", {}),
    "precision": (
        "precision",
        {"no": "float32", "bf16": "bfloat16, mixed with float32", "fp16": "float16, mixed with float32"},
    ),
    "processes": ("processes per run", {}),
    "rate": ("learning rate", {}),
    "readout": ("read out at", SETTINGS["readout"]),
    "resumed": ("times that a run was resumed", {}),
    "threads": ("threads per process", {}),
    "tie_qk": ("W_Q = W_K", {"false": "no", "true": "yes"}),
}


def setting(name: str, value: Any) -> str:
    """Return one setting as text; empty where its value is what one expects."""
    words = SETTINGS.get(name, {})
    if isinstance(words, str):
        return words.format(value)
    found = words.get(value) if isinstance(value, str | bool) else None
    return f"{name.replace('_', ' ')} {value}" if found is None else found


def fact(name: str, value: str) -> tuple[str, str]:
    """Return the name of a fact about the runs, and its value, in words."""
    words, values = FACTS.get(name, (name.replace("_", " "), {}))
    return words, values.get(value, value)


def fact_text(name: str, value: Any) -> str:
    """Return the value of a fact as text."""
    if name == "data" and isinstance(value, Mapping) and {"name", "train", "test"} <= value.keys():
        rest = {key: each for key, each in value.items() if key not in ("name", "train", "test")}
        sizes = f"{value['name']}: {value['train']} for training, {value['test']} for testing"
        return f"{sizes}, {_plain(rest)}" if rest else sizes
    if name == "machine" and isinstance(value, Mapping) and value.keys() == {"cpu", "cores"}:
        return f"{value['cpu']}, {value['cores']} cores"
    return _plain(value)


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(each)}" for name, each in value.items())
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
