"""Generated opinions of films, for runs without a download.

`not` and `never` negate the adjective after them, so that counting words is not enough.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from sinkformers.lab.data.images import stratified_split
from sinkformers.lab.data.texts import Texts, TextSet

if TYPE_CHECKING:
    from torch import Tensor

SUBJECTS = ("the plot", "the acting", "this film", "its music", "the ending", "every scene", "the script", "her role")
VERBS = ("was", "seemed")
ADVERBS = ("truly", "rather", "not", "never")
GOOD = ("brilliant", "moving", "clever", "charming", "superb", "funny", "fresh", "subtle")
BAD = ("dull", "clumsy", "boring", "awful", "shallow", "predictable", "silly", "weak")
FRAMES = ("{}.", "I saw it with my sister last week, and {}.")


def load_opinions() -> TextSet:
    """Load 2,048 opinions, half of them positive: 1,638 for training, 410 for testing, by a fixed stratified split."""
    import torch

    written, labels = [], []
    for frame, subject, verb, adverb, adjective in product(FRAMES, SUBJECTS, VERBS, ADVERBS, GOOD + BAD):
        written.append(frame.format(f"{subject} {verb} {adverb} {adjective}"))
        labels.append(int((adjective in GOOD) != (adverb in ("not", "never"))))
    train, test = stratified_split(torch.tensor(labels))

    def part(which: Tensor) -> Texts:
        return Texts([written[index] for index in which.tolist()], torch.tensor(labels)[which])

    return TextSet(part(train), part(test), ("neg", "pos"), "opinions")
