"""ModelNet40's HDF5 files: all shapes are loaded, and damage is reported."""

import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from sinkformers.lab.data import DataError, heard_by, load_modelnet40
from sinkformers.lab.data.sets import modelnet40

h5py = pytest.importorskip("h5py")

SMALL = modelnet40.Layout("modelnet40_hdf5_1024", 11, 16)
LARGE = modelnet40.Layout("modelnet40_ply_hdf5_2048", 10, 32)
PARTS = {"train0": 7, "train1": 4, "test0": 3, "test1": 2}


@pytest.fixture(autouse=True)
def toy_layouts(monkeypatch, request):
    if "real_data" not in request.fixturenames:
        monkeypatch.setattr(modelnet40, "LAYOUTS", (LARGE, SMALL))
        monkeypatch.setattr(modelnet40, "N_TEST", 5)


def contents(n, layout=SMALL, seed=0):
    draw = torch.Generator().manual_seed(100 * seed + n)
    points = (torch.rand(n, layout.n_points, 3, generator=draw) * 2 - 1).mul(1024).round().div(1024)
    return {"data": points.numpy().astype("float16"), "label": torch.arange(n)[:, None].numpy().astype("uint8")}


def write(folder, layout=SMALL, parts=PARTS, names=None):
    place = folder / "modelnet40" / layout.folder
    place.mkdir(parents=True)
    names = [f"kind{k}" for k in range(40)] if names is None else names
    (place / "shape_names.txt").write_text("\n".join(names) + "\n")
    for part, n in parts.items():
        put(place / f"ply_data_{part}.h5", contents(n, layout))
    return place


def put(file, arrays):
    file.unlink(missing_ok=True)
    with h5py.File(file, "w") as opened:
        for name, array in arrays.items():
            opened.create_dataset(name, data=array, compression="gzip")


def test_all_shapes_are_loaded_in_the_order_of_the_files(tmp_path):
    write(tmp_path)
    loaded = load_modelnet40(tmp_path)
    assert (loaded.name, loaded.classes[3], len(loaded.classes)) == ("modelnet40", "kind3", 40)
    assert loaded.train.points.shape == (11, 16, 3)
    assert loaded.train.points.dtype == torch.float32
    assert loaded.train.labels.dtype == torch.int64
    expected = torch.cat([torch.from_numpy(contents(n)["data"]).float() for n in (7, 4)])
    assert torch.equal(loaded.train.points, expected)
    assert loaded.train.labels.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3]
    assert loaded.test.labels.tolist() == [0, 1, 2, 0, 1]
    assert torch.equal(load_modelnet40(tmp_path, 5).train.points, expected[:, :5])


def test_the_distribution_with_more_points_is_preferred(tmp_path):
    write(tmp_path)
    write(tmp_path, LARGE, {"train0": 10, "test0": 5})
    assert load_modelnet40(tmp_path).train.points.shape == (10, 32, 3)


def test_an_archive_is_unpacked_once(tmp_path):
    place = write(tmp_path)
    expected = load_modelnet40(tmp_path)
    archive = Path(shutil.make_archive(str(place), "zip", place.parent, place.name))
    shutil.rmtree(place)
    assert torch.equal(load_modelnet40(tmp_path).train.points, expected.train.points)
    archive.write_bytes(b"no longer read")
    assert torch.equal(load_modelnet40(tmp_path).test.points, expected.test.points)


def test_an_archive_cannot_write_outside_its_folder(tmp_path):
    (tmp_path / "modelnet40").mkdir()
    with zipfile.ZipFile(tmp_path / "modelnet40" / "modelnet40_hdf5_1024.zip", "w") as archive:
        archive.writestr("../../outside.txt", "outside")
    with pytest.raises(DataError, match=r"shape_names\.txt cannot be read"):
        load_modelnet40(tmp_path)
    outside = [path for path in tmp_path.rglob("*") if "modelnet40_hdf5_1024" not in path.parts]
    assert sorted(path.name for path in outside) == ["modelnet40", "modelnet40_hdf5_1024.zip"]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and no more"])
def test_a_damaged_archive_is_one_sentence(tmp_path, content):
    archive = tmp_path / "modelnet40" / "modelnet40_hdf5_1024.zip"
    archive.parent.mkdir()
    archive.write_bytes(content)
    with pytest.raises(DataError, match=r"1024\.zip is damaged \([^\n]+\); delete it and get it again\.$"):
        load_modelnet40(tmp_path)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"train0": 7, "train1": 3, "test0": 5}, r"contains 10 shapes in its train files instead of 11; delete"),
        ({"train0": 11, "test0": 6}, r"contains 6 shapes in its test files instead of 5"),
        ({"train0": 11}, r"has no file ply_data_test0\.h5; get https"),
    ],
)
def test_the_number_of_shapes_is_checked(tmp_path, parts, message):
    write(tmp_path, parts=parts)
    with pytest.raises(DataError, match=message):
        load_modelnet40(tmp_path)


def test_a_missing_set_is_refused(tmp_path):
    with pytest.raises(
        DataError, match=r"neither modelnet40_ply_hdf5_2048 nor modelnet40_hdf5_1024 in .*modelnet40; get https://"
    ):
        load_modelnet40(tmp_path)


