"""What the source distribution and the wheel of `make wheel` contain."""

import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

import sinkformers

pytestmark = pytest.mark.wheel
ROOT = Path(__file__).parents[2]
NATIVE = "sinkformers/kernels/native"


@pytest.fixture(scope="module")
def wheel():
    (file,) = (ROOT / "dist").glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        yield file, archive


@pytest.fixture(scope="module")
def source():
    (file,) = (ROOT / "dist").glob("*.tar.gz")
    with tarfile.open(file) as archive:
        return {name.partition("/")[2]: archive.getmember(name).size for name in archive.getnames()}


def python_files(folder: Path) -> set[str]:
    return {path.relative_to(ROOT / "src").as_posix() for path in folder.rglob("*.py")}


def test_the_wheel_serves_every_python_on_linux_of_this_kind(wheel):
    file, archive = wheel
    tags = rf"sinkformers-{re.escape(sinkformers.__version__)}-py3-none-(manylinux_2_\d+_\w+\.?)+\.whl"
    assert re.fullmatch(tags, file.name)
    (described,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    assert f"\nVersion: {sinkformers.__version__}\n" in archive.read(described).decode()


def test_the_wheel_has_the_package_and_nothing_else(wheel):
    names = set(wheel[1].namelist())
    ours = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert {name for name in ours if name.endswith(".py")} == python_files(ROOT / "src")
    others = {name for name in ours if not name.endswith((".py", "/"))}
    package = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*") if path.is_file()}
    data = {name for name in package if not name.endswith((".py", ".pyc", ".so", ".h", ".cpp", "CMakeLists.txt"))}
    assert others == data | {f"{NATIVE}/sinkformers_native.so"}
    # An archive or a folder of images would be larger than all else together.
    assert max(info.file_size for info in wheel[1].infolist() if not info.filename.endswith(".so")) < 200_000
    assert wheel[0].stat().st_size < 4e6


def test_the_library_shares_the_threads_of_torch(wheel, tmp_path):
    library = wheel[1].extract(f"{NATIVE}/sinkformers_native.so", tmp_path)
    dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"NEEDED.*\[(.+?)\]", dynamic))
    assert "libgomp.so.1" in needed
    assert not any("-" in name.removeprefix("ld-linux-") for name in needed)  # a vendored copy has a hash in its name


def test_the_source_has_every_file_that_a_build_and_the_tests_need(source):
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    kept_out = ("results/", "benchmarks/records/", "docs/assets/", ".ci/", ".github/", ".pre-commit-config.yaml")
    expected = {name for name in tracked if not name.startswith(kept_out)} | {"docs/assets/attention.png"}
    assert set(source) == expected | {"PKG-INFO"}
    assert {f"src/{NATIVE}/{name}" for name in ("CMakeLists.txt", "library.cpp", "attention.cpp", "simd.h")} <= expected


def test_the_source_has_no_data_and_no_records(source):
    assert not [name for name in source if name.startswith(("results/", "runs/", "build/", "dist/", ".venv"))]
    assert sum(source.values()) < 5e6
