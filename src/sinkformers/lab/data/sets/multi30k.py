"""Multi30k, task 1 (Elliott et al. 2016): captions of photographs in German and English, 29,000 pairs to train on."""

from __future__ import annotations

from pathlib import Path

from sinkformers.lab.data.error import DataError
from sinkformers.lab.data.formats.lines import read_pairs
from sinkformers.lab.data.store.catalogue import find_data_set
from sinkformers.lab.data.store.folder import AnyPath, path_of
from sinkformers.lab.data.texts import Pairs, PairSet

PARTS = {"train": 29_000, "val": 1_014, "test_2016_flickr": 1_000, "test_2017_flickr": 1_000, "test_2017_mscoco": 461}
FETCH = "run sinkformers data fetch multi30k"


def load_multi30k(folder: AnyPath) -> PairSet:
    """German to English below the data folder `folder`, as published: cased and not tokenised."""
    folder = path_of("load_multi30k", "folder", folder)
    train, valid, *tests = (_part(folder, part, size) for part, size in PARTS.items())
    return PairSet(train, valid, dict(zip(list(PARTS)[2:], tests, strict=True)), "de", "en", "multi30k")


def _part(folder: Path, part: str, size: int) -> Pairs:
    source, target = (_find(folder, f"{part}.{language}.gz") for language in ("de", "en"))
    pairs = read_pairs(source, target, FETCH)
    if len(pairs.source) != size:
        raise DataError(f"{source} has {len(pairs.source):,} lines where Multi30k has {size:,}; delete it and {FETCH}.")
    return pairs


def _find(folder: Path, name: str) -> Path:
    file = find_data_set("multi30k").file(name)
    if found := file.locate(folder):
        return found
    raise DataError(
        f"multi30k: there is no {file.path} in {folder}; {FETCH}, or name the folder above multi30k with --data."
    )
