"""Triangle meshes, and points sampled uniformly from their surface."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from sinkformers.lab.data.error import DataError, missing_library

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FIX = "replace it, or remove it"
# Many of Princeton's files have the counts on the first line, without a space: OFF490 518 0.
OFF_HEADER = re.compile(rb"\s*(?:#[^\n]*\n\s*)*OFF\s*(?:#[^\n]*\n\s*)*(\d{1,9})\s+(\d{1,9})\s+\d{1,9}\b")


class Mesh(NamedTuple):
    """Vertices, float64 (n, 3), and the vertices of each triangle, int64 (m, 3)."""

    vertices: Tensor
    triangles: Tensor


def read_mesh(content: bytes, kind: str, place: str) -> Mesh:
    """Read a mesh from the bytes of a file of `kind` "off", "ply" or "obj"; `place` is its name in error messages.

    A file without faces gives no triangles. Faces of an OFF file must be triangles; those of other files are split.
    """
    import torch

    declared = _off_counts(content, place) if kind == "off" else None
    loaded = _load(content, kind, place)
    vertices = torch.from_numpy(loaded.vertices.astype("float64").copy()).reshape(-1, 3)
    faces = getattr(loaded, "faces", None)
    none = torch.empty(0, 3, dtype=torch.int64)
    triangles = none if faces is None or not len(faces) else torch.from_numpy(faces.astype("int64").copy())
    if not len(vertices):
        raise DataError(f"{place} has no vertices; {FIX}.")
    if declared is not None and declared != (len(vertices), len(triangles)):
        raise DataError(
            f"{place} declares {declared[0]} vertices and {declared[1]} faces, but contains {len(vertices)} vertices "
            f"and {len(triangles)} triangles; triangulate it, or {FIX}."
        )
    if not vertices.isfinite().all():
        raise DataError(f"{place} has vertices that are not finite; {FIX}.")
    if len(triangles) and not 0 <= int(triangles.min()) <= int(triangles.max()) < len(vertices):
        raise DataError(f"{place} has faces with vertices that do not exist; {FIX}.")
    return Mesh(vertices, triangles)


def _off_counts(content: bytes, place: str) -> tuple[int, int]:
    header = OFF_HEADER.match(content)
    if header is None:
        raise DataError(f"{place} does not begin with OFF and the counts of vertices, faces and edges; {FIX}.")
    return int(header[1]), int(header[2])


def _load(content: bytes, kind: str, place: str) -> Any:
    try:
        import trimesh
    except ModuleNotFoundError as error:
        raise missing_library("trimesh", "reading meshes") from error

    try:
        loaded: Any = trimesh.load(io.BytesIO(content), file_type=kind, process=False)
        loaded = loaded.to_mesh() if isinstance(loaded, trimesh.Scene) and loaded.geometry else loaded
    # trimesh does not document which exceptions damaged files raise, and there are many.
    except Exception as error:
        raise DataError(f"{place} is not a readable {kind.upper()} file ({error}); {FIX}.") from error
    if getattr(loaded, "vertices", None) is None:
        raise DataError(f"{place} has no vertices; {FIX}.")
    return loaded


def sample_surface(mesh: Mesh, n: int, generator: torch.Generator, place: str = "the mesh") -> Tensor:
    """Sample n points, float32 (n, 3), uniformly from the surface: a triangle by its area, then a point within it.

    Examples:
        >>> import torch
        >>> from sinkformers.lab.data.formats.meshes import Mesh, sample_surface
        >>> corner = Mesh(torch.eye(3), torch.tensor([[0, 1, 2]]))
        >>> sample_surface(corner, 5, torch.Generator().manual_seed(0)).shape
        torch.Size([5, 3])
    """
    import torch

    corners = mesh.vertices.double()[mesh.triangles]  # (m, 3, 3)
    sides = corners[:, 1:] - corners[:, :1]
    areas = torch.linalg.cross(sides[:, 0], sides[:, 1]).norm(dim=-1)
    total = areas.sum()
    if not 0 < float(total) < torch.inf:
        raise DataError(f"{place} has no surface: the total area of its faces is {float(total) / 2:g}; {FIX}.")
    draw = torch.rand(3, n, generator=generator, dtype=torch.float64)
    chosen = torch.searchsorted(areas.cumsum(0), draw[0] * total).clamp(max=len(areas) - 1)
    # Uniform in a parallelogram, folded at its diagonal.
    u, v = draw[1:]
    outside = u + v > 1
    weights = torch.stack([torch.where(outside, 1 - u, u), torch.where(outside, 1 - v, v)], -1)
    return (corners[chosen, 0] + (weights[..., None] * sides[chosen]).sum(1)).float()
