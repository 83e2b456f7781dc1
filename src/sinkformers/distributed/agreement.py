"""What the ranks tell each other at the start of a call: sizes, the seed of dropout, and that all mean the same call.

One exchange of a few whole numbers. Where they differ, a second exchange finds what to say, and every rank raises.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from sinkformers.distributed.ranks import Ranks

_FAILED = "this rank raised"


class Header(NamedTuple):
    """What ranks may differ in."""

    queries: int  # tokens of this rank
    keys: int
    seed: int  # of dropout; that of rank 0 counts
    has_masks: int  # of tokens
    has_matrix: int  # a mask or a bias of entries
    mask_rows: int  # of that
    mask_columns: int
    mask_gradient: int  # whether it needs one


def agree(
    ranks: Ranks, settings: Mapping[str, Any], header: Header, device: torch.device, error: Exception | None = None
) -> list[Header]:
    """The headers of all ranks, which must have equal settings.

    Args:
        error: why this rank cannot make the call. Then it raises that, and all others say which rank did.

    Raises:
        ValueError: on every rank, with the settings that differ.
    """
    text = f"{_FAILED}\n{type(error).__name__}: {error}" if error else "\n".join(f"{k}={settings[k]}" for k in settings)
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    every = ranks.numbers([digest, int(error is not None), *header], device, "sizes and settings")
    if error is None and len({digest for digest, *_ in every}) == 1:
        return [Header(*numbers) for _, _, *numbers in every]
    texts = ranks.texts(text, device, "the settings of a call")
    if error is not None:
        raise error
    failed = [(rank, text.split("\n", 1)[1]) for rank, text in enumerate(texts) if text.startswith(_FAILED)]
    if failed:
        raise RuntimeError(f"{ranks.caller}: rank {failed[0][0]} of {ranks.size} raised {failed[0][1]}")
    raise ValueError(
        f"{ranks.caller}: all ranks of a group must make the same call; got {_differences(texts)}. Only the numbers of "
        "tokens and the masks may differ."
    )


def _differences(texts: list[str]) -> str:
    calls = [dict(line.split("=", 1) for line in text.split("\n")) for text in texts]
    names = list(dict.fromkeys(name for call in calls for name in call))
    return ", and ".join(
        f"{name} = " + ", ".join(f"{call.get(name, 'missing')} on rank {rank}" for rank, call in enumerate(calls))
        for name in names
        if len({call.get(name) for call in calls}) > 1
    )
