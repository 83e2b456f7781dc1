"""What is known of each data set: its files, where they may be fetched, and what to do where they may not.

Sizes and checksums stand in `checksums.txt` beside this file, one line a file.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from sinkformers.lab.data.error import DataError
from sinkformers.lab.data.store.folder import AnyPath, path_of


@dataclass(frozen=True)
class DataFile:
    """One file of a set. `path` and `elsewhere` are relative to the data folder."""

    path: str
    size: int
    sha256: str
    urls: tuple[str, ...] = ()
    optional: bool = False
    varies: bool = False  # users have other versions that are as good; the checksum is that of one of them
    elsewhere: tuple[str, ...] = ()  # files or folders that serve in its place

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    def locate(self, folder: AnyPath) -> Path | None:
        """Where the file, or what serves in its place, lies below the data folder `folder`."""
        folder = path_of("DataFile.locate", "folder", folder)
        return next((folder / path for path in (self.path, *self.elsewhere) if (folder / path).exists()), None)


@dataclass(frozen=True)
class DataSet:
    """A set without files is embedded in an installed library. `by_hand` completes the sentence "…, and instead: …"."""

    name: str
    title: str
    licence: str
    by_hand: str = ""
    files: tuple[DataFile, ...] = ()

    def file(self, name: str) -> DataFile:
        return next(file for file in self.files if file.name == name)


def find_data_set(name: str) -> DataSet:
    """The entry called `name`, or an error that lists the names there are."""
    if isinstance(name, str) and name in CATALOGUE:
        return CATALOGUE[name]
    close = difflib.get_close_matches(str(name), CATALOGUE, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    raise DataError(f"there is no data set {name!r}; {meant}there are {', '.join(CATALOGUE)}.")


def _files(
    name: str,
    *,
    urls: Sequence[str] = (),
    elsewhere: Sequence[str] = (),
    optional: Sequence[str] = (),
    varies: Sequence[str] = (),
) -> tuple[DataFile, ...]:
    """The lines of `checksums.txt` below the folder `name`. In `urls` and `elsewhere`, {name} stands for a file's name
    and {stem} for that name without its suffix; `optional` and `varies` are patterns of names."""
    files = []
    for line in Path(__file__).with_name("checksums.txt").read_text(encoding="utf-8").splitlines():
        sha256, size, text = line.split()
        path = PurePosixPath(text)
        if path.parts[0] == name:
            file = DataFile(
                path=text,
                size=int(size),
                sha256=sha256,
                urls=tuple(url.format(name=path.name) for url in urls),
                optional=any(fnmatch(path.name, pattern) for pattern in optional),
                varies=any(fnmatch(path.name, pattern) for pattern in varies),
                elsewhere=tuple(place.format(name=path.name, stem=path.stem) for place in elsewhere),
            )
            files.append(file)
    return tuple(files)


CATALOGUE: dict[str, DataSet] = {
    entry.name: entry
    for entry in (
        DataSet(
            "mnist",
            title="MNIST: 70,000 handwritten digits, 28 × 28",
            licence="Y. LeCun and C. Cortes; commonly listed as CC BY-SA 3.0",
            by_hand="get the files from https://storage.googleapis.com/cvdf-datasets/mnist/ and put them into mnist/",
            files=_files(
                "mnist",
                urls=(
                    "https://ossci-datasets.s3.amazonaws.com/mnist/{name}",
                    "https://storage.googleapis.com/cvdf-datasets/mnist/{name}",
                ),
                elsewhere=(
                    "mnist/{stem}",
                    *(f"{raw}/{file}" for raw in ("mnist/MNIST/raw", "MNIST/raw") for file in ("{name}", "{stem}")),
                ),
            ),
        ),
        DataSet(
            "digits",
            title="1,797 handwritten digits, 8 × 8, embedded in scikit-learn",
            licence="E. Alpaydin and C. Kaynak, UCI; CC BY 4.0",
        ),
        DataSet(
            "dogs-vs-cats",
            title="Kaggle's Dogs vs. Cats: 25,000 photographs, or a selection",
            licence="Kaggle's competition rules; Asirra, Microsoft Research",
            by_hand="get train.zip from https://www.kaggle.com/c/dogs-vs-cats/data, which asks for a login, "
            "and put it into dogs-vs-cats/",
            files=_files("dogs-vs-cats", varies=("train.zip",), elsewhere=("dogs-vs-cats/train",)),
        ),
        DataSet(
            "modelnet40",
            title="ModelNet40: 12,311 shapes as point clouds",
            licence="academic research only (Princeton)",
            by_hand="get https://shapenet.cs.stanford.edu/media/modelnet40_ply_hdf5_2048.zip "
            "and put it into modelnet40/",
            files=_files(
                "modelnet40",
                optional=("*_id2file.json", "modelnet10_mini.npz", "ModelNet40_off_sample.zip"),
                elsewhere=(
                    "modelnet40/modelnet40_ply_hdf5_2048/{name}",
                    "modelnet40/modelnet40_ply_hdf5_2048.zip",
                    "modelnet40/modelnet40_hdf5_1024.zip",
                ),
            ),
        ),
        DataSet(
            "imdb",
            title="IMDb: 50,000 labelled film reviews",
            licence="research use, with citation (Maas et al. 2011)",
            by_hand="get aclImdb_v1.tar.gz from https://ai.stanford.edu/~amaas/data/sentiment/ and put it into imdb/",
            files=_files("imdb", elsewhere=("imdb/aclImdb_v1.tar.gz", "imdb/aclImdb")),
        ),
        DataSet(
            "iwslt14",
            title="IWSLT'14 German–English, as fairseq prepares it",
            licence="TED talks, WIT3; CC BY-NC-ND 4.0",
            by_hand="run fairseq's examples/translation/prepare-iwslt14.sh and put the folder iwslt14.tokenized.de-en "
            "that it makes into iwslt14/",
            files=_files("iwslt14", varies=("train.de", "train.en")),
        ),
        DataSet(
            "multi30k",
            title="Multi30k, task 1: 29,000 German–English sentence pairs",
            licence="research and education, not commercial; derived from Flickr30K",
            by_hand="get the files from https://github.com/multi30k/dataset and put them into multi30k/data/task1/raw/",
            files=_files(
                "multi30k",
                urls=("https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw/{name}",),
            ),
        ),
    )
}