def test_more_points_than_the_files_have_are_refused(tmp_path):
    write(tmp_path)
    with pytest.raises(DataError, match="modelnet40 has 16 points per shape, and 17 are requested; get Princeton's"):
        load_modelnet40(tmp_path, 17)
    for points in (0, -1):
        with pytest.raises(DataError, match=f"a shape must have at least one point; got {points}"):
            load_modelnet40(tmp_path, points)


def test_more_points_are_sampled_from_a_complete_set_of_meshes(tmp_path, monkeypatch):
    write(tmp_path)
    for name in ("chair/train/a", "chair/train/b", "chair/test/c", "lamp/train/d", "lamp/test/e", "lamp/test/f"):
        file = tmp_path / "modelnet40" / "ModelNet40" / f"{name}.off"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("OFF4 2 0\n0 0 0\n1 0 0\n0 1 0\n0 0 1\n3 0 1 2\n3 0 1 3\n")
    monkeypatch.setattr(modelnet40, "N_TRAIN", 3)
    monkeypatch.setattr(modelnet40, "N_TEST", 3)
    heard = []
    with heard_by(lambda *what: heard.append(what)):
        loaded = load_modelnet40(tmp_path, 17)
    assert loaded.train.points.shape == loaded.test.points.shape == (3, 17, 3)
    assert (loaded.train.labels.tolist(), loaded.test.labels.tolist()) == ([0, 0, 1], [0, 1, 1])
    assert heard == [("sampling meshes", k, 6) for k in range(1, 7)]
    file.unlink()
    with pytest.raises(DataError, match="contains 3 training and 2 test shapes instead of 3 and 3"):
        load_modelnet40(tmp_path, 17)


GOOD = contents(7)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"data": GOOD["data"]}, "has no data set 'label'"),
        ({"clouds": GOOD["data"], "label": GOOD["label"]}, "has no data set 'data'"),
        (
            {**GOOD, "data": GOOD["data"][:, :15]},
            r"has data (7, 15, 3) and label (7, 1) instead of (n, 16, 3)",
        ),
        ({**GOOD, "data": GOOD["data"][..., :2]}, "has data (7, 16, 2)"),
        ({**GOOD, "label": GOOD["label"][:6]}, "and label (6, 1)"),
        (
            {**GOOD, "data": GOOD["data"].astype("int32")},
            "of type int32 and label of type uint8 instead of floats",
        ),
        ({**GOOD, "label": GOOD["label"].astype("float32")}, "label of type float32"),
        ({**GOOD, "data": GOOD["data"] * float("nan")}, "contains points that are not finite"),
        ({**GOOD, "label": GOOD["label"] + 34}, "contains labels outside 0 to 39"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path, arrays, message):
    file = write(tmp_path) / "ply_data_train0.h5"
    put(file, arrays)
    with pytest.raises(DataError) as caught:
        load_modelnet40(tmp_path)
    assert str(caught.value).startswith(str(file))
    assert message in str(caught.value)
    assert str(caught.value).endswith("delete it and " + modelnet40.DATA_SET.fix + ".")


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"<html>" + b, lambda _b: b""])
def test_a_damaged_file_is_refused(tmp_path, damage):
    file = write(tmp_path) / "ply_data_test1.h5"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DataError, match=r"test1\.h5 is not a readable HDF5 file \(.+\); delete it and get"):
        load_modelnet40(tmp_path)


def test_damage_inside_the_data_is_refused(tmp_path):
    """The header is intact, and a block of compressed points is damaged."""
    file = write(tmp_path) / "ply_data_test1.h5"
    with h5py.File(file) as opened:
        place = opened["data"].id.get_chunk_info(0)
    content = bytearray(file.read_bytes())
    content[place.byte_offset + 4 : place.byte_offset + place.size] = bytes(place.size - 4)
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"test1\.h5 is not a readable HDF5 file"):
        load_modelnet40(tmp_path)


@pytest.mark.parametrize("names", [["a"] * 40, ["a", "b"]])
def test_there_must_be_forty_class_names(tmp_path, names):
    write(tmp_path, names=names)
    with pytest.raises(DataError, match=r"shape_names\.txt contains \d class names instead of 40"):
        load_modelnet40(tmp_path)


def test_the_real_data(real_data):
    loaded = load_modelnet40(real_data, 64)
    assert loaded.train.points.shape == (9_843, 64, 3)
    assert loaded.test.points.shape == (2_468, 64, 3)
    # Counts as published.
    counts = list(zip(loaded.train.labels.bincount().tolist(), loaded.test.labels.bincount().tolist(), strict=True))
    by_class = dict(zip(loaded.classes, counts, strict=True))
    assert by_class["airplane"] == (626, 100)
    assert by_class["bathtub"] == (106, 50)
    assert by_class["chair"] == (889, 100)
    assert by_class["desk"] == (200, 86)
    assert (loaded.train.labels.bincount() > 0).sum() == (loaded.test.labels.bincount() > 0).sum() == 40
    assert loaded.train.points.norm(dim=-1).max() < 1.01
