"""Meshes and point files: reading, sampling by area, and error messages."""

import math
import zipfile

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from sinkformers.lab.data import DataError, load_modelnet40_meshes, on_unit_sphere, read_points
from sinkformers.lab.data.formats.meshes import Mesh, read_mesh, sample_surface

pytest.importorskip("trimesh")

# A triangle of area ½ at height 0, and one of area 2 at height 1.
BODY = b"0 0 0\n1 0 0\n0 1 0\n0 0 1\n2 0 1\n0 2 1\n3 0 1 2\n3 3 4 5\n"
TRIANGLE = b"0 0 0\n1 0 0\n0 1 0\n3 0 1 2\n"


@pytest.mark.parametrize("header", [b"OFF\n6 2 0\n", b"OFF6 2 0\n", b"OFF 6 2 0\n", b"# made\nOFF\n# up\n6 2 0\n"])
def test_headers_of_princetons_files(header):
    mesh = read_mesh(header + BODY, "off", "a.off")
    assert mesh.vertices.shape == (6, 3)
    assert mesh.triangles.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "does not begin with OFF and the counts"),
        (b"PLY\n6 2 0\n" + BODY, "does not begin with OFF"),
        (b"OFF\n0 0 0\n", "has no vertices"),
        (b"OFF\n6 2 0\n" + BODY[:20], "is not a readable OFF file"),
        (
            b"OFF\n6 2 0\n" + BODY[: BODY.rfind(b"3")],
            "6 vertices and 2 faces, but contains 6 vertices and 1 triangles",
        ),
        (
            b"OFF\n4 1 0\n0 0 0\n1 0 0\n1 1 0\n0 1 0\n4 0 1 2 3\n",
            "but contains 4 vertices and 2 triangles; triangulate",
        ),
        (b"OFF\n3 1 0\n" + TRIANGLE.replace(b"1 0 0", b"1 nan 0"), "has vertices that are not finite"),
        (b"OFF\n3 1 0\n" + TRIANGLE.replace(b"3 0 1 2", b"3 0 1 7"), "is not a readable OFF file"),
        (b"OFF\n3 1 0\n" + TRIANGLE.replace(b"3 0 1 2", b"2 0 1"), "but contains 3 vertices and 0 triangles"),
    ],
)
def test_a_file_that_is_not_a_triangle_mesh_is_refused(content, message):
    with pytest.raises(DataError) as caught:
        read_mesh(content, "off", "chair_0001.off")
    assert str(caught.value).startswith("chair_0001.off ")
    assert message in str(caught.value)


def test_triangles_are_sampled_by_area_and_points_uniformly_within():
    mesh, n = read_mesh(b"OFF6 2 0\n" + BODY, "off", "a.off"), 40_000
    points = sample_surface(mesh, n, torch.Generator().manual_seed(0))
    assert points.dtype == torch.float32
    assert torch.equal(points, sample_surface(mesh, n, torch.Generator().manual_seed(0)))
    upper = points[:, 2] > 0.5
    assert abs(upper.double().mean() - 0.8) < 5 * math.sqrt(0.8 * 0.2 / n)
    inside = points[upper]
    assert (inside[:, :2] >= 0).all()
    assert (inside[:, 0] + inside[:, 1] <= 2 + 1e-6).all()
    # The mean of a triangle is that of its corners; a coordinate's variance is 4/18 here.
    assert_close(inside[:, :2].mean(0), torch.full((2,), 2 / 3), atol=5 * math.sqrt(4 / 18 / len(inside)), rtol=0)
    assert_close(inside[:, 0].var(), torch.tensor(4 / 18), atol=0.01, rtol=0)


@pytest.mark.parametrize("triangles", [[[0, 0, 1]], [[0, 1, 1], [2, 2, 2]]])
def test_a_mesh_without_a_surface_is_refused(triangles):
    mesh = Mesh(torch.randn(3, 3), torch.tensor(triangles))
    with pytest.raises(DataError, match=r"a\.off has no surface: the total area of its faces is 0"):
        sample_surface(mesh, 5, torch.Generator(), "a.off")


def test_the_unit_sphere():
    points = torch.randn(3, 50, 3) * torch.tensor([0.1, 5.0, 2.0])[:, None, None] + 7
    scaled = on_unit_sphere(points)
    assert_close(scaled.mean(1), torch.zeros(3, 3), atol=1e-5, rtol=0)
    assert_close(scaled.norm(dim=-1).amax(-1), torch.ones(3), atol=1e-6, rtol=0)
    assert_close(on_unit_sphere(points * 3 - 4), scaled, atol=1e-4, rtol=0)
    assert on_unit_sphere(torch.ones(5, 3)).eq(0).all()


def mesh_folder(folder):
    for name in ("chair/train/chair_0001", "chair/test/chair_0002", "desk/train/desk_0001", "desk/test/desk_0002"):
        file = folder / "ModelNet40" / f"{name}.off"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"OFF6 2 0\n" + BODY)
    return folder


def zipped(folder):
    archive = folder / "some.zip"
    with zipfile.ZipFile(archive, "w") as opened:
        for file in sorted((folder / "ModelNet40").rglob("*.off")):
            opened.write(file, file.relative_to(folder))
        opened.writestr("ModelNet40/README.txt", "nothing")
    return archive


