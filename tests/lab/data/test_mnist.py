"""MNIST: all layouts give the contents of the files, and damage is reported."""

import gzip
import struct

import pytest
import torch

from sinkformers.lab.data import DataError, load_mnist

TRAIN, TEST = 7, 3


def idx(magic, shape, content):
    return struct.pack(f">{1 + len(shape)}I", magic, *shape) + bytes(content)


def pixel_bytes(n, seed):
    return torch.randint(256, (n, 28, 28), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def toy_files():
    files = {}
    for part, n in (("train", TRAIN), ("t10k", TEST)):
        files[f"{part}-images-idx3-ubyte"] = idx(0x803, (n, 28, 28), pixel_bytes(n, n).flatten().tolist())
        files[f"{part}-labels-idx1-ubyte"] = idx(0x801, (n,), [k % 10 for k in range(n)])
    return files


def write(folder, files, *, zipped=True):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("place", ["mnist", "mnist/MNIST/raw", "MNIST/raw"])
def test_every_layout_gives_the_contents_of_the_files(tmp_path, place, zipped):
    write(tmp_path / place, toy_files(), zipped=zipped)
    mnist = load_mnist(tmp_path)
    assert mnist.name == "mnist"
    assert mnist.classes == tuple("0123456789")
    for images, n in ((mnist.train, TRAIN), (mnist.test, TEST)):
        assert images.pixels.dtype == torch.uint8
        assert images.labels.dtype == torch.int64
        assert torch.equal(images.pixels, pixel_bytes(n, n)[:, None])
        assert images.labels.tolist() == list(range(n))


def test_a_missing_file_is_named_with_the_command_that_downloads_it(tmp_path):
    files = toy_files()
    del files["t10k-labels-idx1-ubyte"]
    write(tmp_path / "mnist", files)
    with pytest.raises(
        DataError, match=r"no t10k-labels-idx1-ubyte\.gz in .*mnist; run sinkformers data fetch mnist, or"
    ):
        load_mnist(tmp_path)


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
SQUARES = pixel_bytes(TRAIN, TRAIN).flatten().tolist()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (IMAGES, b"\x00\x00\x08", "ends within its header"),
        (IMAGES, idx(0x801, (TRAIN, 28, 28), SQUARES), "begins with 0x00000801 instead of 0x00000803"),
        (IMAGES, idx(0x803, (TRAIN, 28, 14), SQUARES), "declares the shape 7 × 28 × 14 instead of n × 28 × 28"),
        (IMAGES, idx(0x803, (2**32 - 1, 28, 28), SQUARES), "declares the shape 4294967295 × 28 × 28"),
        (LABELS, idx(0x801, (0,), []), "declares the shape 0 instead of n;"),
        (IMAGES, idx(0x803, (TRAIN, 28, 28), SQUARES[:-1]), "is shorter than its header declares"),
        (IMAGES, idx(0x803, (TRAIN, 28, 28), [*SQUARES, 0]), "is longer than its header declares"),
        (LABELS, idx(0x801, (TRAIN,), [0, 1, 2, 3, 4, 5, 10]), "contains the label 10 instead of 0 to 9"),
    ],
)
@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_that_is_not_mnist_is_refused(tmp_path, name, content, message, zipped):
    write(tmp_path / "mnist", toy_files() | {name: content}, zipped=zipped)
    with pytest.raises(DataError) as caught:
        load_mnist(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / "mnist" / name))
    assert message in str(caught.value)
    assert str(caught.value).endswith("delete it and run sinkformers data fetch mnist.")


def test_the_numbers_of_images_and_labels_must_agree(tmp_path):
    write(tmp_path / "mnist", toy_files() | {LABELS: idx(0x801, (5,), range(5))})
    with pytest.raises(DataError, match=r"contains 7 images but .*train-labels-idx1-ubyte\.gz 5 labels; delete"):
        load_mnist(tmp_path)


def truncated(zipped):
    return zipped[:-20]


def with_a_wrong_sum(zipped):
    return zipped[:-8] + bytes(4) + zipped[-4:]


def with_a_flipped_block(zipped):
    return zipped[:10] + b"\xff" + zipped[11:]


def not_gzip(zipped):
    return b"<html>" + zipped


@pytest.mark.parametrize("damage", [truncated, with_a_wrong_sum, with_a_flipped_block, not_gzip])
def test_a_damaged_gz_is_refused(tmp_path, damage):
    write(tmp_path / "mnist", toy_files())
    file = tmp_path / "mnist" / f"{IMAGES}.gz"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DataError, match=r"ubyte\.gz is damaged \(.+\); delete it and run sinkformers data fetch mnist"):
        load_mnist(tmp_path)


def test_an_unreadable_file_is_refused(tmp_path):
    write(tmp_path / "mnist", toy_files())
    file = tmp_path / "mnist" / f"{IMAGES}.gz"
    file.unlink()
    file.mkdir()
    with pytest.raises(DataError, match=r"ubyte\.gz cannot be read \(Is a directory\); make it readable"):
        load_mnist(tmp_path)


def test_the_real_data(real_data):
    mnist = load_mnist(real_data)
    assert mnist.train.pixels.shape == (60_000, 1, 28, 28)
    assert mnist.test.pixels.shape == (10_000, 1, 28, 28)
    # Counts and moments as published.
    assert mnist.train.labels.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert mnist.test.labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    scaled = mnist.train.pixels / 255
    assert round(float(scaled.mean()), 4) == 0.1307
    assert round(float(scaled.std()), 4) == 0.3081
