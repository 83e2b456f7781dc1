"""ModelNet40 as point clouds, in the HDF5 files that it is commonly distributed in.

`modelnet40_ply_hdf5_2048` has 2,048 points per shape, and three training shapes fewer than Princeton's meshes;
`modelnet40_hdf5_1024` has 1,024 points and all shapes. Points are uniform on the surface, in random order, centred and
scaled to the unit sphere.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sinkformers.lab.data.clouds import Clouds, PointSet
from sinkformers.lab.data.error import DataError, missing_library
from sinkformers.lab.data.sets.modelnet40_meshes import load_modelnet40_meshes
from sinkformers.lab.data.store.archives import unpack
from sinkformers.lab.data.store.data_set import DataSet, list_files
from sinkformers.lab.data.store.folder import AnyPath, path_of
from sinkformers.lab.data.store.progress import Progress, report_progress

if TYPE_CHECKING:
    from torch import Tensor

CHECKSUMS = """
8bcdc93d40c9657431843e4c79a0c27e69315aee0a36f4f9207d71bba7cd8f34 9256066 ply_data_test0.h5
8b3dd4858a60d06d0210304e1e749ca80c9c147c57862e709515c03776e40eb2 1906955 ply_data_test1.h5
3f966b7def4d19796676e5c16a0f2ef79e4ae5dee097414096bd31b53179236d   64050 ply_data_test_0_id2file.json
e87614166ffcf18f23e36e3c2c67df1559cf0b71122718e37c0bf29627f78238   13006 ply_data_test_1_id2file.json
c5db8f13cb3db27407d2ae7132c521a41d51b86cbef4c900ee71a0f0d09ab4fa 9257079 ply_data_train0.h5
d91648936ed0cc5c514eed1fffe13f3b7d8d2ce8c435d547bd482e6d4992e460 9262485 ply_data_train1.h5
8099f6bc8bccef7ec94f7fcbae0849da65a82c2124231396568fa41d28afd6e7 9253371 ply_data_train2.h5
e24f02848541528d082aeb3e0f1846cf7d33ea90d540848c4d717e35599ac37a 9259555 ply_data_train3.h5
c4a3e4545f4e8722c5b1dc794cc28ae7bdc8d72921979ecf3ffb0c3bd596b6c3 7463687 ply_data_train4.h5
e7ec0111398e5883894c74f9a1916e34c0b30bec9508b0bbca8fb0a25086d138   65288 ply_data_train_0_id2file.json
2dd2d5abfcec5ca470ce6f0b64420db79e4c2ffd2f97c7720f6244ef134551f3   64934 ply_data_train_1_id2file.json
0b1ebdeb5e92d76da5f2980da54f9f6afaba7e5bfaca3cadb273e9e1a59d4829   64622 ply_data_train_2_id2file.json
0b2aecb16a211f264c8210c702e45666d64a3c6300fcd3e279dce48d77f2cc96   64776 ply_data_train_3_id2file.json
476b61531ce9fa86467f57251b9c5ec6c4f4d0ada89b380c385c4796247488bc   52408 ply_data_train_4_id2file.json
7cf9a7b0d1f39eeb861dc43406947d29c1cd429c2f4ff2530ec153d4b8d83609     275 shape_names.txt
fa9b2bbc095038d88321b3af52c32698d2b08b03b296aec6a7f869c4bb021944      88 test_files.txt
4bdb6ecf94468e0da288fe96d1a570d69dcfa86e6cf261e904e9678f4e9bb3f8     225 train_files.txt
"""
CHECKSUMS_OF_SAMPLES = """
523c4da97f5c3d6b44b9f9c66a29c7081b14e5a542eed577fcbc9d1697380430 1572949 ModelNet40_off_sample.zip
d05b411d477f361cdcf455c5d6e268258c3069a6870df9412d86b2839e58cf3b 1905405 modelnet10_mini.npz
"""

DATA_SET = DataSet(
    "modelnet40",
    title="ModelNet40: 12,311 shapes as point clouds",
    licence="academic research only (Princeton)",
    by_hand="get https://shapenet.cs.stanford.edu/media/modelnet40_ply_hdf5_2048.zip and put it into modelnet40/",
    files=list_files(
        "modelnet40/modelnet40_hdf5_1024",
        CHECKSUMS,
        optional=("*_id2file.json",),
        alternatives=(
            "modelnet40/modelnet40_ply_hdf5_2048/{name}",
            "modelnet40/modelnet40_ply_hdf5_2048.zip",
            "modelnet40/modelnet40_hdf5_1024.zip",
        ),
    )
    + list_files("modelnet40", CHECKSUMS_OF_SAMPLES, optional=("*",)),
)

MESHES = ("ModelNet40", "ModelNet40.zip")
N_CLASSES = 40
N_TRAIN, N_TEST = 9_843, 2_468


class Layout(NamedTuple):
    """A distribution: its folder, its number of training shapes, and its number of points per shape."""

    folder: str
    n_train: int
    n_points: int


# The one with more points first.
LAYOUTS = (Layout("modelnet40_ply_hdf5_2048", 9_840, 2_048), Layout("modelnet40_hdf5_1024", N_TRAIN, 1_024))


def load_modelnet40(folder: AnyPath, points: int | None = None, *, progress: Progress = report_progress) -> PointSet:
    """Load ModelNet40 below the data folder `folder`: all shapes, with all of their points or the first `points`.

    A distribution in a zip archive is unpacked next to it first. Points are float32; float16 in the files is converted.
    Damaged or incomplete files are refused. If `points` is more than the files have, points are sampled from
    Princeton's meshes in `modelnet40/ModelNet40.zip` or `modelnet40/ModelNet40/`.
    """
    folder = path_of("load_modelnet40", "folder", folder)
    if points is not None and points < 1:
        raise DataError(f"a shape must have at least one point; got {points}.")
    available = [layout for layout in LAYOUTS if _is_available(folder / "modelnet40" / layout.folder)]
    layout = next((layout for layout in available if points is None or layout.n_points >= points), None)
    if layout is None:
        return _sampled(folder, available, points, progress)
    place = folder / "modelnet40" / layout.folder
    classes = _classes(place / "shape_names.txt")
    train, test = (_part(place, part, layout, points or layout.n_points) for part in ("train", "test"))
    for part, clouds, expected in (("train", train, layout.n_train), ("test", test, N_TEST)):
        if len(clouds.labels) != expected:
            raise DataError(
                f"{place} contains {len(clouds.labels):,} shapes in its {part} files instead of {expected:,}; "
                f"delete it and {DATA_SET.fix}."
            )
    return PointSet(train, test, classes, "modelnet40")


def _is_available(place: Path) -> bool:
    archive = place.with_name(f"{place.name}.zip")
    if not place.is_dir() and archive.exists():
        unpack(archive, place)
    return place.is_dir()


def _sampled(folder: Path, available: list[Layout], points: int | None, progress: Progress) -> PointSet:
    """Sample points from the meshes."""
    place = folder / "modelnet40"
    meshes = next((place / name for name in MESHES if (place / name).exists()), None)
    if meshes is None and available:
        most = max(layout.n_points for layout in available)
        raise DataError(
            f"{place} has {most:,} points per shape, and {points:,} are requested; get Princeton's ModelNet40.zip "
            f"(https://modelnet.cs.princeton.edu) and put it into {place}, to sample points from its meshes."
        )
    if meshes is None:
        names = " nor ".join(layout.folder for layout in LAYOUTS)
        raise DataError(f"modelnet40: there is neither {names} in {place}; {DATA_SET.fix}.")
    n_points = LAYOUTS[0].n_points if points is None else points
    return load_modelnet40_meshes(meshes, n_points, expected=(N_TRAIN, N_TEST), progress=progress)


def _classes(file: Path) -> tuple[str, ...]:
    try:
        names = tuple(file.read_text(encoding="utf-8").split())
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read ({error}); {DATA_SET.fix}.") from error
    if len(names) != N_CLASSES or len(set(names)) != N_CLASSES:
        raise DataError(f"{file} contains {len(set(names))} class names instead of 40; {DATA_SET.fix}.")
    return names


def _part(place: Path, part: str, layout: Layout, points: int) -> Clouds:
    import torch

    files = sorted(place.glob(f"ply_data_{part}*.h5"))
    if not files:
        raise DataError(f"{place} has no file ply_data_{part}0.h5; {DATA_SET.fix}.")
    read = [_read(file, layout, points) for file in files]
    return Clouds(torch.cat([each.points for each in read]), torch.cat([each.labels for each in read]))


def _read(file: Path, layout: Layout, points: int) -> Clouds:
    import torch

    try:
        import h5py
    except ModuleNotFoundError as error:
        raise missing_library("h5py", "ModelNet40") from error

    fix = f"delete it and {DATA_SET.fix}"
    try:
        with h5py.File(file, "r") as opened:
            missing = [name for name in ("data", "label") if not isinstance(opened.get(name), h5py.Dataset)]
            if missing:
                raise DataError(f"{file} has no data set {missing[0]!r}, so it is not from ModelNet40; {fix}.")
            data: Any = opened["data"]
            label: Any = opened["label"]
            if data.shape != (len(data), layout.n_points, 3) or label.shape not in ((len(data), 1), (len(data),)):
                raise DataError(
                    f"{file} has data {data.shape} and label {label.shape} instead of (n, {layout.n_points}, 3) and "
                    f"(n, 1); {fix}."
                )
            if data.dtype.kind != "f" or label.dtype.kind not in "iu":
                raise DataError(
                    f"{file} has data of type {data.dtype} and label of type {label.dtype} instead of floats and "
                    f"integers; {fix}."
                )
            clouds = Clouds(
                torch.from_numpy(data[:, :points].astype("float32")),
                torch.from_numpy(label[:].reshape(-1).astype("int64")),
            )
    # RuntimeError and ValueError: damage that h5py notices and HDF5 does not.
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(f"{file} is not a readable HDF5 file ({error}); {fix}.") from error
    _check(file, *clouds, fix)
    return clouds


def _check(file: Path, points: Tensor, labels: Tensor, fix: str) -> None:
    if not points.isfinite().all():
        raise DataError(f"{file} contains points that are not finite; {fix}.")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < N_CLASSES:
        raise DataError(f"{file} contains labels outside 0 to {N_CLASSES - 1}; {fix}.")
