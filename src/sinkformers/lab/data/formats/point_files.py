"""One shape from a file that a user has: OFF, PLY, OBJ, XYZ or NPY, as points."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from torch import Tensor

from sinkformers.lab.data.error import DataError, missing_library
from sinkformers.lab.data.formats.meshes import REMEDY, read_mesh, sample_surface
from sinkformers.lab.data.store.folder import AnyPath, path_of

MESHES = ("off", "ply", "obj")
KINDS = (*MESHES, "xyz", "npy")


def read_points(file: AnyPath, n: int = 1024, *, generator: torch.Generator | None = None) -> Tensor:
    """Points, float32 (m, 3), as they stand in the file; `on_unit_sphere` brings them to the size of a data set's.

    A mesh with faces gives `n` points on its surface, drawn with `generator` (or the same every time); a file without
    gives all of its points. XYZ is text with three numbers or more a line; NPY an array (m, 3), or (m, 6) with normals.
    """
    file = path_of("read_points", "file", file)
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"read_points: n must be a whole number of points ≥ 1; got {n!r}.")
    kind = file.suffix.lower().removeprefix(".")
    if kind not in KINDS:
        raise DataError(f"{file} must be one of {', '.join(f'.{each}' for each in KINDS)}; convert it.")
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror or error}); name a file that is there.") from error
    if kind in MESHES:
        mesh = read_mesh(content, kind, str(file))
        drawn_with = torch.Generator().manual_seed(0) if generator is None else generator
        points = sample_surface(mesh, n, drawn_with, str(file)) if len(mesh.triangles) else mesh.vertices.float()
    else:
        points = _text(content, file) if kind == "xyz" else _array(content, file)
    if not len(points):
        raise DataError(f"{file} has no points; {REMEDY}.")
    if not points.isfinite().all():
        raise DataError(f"{file} has points that are not finite; {REMEDY}.")
    return points


def _text(content: bytes, file: Path) -> Tensor:
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
            raise DataError(f"{file} has no three numbers in line {number}; {REMEDY}.")
    return torch.tensor(rows, dtype=torch.float32).reshape(-1, 3)


def _array(content: bytes, file: Path) -> Tensor:
    try:
        import numpy as np
    except ModuleNotFoundError as error:
        raise missing_library("numpy", "reading NPY files") from error

    try:
        array = np.load(io.BytesIO(content), allow_pickle=False)
    # What damaged bytes make numpy raise is not documented, and is many things.
    except Exception as error:
        raise DataError(f"{file} is not a readable NPY file ({error}); {REMEDY}.") from error
    if getattr(array, "ndim", 0) != 2 or array.shape[1] not in (3, 6) or array.dtype.kind not in "fiu":
        shape, dtype = getattr(array, "shape", "none"), getattr(array, "dtype", type(array).__name__)
        raise DataError(f"{file} holds {dtype} of shape {shape}, and numbers (m, 3) or (m, 6) are expected; {REMEDY}.")
    return torch.from_numpy(array[:, :3].astype("float32"))
