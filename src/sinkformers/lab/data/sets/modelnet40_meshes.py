"""ModelNet40 as Princeton's meshes: `ModelNet40/<class>/<train or test>/<name>.off` in a folder or a zip archive."""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sinkformers.lab.data.clouds import Clouds, PointSet, on_unit_sphere
from sinkformers.lab.data.error import DataError
from sinkformers.lab.data.formats.meshes import read_mesh, sample_surface
from sinkformers.lab.data.store.folder import AnyPath, path_of
from sinkformers.lab.data.store.progress import Progress, report_progress

if TYPE_CHECKING:
    from torch import Tensor

NAME = re.compile(r"(?:.*/)?([^/]+)/(train|test)/[^/]+\.off", re.IGNORECASE)
LARGEST_FILE = 512 * 2**20  # bytes; Princeton's largest is far smaller


class Shape(NamedTuple):
    """One file, and a function that reads it."""

    label: str
    part: str
    place: str
    read: Callable[[], bytes]


def load_modelnet40_meshes(
    source: AnyPath,
    points: int,
    *,
    seed: int = 0,
    expected: tuple[int, int] | None = None,
    progress: Progress = report_progress,
) -> PointSet:
    """Load shapes from the folder or zip archive `source`, each as `points` points on its surface, on the unit sphere.

    Any selection with training and test shapes is accepted, unless `expected` gives the number of each. The points of a
    shape depend only on the seed and on its position among the sorted names. The error for a file that is not a
    triangle mesh names that file.
    """
    source = path_of("load_modelnet40_meshes", "source", source)
    if source.is_dir():
        return _sampled(_counted(_scanned(source), source, expected), source, points, seed, progress)
    try:
        with zipfile.ZipFile(source) as archive:
            return _sampled(_counted(_listed(archive, source), source, expected), source, points, seed, progress)
    except (zipfile.BadZipFile, OSError) as error:
        raise DataError(
            f"{source} is neither a folder nor a readable zip archive ({error}); name the one that contains ModelNet40."
        ) from error


def _scanned(folder: Path) -> list[Shape]:
    found = ((path, NAME.fullmatch(path.as_posix())) for path in sorted(folder.rglob("*.off")))
    return [Shape(match[1], match[2].lower(), str(path), path.read_bytes) for path, match in found if match]


def _listed(archive: zipfile.ZipFile, source: Path) -> list[Shape]:
    def reader(info: zipfile.ZipInfo) -> Callable[[], bytes]:
        return lambda: archive.read(info)

    shapes = []
    for info in sorted(archive.infolist(), key=lambda info: info.filename):
        match = NAME.fullmatch(info.filename)
        if match and info.file_size > LARGEST_FILE:
            raise DataError(f"{info.filename} in {source} would unpack to {info.file_size:,} bytes; check its origin.")
        if match:
            shapes.append(Shape(match[1], match[2].lower(), f"{info.filename} in {source}", reader(info)))
    return shapes


def _counted(shapes: list[Shape], source: Path, expected: tuple[int, int] | None) -> list[Shape]:
    """Return the shapes, if there are as many as expected."""
    found = tuple(sum(shape.part == part for shape in shapes) for part in ("train", "test"))
    if expected is not None and found != expected:
        raise DataError(
            f"{source} contains {found[0]:,} training and {found[1]:,} test shapes instead of {expected[0]:,} and "
            f"{expected[1]:,}; get it again."
        )
    return shapes


def _sampled(shapes: list[Shape], source: Path, points: int, seed: int, progress: Progress) -> PointSet:
    import torch

    if {shape.part for shape in shapes} != {"train", "test"}:
        raise DataError(
            f"{source} has no files <class>/train/*.off and <class>/test/*.off; name the folder above them."
        )
    classes = tuple(sorted({shape.label for shape in shapes}))
    parts: dict[str, tuple[list[Tensor], list[int]]] = {"train": ([], []), "test": ([], [])}
    for index, shape in enumerate(shapes):
        generator = torch.Generator().manual_seed(1_000_003 * seed + index)
        mesh = read_mesh(_content(shape), "off", shape.place)
        clouds, labels = parts[shape.part]
        clouds.append(on_unit_sphere(sample_surface(mesh, points, generator, shape.place)))
        labels.append(classes.index(shape.label))
        progress("sampling meshes", index + 1, len(shapes))
    train, test = (Clouds(torch.stack(clouds), torch.tensor(labels)) for clouds, labels in parts.values())
    return PointSet(train, test, classes, "modelnet40-meshes")


def _content(shape: Shape) -> bytes:
    try:
        return shape.read()
    # RuntimeError: it is encrypted, or compressed by an unknown method.
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
        raise DataError(f"{shape.place} cannot be read ({error}); get it again.") from error
