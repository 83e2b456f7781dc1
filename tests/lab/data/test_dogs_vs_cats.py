"""Dogs vs. Cats: decoded once, like a reference, from an archive or a folder; damage is reported."""

import io
import os
import sys
import zipfile

import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate

from sinkformers.lab.data import DataError, load_dogs_vs_cats
from sinkformers.lab.data.sets import dogs_vs_cats, photographs
from sinkformers.lab.data.store.decoded import keep_decoded

CATS, DOGS, SIZE = 7, 11, 5


def jpeg(colour, *, mode="RGB"):
    content = io.BytesIO()
    Image.new(mode, (31, 17), colour).save(content, "JPEG", quality=95)
    return content.getvalue()


def toy_files():
    """Return red cats and blue dogs, brighter with higher numbers."""
    cats = {f"cat.{n}.jpg": jpeg((20 * n + 60, 0, 0)) for n in range(CATS)}
    dogs = {f"dog.{n}.jpg": jpeg((0, 0, 15 * n + 60)) for n in range(DOGS)}
    return dogs | cats


def zipped(folder, files):
    (folder / "dogs-vs-cats").mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / "dogs-vs-cats" / "train.zip", "w") as archive:
        archive.writestr("train/", b"")
        archive.writestr("train/README.txt", b"")
        for name, content in files.items():
            archive.writestr(name if "/" in name else f"train/{name}", content)
    return folder


def unpacked(folder, files):
    (folder / "dogs-vs-cats" / "train").mkdir(parents=True)
    for name, content in files.items():
        (folder / "dogs-vs-cats" / "train" / name).write_bytes(content)
    return folder


def kept(folder):
    return sorted(file.name for file in (folder / "dogs-vs-cats" / "decoded").iterdir())


@pytest.mark.parametrize("lay_out", [zipped, unpacked])
def test_photographs_are_loaded_with_their_labels_in_order(tmp_path, lay_out):
    pets = load_dogs_vs_cats(lay_out(tmp_path, toy_files()), SIZE)
    assert pets.name == "dogs-vs-cats"
    assert pets.classes == ("cat", "dog")
    for images, n_cats, n_dogs in ((pets.train, 6, 9), (pets.test, 1, 2)):
        assert images.pixels.shape == (n_cats + n_dogs, 3, SIZE, SIZE)
        assert images.pixels.dtype == torch.uint8
        assert images.labels.dtype == torch.int64
        assert images.labels.bincount().tolist() == [n_cats, n_dogs]
        red, green, blue = images.pixels.float().mean(dim=(2, 3)).T
        assert torch.equal(red > 50, images.labels == 0)
        assert torch.equal(blue > 50, images.labels == 1)
        assert (green < 5).all()
        # Sorted as numbers: dog.10 comes after dog.9, and not after dog.1.
        for brightness, label in ((red, 0), (blue, 1)):
            assert brightness[images.labels == label].diff().gt(10).all()


def test_resizing_is_bilinear_and_antialiased(tmp_path):
    noise = torch.randint(256, (37, 53, 3), dtype=torch.uint8)
    content = io.BytesIO()
    Image.fromarray(noise.numpy()).save(content, "JPEG", quality=95)
    files = toy_files() | {"cat.999.jpg": content.getvalue()}
    pets = load_dogs_vs_cats(zipped(tmp_path, files), 13)

    decoded = torch.tensor(list(Image.open(content).tobytes()), dtype=torch.float64).view(37, 53, 3).movedim(-1, 0)
    expected = interpolate(decoded[None], size=(13, 13), mode="bilinear", antialias=True)[0]
    images = [*pets.train.pixels, *pets.test.pixels]
    # Pillow rounds to a level after each of two passes.
    assert min(float((image - expected).abs().max()) for image in images) <= 1.0


def test_a_grey_photograph_gets_three_planes(tmp_path):
    pets = load_dogs_vs_cats(zipped(tmp_path, {name: jpeg(90, mode="L") for name in toy_files()}), SIZE)
    assert pets.train.pixels.eq(90).all()


