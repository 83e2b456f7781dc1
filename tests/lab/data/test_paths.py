"""Every public function that takes a path also takes text, and names the argument if it is not a path."""

import inspect
from pathlib import Path

import numpy as np
import pytest
import torch

import sinkformers.lab.data
from sinkformers.lab.data import CATALOGUE, DataError, fetch, find_data_set, read_points, status_of, unpack

# The function, its argument, and a call with a path.
CALLS = {
    "data_folder": ("given", lambda path: sinkformers.lab.data.data_folder(path)),
    "fetch": ("folder", lambda path: fetch("imdb", path)),
    "load_dogs_vs_cats": ("folder", lambda path: sinkformers.lab.data.load_dogs_vs_cats(path, 8)),
    "load_imdb": ("folder", lambda path: sinkformers.lab.data.load_imdb(path)),
    "load_iwslt14": ("folder", lambda path: sinkformers.lab.data.load_iwslt14(path)),
    "load_mnist": ("folder", lambda path: sinkformers.lab.data.load_mnist(path)),
    "load_modelnet40": ("folder", lambda path: sinkformers.lab.data.load_modelnet40(path)),
    "load_modelnet40_meshes": ("source", lambda path: sinkformers.lab.data.load_modelnet40_meshes(path, 8)),
    "load_multi30k": ("folder", lambda path: sinkformers.lab.data.load_multi30k(path)),
    "read_points": ("file", lambda path: read_points(path)),
    "status_of": ("folder", lambda path: status_of(CATALOGUE["mnist"], path)),
    "unpack": ("archive", lambda path: unpack(path, "nowhere")),
}


class Place:
    """A path that is neither text nor a Path."""

    def __init__(self, path):
        self.path = path

    def __fspath__(self):
        return str(self.path)


def outcome(call, path):
    try:
        return call(path)
    except DataError as error:
        return str(error)


def test_the_table_has_every_public_function_that_takes_a_path():
    public = {name: getattr(sinkformers.lab.data, name) for name in sinkformers.lab.data.__all__}
    taking = {
        name
        for name, value in public.items()
        if inspect.isfunction(value) and any("AnyPath" in str(p) for p in inspect.signature(value).parameters.values())
    }
    named = {
        name
        for name, value in public.items()
        if inspect.isfunction(value) and {"folder", "file", "source"} & set(inspect.signature(value).parameters)
    }
    assert named <= taking == CALLS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_text_and_path_objects_are_equivalent(tmp_path, name):
    _, call = CALLS[name]
    expected = outcome(call, tmp_path)
    assert outcome(call, str(tmp_path)) == expected
    assert outcome(call, Place(tmp_path)) == expected


@pytest.mark.parametrize("wrong", [b"data", 3, ["data"]], ids=repr)
@pytest.mark.parametrize("name", CALLS)
def test_the_argument_that_is_not_a_path_is_named(name, wrong):
    argument, call = CALLS[name]
    kind = type(wrong).__name__
    with pytest.raises(TypeError, match=rf"^{name}: {argument} must be a path, as str or os.PathLike; got {kind}\. "):
        call(wrong)


def test_points_are_read_from_a_name(tmp_path):
    points = np.arange(12, dtype="float32").reshape(4, 3)
    np.save(tmp_path / "points.npy", points)
    assert torch.equal(read_points(str(tmp_path / "points.npy")), torch.from_numpy(points))


@pytest.mark.parametrize("n", [0, -1, 2.5, None])
def test_the_number_of_points_must_be_positive(tmp_path, n):
    with pytest.raises(ValueError, match=r"^read_points: n must be a whole number of points ≥ 1; got"):
        read_points(tmp_path / "shape.off", n)


def test_a_file_is_located_below_a_name(tmp_path):
    (tmp_path / "mnist").mkdir()
    file = CATALOGUE["mnist"].files[0]
    (tmp_path / file.path).touch()
    assert file.locate(str(tmp_path)) == Path(tmp_path, file.path)


@pytest.mark.parametrize("name", [None, 3, ["mnist"]], ids=repr)
def test_a_value_that_is_not_a_name_is_refused(name):
    with pytest.raises(DataError, match=r"^there is no data set .*there are digits, dogs-vs-cats,"):
        find_data_set(name)
