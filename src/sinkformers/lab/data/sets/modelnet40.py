"""ModelNet40 as point clouds, in the HDF5 files that it is commonly distributed in.

`modelnet40_ply_hdf5_2048` has 2,048 points a shape, and three training shapes fewer than Princeton's meshes;
`modelnet40_hdf5_1024` has 1,024 points and all shapes. Points lie uniformly on the surface, in random order, centred
and scaled to the unit sphere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sinkformers.lab.data.clouds import Clouds, PointSet
from sinkformers.lab.data.error import DataError, missing_library
from sinkformers.lab.data.sets.modelnet40_meshes import load_modelnet40_meshes
from sinkformers.lab.data.store.archives import unpack
from sinkformers.lab.data.store.catalogue import find_data_set
from sinkformers.lab.data.store.folder import AnyPath, path_of
from sinkformers.lab.data.store.progress import Progress, reported

BY_HAND = f"{find_data_set('modelnet40').by_hand} of the data folder"
MESHES = ("ModelNet40", "ModelNet40.zip")
N_CLASSES = 40
N_TRAIN, N_TEST = 9_843, 2_468


class Layout(NamedTuple):
    """A distribution: its folder, and how many shapes and points it has."""

    folder: str
    n_train: int
    n_points: int


# The one with more points first.
LAYOUTS = (Layout("modelnet40_ply_hdf5_2048", 9_840, 2_048), Layout("modelnet40_hdf5_1024", N_TRAIN, 1_024))


def load_modelnet40(folder: AnyPath, points: int | None = None, *, progress: Progress = reported) -> PointSet:
    """ModelNet40 below the data folder `folder`: all shapes, with all of their points or the first `points`.

    A distribution that is there as a zip archive is unpacked beside it first. Points are float32; float16 in the files
    is widened. What is damaged, or not complete, is refused. More points than the files have are drawn from Princeton's
    meshes, if `modelnet40/ModelNet40.zip` or the folder that it unpacks to is there.
    """
    folder = path_of("load_modelnet40", "folder", folder)
    if points is not None and points < 1:
        raise DataError(f"a shape must have at least one point; got {points}.")
    there = [layout for layout in LAYOUTS if _is_there(folder / "modelnet40" / layout.folder)]
    layout = next((layout for layout in there if points is None or layout.n_points >= points), None)
    if layout is None:
        return _drawn(folder, there, points, progress)
    place = folder / "modelnet40" / layout.folder
    classes = _classes(place / "shape_names.txt")
    train, test = (_part(place, part, layout, points or layout.n_points) for part in ("train", "test"))
    for part, clouds, expected in (("train", train, layout.n_train), ("test", test, N_TEST)):
        if len(clouds.labels) != expected:
            raise DataError(
                f"{place} holds {len(clouds.labels):,} shapes in its {part} files where it should have {expected:,}; "
                f"delete it and {BY_HAND}."
            )
    return PointSet(train, test, classes, "modelnet40")


def _is_there(place: Path) -> bool:
    archive = place.with_name(f"{place.name}.zip")
    if not place.is_dir() and archive.exists():
        unpack(archive, place)
    return place.is_dir()


def _drawn(folder: Path, there: list[Layout], points: int | None, progress: Progress) -> PointSet:
    """Points on the meshes."""
    place = folder / "modelnet40"
    meshes = next((place / name for name in MESHES if (place / name).exists()), None)
    if meshes is None and there:
        most = max(layout.n_points for layout in there)
        raise DataError(
            f"{place} has {most:,} points a shape, and {points:,} are asked for; get Princeton's ModelNet40.zip "
            f"(https://modelnet.cs.princeton.edu), put it into {place}, and they are drawn from its meshes."
        )
    if meshes is None:
        names = " nor ".join(layout.folder for layout in LAYOUTS)
        raise DataError(f"modelnet40: there is neither {names} in {place}; {BY_HAND}.")
    wanted = LAYOUTS[0].n_points if points is None else points
    return load_modelnet40_meshes(meshes, wanted, expected=(N_TRAIN, N_TEST), progress=progress)


def _classes(file: Path) -> tuple[str, ...]:
    try:
        names = tuple(file.read_text(encoding="utf-8").split())
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read ({error}); {BY_HAND}.") from error
    if len(names) != N_CLASSES or len(set(names)) != N_CLASSES:
        raise DataError(f"{file} holds {len(set(names))} names of classes where ModelNet40 has 40; {BY_HAND}.")
    return names


def _part(place: Path, part: str, layout: Layout, points: int) -> Clouds:
    files = sorted(place.glob(f"ply_data_{part}*.h5"))
    if not files:
        raise DataError(f"{place} has no file ply_data_{part}0.h5; {BY_HAND}.")
    read = [_read(file, layout, points) for file in files]
    return Clouds(torch.cat([each.points for each in read]), torch.cat([each.labels for each in read]))


def _read(file: Path, layout: Layout, points: int) -> Clouds:
    try:
        import h5py
    except ModuleNotFoundError as error:
        raise missing_library("h5py", "ModelNet40") from error

    again = f"delete it and {BY_HAND}"
    try:
        with h5py.File(file, "r") as opened:
            missing = [name for name in ("data", "label") if not isinstance(opened.get(name), h5py.Dataset)]
            if missing:
                raise DataError(f"{file} has no {missing[0]!r} in it, so it is not from ModelNet40; {again}.")
            data: Any = opened["data"]
            label: Any = opened["label"]
            if data.shape != (len(data), layout.n_points, 3) or label.shape not in ((len(data), 1), (len(data),)):
                raise DataError(
                    f"{file} has data {data.shape} and label {label.shape} where (n, {layout.n_points}, 3) and (n, 1) "
                    f"are expected; {again}."
                )
            if data.dtype.kind != "f" or label.dtype.kind not in "iu":
                raise DataError(
                    f"{file} has data of {data.dtype} and label of {label.dtype} where floats and whole numbers are "
                    f"expected; {again}."
                )
            clouds = Clouds(
                torch.from_numpy(data[:, :points].astype("float32")),
                torch.from_numpy(label[:].reshape(-1).astype("int64")),
            )
    # RuntimeError and ValueError: what h5py makes of damage that HDF5 does not see.
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(f"{file} is not a readable HDF5 file ({error}); {again}.") from error
    _check(file, *clouds, again)
    return clouds


def _check(file: Path, points: Tensor, labels: Tensor, again: str) -> None:
    if not points.isfinite().all():
        raise DataError(f"{file} holds points that are not finite; {again}.")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < N_CLASSES:
        raise DataError(f"{file} holds labels outside 0 to {N_CLASSES - 1}; {again}.")