def test_photographs_are_decoded_once_per_size(tmp_path, monkeypatch):
    folder = zipped(tmp_path, toy_files())
    reported = []
    first = load_dogs_vs_cats(folder, SIZE, progress=lambda *now: reported.append(now))
    assert reported[-1] == ("decoding photographs", CATS + DOGS, CATS + DOGS)
    load_dogs_vs_cats(folder, SIZE + 2)
    (small, large) = kept(folder)
    assert (folder / "dogs-vs-cats" / "decoded" / small).stat().st_size == (CATS + DOGS) * 3 * SIZE**2
    assert (folder / "dogs-vs-cats" / "decoded" / large).stat().st_size == (CATS + DOGS) * 3 * (SIZE + 2) ** 2

    monkeypatch.setattr(dogs_vs_cats, "_decode", None)
    again = load_dogs_vs_cats(folder, SIZE)
    assert torch.equal(again.train.pixels, first.train.pixels)
    assert torch.equal(again.test.pixels, first.test.pixels)


def test_writing_into_the_tensor_does_not_change_the_file(tmp_path):
    folder = zipped(tmp_path, toy_files())
    load_dogs_vs_cats(folder, SIZE).train.pixels.fill_(255)
    assert not load_dogs_vs_cats(folder, SIZE).train.pixels.eq(255).any()


@pytest.mark.parametrize("lay_out", [zipped, unpacked])
def test_a_changed_photograph_is_decoded_again(tmp_path, lay_out):
    # All of the same length, as two versions of a photograph may be.
    files = {name: content.ljust(2000, b"\0") for name, content in toy_files().items()}
    folder = lay_out(tmp_path, files)
    load_dogs_vs_cats(folder, SIZE)
    green = jpeg((0, 200, 0)).ljust(2000, b"\0")
    if lay_out is zipped:
        zipped(folder, files | {"cat.3.jpg": green})
    else:
        (folder / "dogs-vs-cats" / "train" / "cat.3.jpg").write_bytes(green)
    pets = load_dogs_vs_cats(folder, SIZE)
    everything = torch.cat([pets.train.pixels, pets.test.pixels])
    assert everything[:, 1].amax(dim=(1, 2)).gt(100).sum() == 1
    assert len(kept(folder)) == 2


def test_a_kept_file_of_the_wrong_size_is_decoded_again(tmp_path):
    folder = zipped(tmp_path, toy_files())
    first = load_dogs_vs_cats(folder, SIZE).train.pixels.clone()
    file = folder / "dogs-vs-cats" / "decoded" / kept(folder)[0]
    file.write_bytes(file.read_bytes()[:-1])
    assert torch.equal(load_dogs_vs_cats(folder, SIZE).train.pixels, first)


def test_the_users_cache_is_used_if_the_data_folder_is_read_only(tmp_path, cache, read_only):
    folder = zipped(tmp_path, toy_files())
    read_only(folder / "dogs-vs-cats")
    load_dogs_vs_cats(folder, SIZE)
    assert not (folder / "dogs-vs-cats" / "decoded").exists()
    assert [file.suffix for file in (cache / "decoded").iterdir()] == [".rgb"]


def test_no_writable_folder_is_one_sentence(tmp_path, cache, read_only):
    folder = zipped(tmp_path, toy_files())
    read_only(folder / "dogs-vs-cats")
    read_only(cache.parent)
    with pytest.raises(DataError, match=r"written to none of .*dogs-vs-cats.decoded, .*; make one of them writable"):
        load_dogs_vs_cats(folder, SIZE)


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path):
    def chunks():
        yield b"some"
        raise OSError(28, os.strerror(28))

    with pytest.raises(DataError, match=r"cannot be written to .* \(No space left on device\); free some space"):
        keep_decoded([tmp_path], "name", chunks())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"no photograph", jpeg((9, 9, 9))[:-300]])
@pytest.mark.parametrize("lay_out", [zipped, unpacked])
def test_a_corrupt_photograph_is_named(tmp_path, lay_out, content):
    folder = lay_out(tmp_path, toy_files() | {"dog.4.jpg": content})
    with pytest.raises(DataError, match=r"train/dog\.4\.jpg is not a readable JPEG; replace it, or remove it"):
        load_dogs_vs_cats(folder, SIZE)
    assert not kept(folder)


