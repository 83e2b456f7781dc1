"""IWSLT'14, German to English, as fairseq's `prepare-iwslt14.sh` leaves it: tokenised by Moses' script, in lower case,
and cut into pieces of words; `@@ ` marks a piece that the next one continues."""

from __future__ import annotations

from pathlib import Path

from sinkformers.lab.data.error import DataError
from sinkformers.lab.data.formats.lines import read_pairs
from sinkformers.lab.data.store.catalogue import find_data_set
from sinkformers.lab.data.store.folder import AnyPath, path_of
from sinkformers.lab.data.texts import Pairs, PairSet

TRAIN = 160_239
PARTS = {"valid": 7_283, "test": 6_750}
BY_HAND = f"{find_data_set('iwslt14').by_hand} of the data folder"


def load_iwslt14(folder: AnyPath) -> PairSet:
    """The sentences below the data folder `folder`, in pieces as they are in the files.

    Validation and test must be complete. A training part of another size than fairseq's is taken, and said to be that.
    """
    folder = path_of("load_iwslt14", "folder", folder)
    train, valid, test = (_part(folder, part) for part in ("train", *PARTS))
    partial = f"{len(train.source):,} of {TRAIN:,} training pairs" if len(train.source) != TRAIN else ""
    return PairSet(train, valid, {"test": test}, "de", "en", "iwslt14", partial)


def _part(folder: Path, part: str) -> Pairs:
    entry = find_data_set("iwslt14")
    source, target = (folder / entry.file(f"{part}.{language}").path for language in ("de", "en"))
    for file in (source, target):
        if not file.exists():
            raise DataError(f"iwslt14: there is no {file}; {BY_HAND}.")
    pairs = read_pairs(source, target, BY_HAND)
    expected = PARTS.get(part, len(pairs.source))
    if len(pairs.source) != expected:
        raise DataError(
            f"{source} has {len(pairs.source):,} lines where fairseq's script makes {expected:,}; {BY_HAND}."
        )
    return pairs
