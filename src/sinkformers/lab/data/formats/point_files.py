"""One shape as points, from an OFF, PLY, OBJ, XYZ or NPY file."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from sinkformers.lab.data.error import DataError, missing_library
from sinkformers.lab.data.formats.meshes import FIX, read_mesh, sample_surface
from sinkformers.lab.data.store.folder import AnyPath, path_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MESHES = ("off", "ply", "obj")
KINDS = (*MESHES, "xyz", "npy")


def read_points(file: AnyPath, n: int = 1024, *, generator: torch.Generator | None = None) -> Tensor:
    """Read points, float32 (m, 3), as they are in the file; `on_unit_sphere` normalises them like a data set's.

    A mesh with faces gives `n` points sampled from its surface with `generator` (by default, the same in every call); a
    file without faces gives all of its points. XYZ is text with at least three numbers per line; NPY an array (m, 3),
    or (m, 6) with normals.
    """
    import torch

    file = path_of("read_points", "file", file)
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"read_points: n must be a whole number of points ≥ 1; got {n!r}.")
    kind = check_point_file(file)
    content = file.read_bytes()
    if kind in MESHES:
        mesh = read_mesh(content, kind, str(file))
        used = torch.Generator().manual_seed(0) if generator is None else generator
        points = sample_surface(mesh, n, used, str(file)) if len(mesh.triangles) else mesh.vertices.float()
    else:
        points = _text(content, file) if kind == "xyz" else _array(content, file)
    if not len(points):
        raise DataError(f"{file} has no points; {FIX}.")
    if not points.isfinite().all():
        raise DataError(f"{file} has points that are not finite; {FIX}.")
    return points


def check_point_file(file: Path) -> str:
    """Return the kind of a file, its suffix, after checking that it is known and that the file can be opened."""
    kind = file.suffix.lower().removeprefix(".")
    if kind not in KINDS:
        raise DataError(f"{file} must be one of {', '.join(f'.{each}' for each in KINDS)}; convert it.")
    try:
        file.open("rb").close()
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror or error}); name an existing file.") from error
    return kind


def _text(content: bytes, file: Path) -> Tensor:
    import torch

    rows = []
    for number, line in enumerate(content.splitlines(), 1):
        words = line.split(b"#")[0].replace(b",", b" ").split()
        if not words:
            continue
        try:
            rows.append([float(word) for word in words[:3]])
        except ValueError:
            rows.append([])
        if len(rows[-1]) != 3:
            raise DataError(f"{file} does not have three numbers in line {number}; {FIX}.")
    return torch.tensor(rows, dtype=torch.float32).reshape(-1, 3)


def _array(content: bytes, file: Path) -> Tensor:
    import torch

    try:
        import numpy as np
    except ModuleNotFoundError as error:
        raise missing_library("numpy", "reading NPY files") from error

    try:
        array = np.load(io.BytesIO(content), allow_pickle=False)
    # numpy does not document which exceptions damaged files raise, and there are many.
    except Exception as error:
        raise DataError(f"{file} is not a readable NPY file ({error}); {FIX}.") from error
    if getattr(array, "ndim", 0) != 2 or array.shape[1] not in (3, 6) or array.dtype.kind not in "fiu":
        shape, dtype = getattr(array, "shape", "none"), getattr(array, "dtype", type(array).__name__)
        raise DataError(f"{file} contains {dtype} of shape {shape} instead of numbers (m, 3) or (m, 6); {FIX}.")
    return torch.from_numpy(array[:, :3].astype("float32"))