def test_a_damaged_member_is_named(tmp_path):
    folder = zipped(tmp_path, toy_files())
    archive = folder / "dogs-vs-cats" / "train.zip"
    content = bytearray(archive.read_bytes())
    content[content.index(b"train/cat.5.jpg") + 200] ^= 0xFF
    archive.write_bytes(content)
    with pytest.raises(
        DataError, match=r"train/cat\.5\.jpg in .*train\.zip cannot be read \(Bad CRC-32.*\); delete the"
    ):
        load_dogs_vs_cats(folder, SIZE)


def test_a_member_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(photographs, "LARGEST_FILE", 100)
    with pytest.raises(DataError, match=r"in .*train\.zip is larger than 0 MB, so it is not a photograph"):
        load_dogs_vs_cats(zipped(tmp_path, toy_files()), SIZE)


def test_a_missing_set_is_refused(tmp_path):
    with pytest.raises(
        DataError, match=r"neither .*train\.zip nor .*train; get train\.zip from https://www\.kaggle\.com"
    ):
        load_dogs_vs_cats(tmp_path, SIZE)


@pytest.mark.parametrize("lay_out", [zipped, unpacked])
def test_at_least_two_of_each_class_are_needed(tmp_path, lay_out):
    files = {f"{name}.{n}.jpg": jpeg((100, 100, 100)) for name in ("cat", "dog") for n in range(2)}
    pets = load_dogs_vs_cats(lay_out(tmp_path / "enough", files), SIZE)
    assert sorted(pets.train.labels.tolist()) == sorted(pets.test.labels.tolist()) == [0, 1]
    del files["dog.1.jpg"]
    with pytest.raises(DataError, match=r"contains 2 files named cat\.N\.jpg and 1 named dog\.N\.jpg, and at least"):
        load_dogs_vs_cats(lay_out(tmp_path / "fewer", files), SIZE)


def test_a_name_that_occurs_twice_is_refused(tmp_path):
    files = toy_files() | {"more/dog.2.jpg": jpeg((1, 2, 3))}
    with pytest.raises(DataError, match=r"contains dog\.2\.jpg 2 times, so train and test parts could overlap"):
        load_dogs_vs_cats(zipped(tmp_path, files), SIZE)


def test_a_file_that_is_not_a_zip_archive_is_refused(tmp_path):
    zipped(tmp_path, {})
    (tmp_path / "dogs-vs-cats" / "train.zip").write_bytes(b"<html>Sign in</html>")
    with pytest.raises(
        DataError, match=r"train\.zip is not a readable zip archive \(File is not a zip file\); delete it"
    ):
        load_dogs_vs_cats(tmp_path, SIZE)


@pytest.mark.parametrize("size", [0, -1, 2.5, "64"])
def test_a_size_is_a_whole_number_of_pixels(tmp_path, size):
    with pytest.raises(ValueError, match=f"size must be a whole number of pixels ≥ 1; got {size!r}"):
        load_dogs_vs_cats(tmp_path, size)


def test_missing_pillow_is_one_sentence(tmp_path, monkeypatch):
    folder = zipped(tmp_path, toy_files())
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"decoding photographs needs pillow; install .* '\.\[experiments\]'"):
        load_dogs_vs_cats(folder, SIZE)


def test_the_real_data(real_data, tmp_path):
    """Use a link, so that nothing is written next to the real data."""
    (tmp_path / "dogs-vs-cats").mkdir()
    (tmp_path / "dogs-vs-cats" / "train.zip").symlink_to(real_data / "dogs-vs-cats" / "train.zip")
    pets = load_dogs_vs_cats(tmp_path, 16)
    n_test = len(pets.test.labels)
    assert len(pets.train.labels) == 4 * n_test
    assert pets.test.labels.bincount().tolist() == [n_test // 2, n_test // 2]
    assert 90 < pets.train.pixels.float().mean() < 140