def test_a_folder_and_its_archive_give_the_same_shapes(tmp_path):
    folder = mesh_folder(tmp_path)
    first, second = load_modelnet40_meshes(folder, 20), load_modelnet40_meshes(zipped(folder), 20)
    assert first.classes == second.classes == ("chair", "desk")
    assert first.train.labels.tolist() == first.test.labels.tolist() == [0, 1]
    for one, other in ((first.train, second.train), (first.test, second.test)):
        assert torch.equal(one.points, other.points)
        assert one.points.shape == (2, 20, 3)
        assert_close(one.points.norm(dim=-1).amax(-1), torch.ones(2), atol=1e-6, rtol=0)
    assert not torch.equal(first.train.points[0], first.train.points[1])
    assert not torch.equal(load_modelnet40_meshes(folder, 20, seed=1).train.points, first.train.points)


def test_a_bad_mesh_is_named(tmp_path):
    folder = mesh_folder(tmp_path)
    (folder / "ModelNet40/desk/train/desk_0001.off").write_bytes(b"OFF3 1 0\n0 0 0\n0 0 0\n0 0 0\n3 0 1 2\n")
    with pytest.raises(DataError, match=r"desk/train/desk_0001\.off has no surface"):
        load_modelnet40_meshes(folder, 20)
    with pytest.raises(DataError, match=r"desk/train/desk_0001\.off in .*some\.zip has no surface"):
        load_modelnet40_meshes(zipped(folder), 20)


def test_a_folder_or_archive_without_meshes_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"has no files <class>/train/\*\.off and <class>/test/\*\.off"):
        load_modelnet40_meshes(tmp_path, 20)
    (tmp_path / "a.zip").write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"a\.zip is neither a folder nor a readable zip archive"):
        load_modelnet40_meshes(tmp_path / "a.zip", 20)


def test_the_real_meshes(real_data):
    loaded = load_modelnet40_meshes(real_data / "modelnet40" / "ModelNet40_off_sample.zip", 64)
    assert loaded.train.points.shape == (160, 64, 3)
    assert loaded.test.points.shape == (80, 64, 3)
    assert loaded.train.labels.bincount().tolist() == [4] * 40


CORNERS = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0.5, 0.25, 2]], dtype="float32")
PLY = "ply\nformat ascii 1.0\nelement vertex 4\nproperty float x\nproperty float y\nproperty float z\nend_header\n"


def lines(array):
    return "".join(" ".join(map(str, row)) + "\n" for row in array)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.ply", PLY + lines(CORNERS)),
        ("a.obj", "".join(f"v {line}\n" for line in lines(CORNERS).splitlines())),
        ("a.xyz", lines(CORNERS)),
        ("a.XYZ", "# x y z r g b\n\n" + "".join(f"{line}, 7, 8\n" for line in lines(CORNERS).splitlines())),
        ("a.npy", CORNERS),
        ("a.npy", np.concatenate([CORNERS.astype("float64"), CORNERS], 1)),
        ("a.off", "OFF4 0 0\n" + lines(CORNERS)),
    ],
)
def test_every_kind_of_file_is_read(tmp_path, name, content):
    file = tmp_path / name
    if isinstance(content, str):
        file.write_text(content)
    else:
        np.save(file, content)
    points = read_points(file)
    assert points.dtype == torch.float32
    assert torch.equal(points, torch.from_numpy(CORNERS))


def test_a_mesh_is_sampled(tmp_path):
    file = tmp_path / "a.obj"
    file.write_text("v 0 0 3\nv 1 0 3\nv 1 1 3\nv 0 1 3\nf 1 2 3 4\n")
    points = read_points(file, 500)
    assert points.shape == (500, 3)
    assert points[:, 2].eq(3).all()
    assert torch.equal(points, read_points(file, 500))
    assert_close(points.mean(0), torch.tensor([0.5, 0.5, 3.0]), atol=0.07, rtol=0)
    assert not torch.equal(points, read_points(file, 500, generator=torch.Generator().manual_seed(5)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.stl", b"", r"must be one of \.off, \.ply, \.obj, \.xyz, \.npy; convert it"),
        ("a.xyz", b"1 2 3\n4 5\n", r"does not have three numbers in line 2"),
        ("a.xyz", b"1 2 three\n", r"does not have three numbers in line 1"),
        ("a.xyz", b"\xff\xfe\n", r"does not have three numbers in line 1"),
        ("a.xyz", b"# nothing\n", r"has no points"),
        ("a.xyz", b"1 2 inf\n", r"has points that are not finite"),
        ("a.npy", b"\x93NUMPY", r"is not a readable NPY file"),
        ("a.ply", b"ply\nformat binary_little_endian 1.0\nelement vertex 2000\n", r"is not a readable PLY file"),
        ("a.ply", b"", r"is not a readable PLY file"),
        ("a.obj", b"", r"has no vertices"),
    ],
)
def test_files_without_points_are_refused(tmp_path, name, content, message):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_points(file)
    assert str(caught.value).startswith(str(file))


@pytest.mark.parametrize(
    "array", [np.zeros((4, 2)), np.zeros(3), np.zeros((4, 3)) > 0, np.zeros((4, 3), dtype="complex64")]
)
def test_arrays_of_another_shape_are_refused(tmp_path, array):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(DataError, match=r"instead of numbers \(m, 3\) or \(m, 6\)"):
        read_points(tmp_path / "a.npy")


def test_objects_in_an_array_are_not_loaded(tmp_path):
    np.save(tmp_path / "a.npy", np.array([{}, {}]), allow_pickle=True)
    with pytest.raises(DataError, match="is not a readable NPY file"):
        read_points(tmp_path / "a.npy")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"b\.xyz cannot be read \(No such file or directory\); name an existing file"):
        read_points(tmp_path / "b.xyz")
