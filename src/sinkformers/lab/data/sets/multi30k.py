"""Multi30k, task 1 (Elliott et al. 2016): captions of photographs in German and English, 29,000 training pairs."""

from __future__ import annotations

from pathlib import Path

from sinkformers.lab.data.error import DataError
from sinkformers.lab.data.formats.lines import read_pairs
from sinkformers.lab.data.store.data_set import DataSet, list_files
from sinkformers.lab.data.store.folder import AnyPath, path_of
from sinkformers.lab.data.texts import Pairs, PairSet

PARTS = {"train": 29_000, "val": 1_014, "test_2016_flickr": 1_000, "test_2017_flickr": 1_000, "test_2017_mscoco": 461}
FETCH = "run sinkformers data fetch multi30k"
CHECKSUMS = """
9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8  22890 test_2016_flickr.de.gz
611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9  21077 test_2016_flickr.en.gz
a2c89666db00c495cd8513b9d708d5a3acc205d7de312ef2bf5fb7ebc1540aee  21471 test_2017_flickr.de.gz
76a444ee25172e72695cddb13ae4a3bda59430617be88e0bb46b60504f054074  19138 test_2017_flickr.en.gz
799e4854c25d601cb6cb6be29eabe5667734c61ace2f495e03e429031a0bc338  10230 test_2017_mscoco.de.gz
aab300bfb4427697987e02cd0aacd44bfe8aa50456231b6474c08038bbed2b58   8844 test_2017_mscoco.en.gz
726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6 637044 train.de.gz
d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f 568929 train.en.gz
f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a  24681 val.de.gz
14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28  21650 val.en.gz
"""

DATA_SET = DataSet(
    "multi30k",
    title="Multi30k, task 1: 29,000 German–English sentence pairs",
    licence="research and education, not commercial; derived from Flickr30K",
    by_hand="get the files from https://github.com/multi30k/dataset and put them into multi30k/data/task1/raw/",
    files=list_files(
        "multi30k/data/task1/raw",
        CHECKSUMS,
        urls=("https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw/{name}",),
    ),
)


def load_multi30k(folder: AnyPath) -> PairSet:
    """Load the German–English pairs below the data folder `folder`, as published: cased and not tokenised."""
    folder = path_of("load_multi30k", "folder", folder)
    train, valid, *tests = (_part(folder, part, size) for part, size in PARTS.items())
    return PairSet(train, valid, dict(zip(list(PARTS)[2:], tests, strict=True)), "de", "en", "multi30k")


def _part(folder: Path, part: str, size: int) -> Pairs:
    source, target = (_find(folder, f"{part}.{language}.gz") for language in ("de", "en"))
    pairs = read_pairs(source, target, FETCH)
    if len(pairs.source) != size:
        raise DataError(f"{source} has {len(pairs.source):,} lines instead of {size:,}; delete it and {FETCH}.")
    return pairs


def _find(folder: Path, name: str) -> Path:
    file = DATA_SET.file(name)
    if found := file.locate(folder):
        return found
    raise DataError(
        f"multi30k: there is no {file.path} in {folder}; {FETCH}, or name the folder above multi30k with --data."
    )
