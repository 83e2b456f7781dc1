"""The page of a view: one HTML document with its style, its scripts and its data, which loads nothing."""

import base64
import hashlib
import html
import json
import math
import re
from importlib import resources
from typing import TYPE_CHECKING, Any

from sinkformers.viewing.codes import Codes, encode
from sinkformers.viewing.recorder import Head, Layer

if TYPE_CHECKING:
    from sinkformers.viewing.view import AttentionView, ShownModel

MOST_BYTES = 14_000_000  # of all scores: less than 20 MB as base64, with the rest of the page
# In the order in which they are joined: each imports from those before it.
SCRIPTS = (
    "sinkhorn.js",
    "streaming.js",
    "data.js",
    "statistics.js",
    "colours.js",
    "labels.js",
    "surfaces.js",
    "state.js",
    "dom.js",
    "tables.js",
    "head_picture.js",
    "subject.js",
    "sentence.js",
    "image.js",
    "points.js",
    "overview.js",
    "details.js",
    "controls.js",
    "export.js",
    "panel.js",
    "main.js",
)
_MODULE_SYNTAX = re.compile(r"^import [^;]*;\n|^export (?=(?:async )?(?:function|const|class)\b)", re.MULTILINE)


def page(view: "AttentionView") -> str:
    """Return the document. Its policy allows its own scripts and style, by their hashes, and no connection."""
    script, style = bundle(), _asset("style.css")
    data = _script_safe(json.dumps(payload(view), ensure_ascii=True, allow_nan=False, separators=(",", ":")))
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {"TITLE": html.escape(view.title), "POLICY": policy, "STYLE": style, "SCRIPT": script, "DATA": data}
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda found: parts[found[1]], _asset("page.html"))


def bundle() -> str:
    """Return all scripts as one module: imports between them are dropped, since all names are in one scope."""
    return "\n" + "\n".join(_MODULE_SYNTAX.sub("", _asset(name)) for name in SCRIPTS)


def payload(view: "AttentionView") -> dict[str, Any]:
    """Return the data of the page, as `data.js` reads it."""
    kept, bits = _fitting(view.models)
    n_heads = sum(len(layer.heads) for model in view.models for layer in model.layers)
    n_kept = sum((layer.number, head.number) in kept for _, layer, head in _each(view.models))
    chunks: list[bytes] = []
    models = [_model(model, kept, bits, chunks) for model in view.models]
    return {
        "title": view.title,
        "tokens": view.tokens,
        "subject": view.subject,
        "bits": bits,
        "left_out": n_heads - n_kept,
        "models": models,
        "scores": base64.b64encode(b"".join(chunks)).decode("ascii"),
    }


def _each(models: "tuple[ShownModel, ...]") -> list[tuple[str, Layer, Head]]:
    return [(model.name, layer, head) for model in models for layer in model.layers for head in layer.heads]


def _fitting(models: "tuple[ShownModel, ...]") -> tuple[set[tuple[int, int]], int]:
    """Return the numbers (layer, head) of the heads that fit, the least even ones first, and the bits of a score."""
    sizes: dict[tuple[int, int], int] = {}
    unevenness: dict[tuple[int, int], float] = {}
    for _, layer, head in _each(models):
        place = layer.number, head.number
        sizes[place] = sizes.get(place, 0) + head.codes.codes.numel()
        unevenness[place] = max(unevenness.get(place, 0.0), head.unevenness)
    bits = 16 if 2 * sum(sizes.values()) <= MOST_BYTES else 8
    kept, total = set(), 0
    for place in sorted(sizes, key=lambda place: -unevenness[place]):
        total += sizes[place] * bits // 8
        if total <= MOST_BYTES or not kept:
            kept.add(place)
    return kept, bits


def _model(model: "ShownModel", kept: set[tuple[int, int]], bits: int, chunks: list[bytes]) -> dict[str, Any]:
    layers = []
    for layer in model.layers:
        heads = [_head(head, bits, chunks) for head in layer.heads if (layer.number, head.number) in kept]
        if heads:
            shape = {"rows": layer.rows, "columns": layer.columns, "shape": layer.shape}
            layers.append(
                {"number": layer.number, "name": layer.name, "definition": layer.definition, **shape, "heads": heads}
            )
    return {"name": model.name, "notes": model.notes, "layers": layers}


def _head(head: Head, bits: int, chunks: list[bytes]) -> dict[str, Any]:
    codes = head.codes if bits == head.codes.bits else _coarser(head.codes, bits)
    start = sum(map(len, chunks))
    chunks.append(codes.bytes())
    n_iters = "inf" if head.n_iters == math.inf else head.n_iters
    settings = {"n_iters": n_iters, "tau": head.tau, "uneven": head.unevenness}
    return {"number": head.number, "start": start, "low": codes.low, "step": codes.step, **settings}


def _coarser(codes: Codes, bits: int) -> Codes:
    return encode(codes.scores(), bits)


def _asset(name: str) -> str:
    return (resources.files("sinkformers.viewing") / "assets" / name).read_text(encoding="utf-8")


def _hash(source: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode("utf-8")).digest()).decode("ascii")


def _script_safe(text: str) -> str:
    """Return JSON that no HTML parser can take for the end of its script element, or for the start of a comment."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
