"""BLEU by sacrebleu, with the signature of its settings."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from sinkformers.lab.artefacts.artefact import ExperimentError


class Bleu(NamedTuple):
    score: float  # 0 to 100
    signature: str


def bleu(written: Sequence[str], references: Sequence[str], *, tokenised: bool = False) -> Bleu:
    """Return BLEU of translations against one reference each.

    Plain text is tokenised by sacrebleu's `13a`. If `tokenised`, words are already separated by spaces; such scores are
    comparable only with those of the same tokeniser.
    """
    measure = _library().BLEU(tokenize="none" if tokenised else "13a", force=True)
    score = measure.corpus_score(list(written), [list(references)]).score
    return Bleu(score, str(measure.get_signature()))


def detokenised(text: str) -> str:
    """Undo Moses' tokeniser: `that &apos;s it , &quot; he said &quot; .` becomes `that's it, "he said".`"""
    text = re.sub(r" @(\S)@ ", r"\1", text)  # a hyphen within a word
    text = html.unescape(text).replace("``", '"').replace("''", '"')
    text = re.sub(r" (n't|'\w{1,2})\b", r"\1", text)
    text = re.sub(r" ([,.;:!?%)\]}…])", r"\1", text)
    text = re.sub(r"([(\[{$]) ", r"\1", text)
    parts = re.split(r' ?" ?', text)  # quotation marks open and close in turn
    joined = parts[0]
    for number, part in enumerate(parts[1:]):
        closes = number % 2 == 1
        before = "" if closes or not joined else " "
        after = " " if closes and part and part[0] not in ",.;:!?" else ""
        joined += f'{before}"{after}{part}'
    return joined


def _library() -> Any:
    try:
        from sacrebleu import metrics
    except ModuleNotFoundError as error:
        raise ExperimentError(
            "experiments with translation need sacrebleu; install it with pip install '.[experiments]' in your clone."
        ) from error
    return metrics
