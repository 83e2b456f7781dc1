"""The repository for the Hugging Face hub: complete, with relative imports, and loaded by the `kernels` package."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from release import hub_kernel

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    out = tmp_path_factory.mktemp("hub") / "kernel"
    hub_kernel.write_repository(out, "someone/sinkhorn-attention")
    return out


def test_every_triton_source_is_in_every_build(repository):
    sources = {path.relative_to(hub_kernel.TRITON) for path in hub_kernel.TRITON.rglob("*.py")}
    for folder in ("torch-ext/sinkhorn_attention", "build/torch-cuda", "build/torch-rocm"):
        kernels = repository / folder / "triton_kernels"
        assert {path.relative_to(kernels) for path in kernels.rglob("*.py")} == sources


def test_only_torch_triton_and_the_kernel_itself_are_imported(repository):
    for file in (repository / "torch-ext").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        imported = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        imported += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
        outside = {name.split(".")[0] for name in imported}
        assert outside <= {"torch", "triton", *sys.stdlib_module_names}, file


def test_an_import_of_the_library_is_refused():
    with pytest.raises(ValueError, match=r"forward\.py: line 2 imports sinkformers\.core, which the hub does not have"):
        hub_kernel.relative_imports("import torch\nfrom sinkformers.core import ranges\n", Path("forward.py"))


def test_builds_of_other_sources_have_other_names(repository):
    names = {json.loads(file.read_text())["id"] for file in repository.glob("build/*/metadata.json")}
    files = hub_kernel.package_files()
    assert names == {hub_kernel.unique_name(files, backend) for backend in ("cuda", "rocm")}
    changed = {**files, "attention.py": files["attention.py"] + "\n"}
    assert hub_kernel.unique_name(changed, "cuda") not in names
    assert all(f'"{name}::' in "".join(f.read_text() for f in repository.glob("build/*/_ops.py")) for name in names)


def test_the_folder_of_somebody_else_is_not_removed(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="is no kernel repository"):
        hub_kernel.write_repository(tmp_path, "someone/sinkhorn-attention")
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.triton
def test_its_own_tests_pass_in_the_interpreter(repository):
    """They load it with `get_local_kernel`, in a process of their own, where nothing else has set up Triton."""
    pytest.importorskip("triton", reason="the triton extra is not installed")
    pytest.importorskip("kernels", reason="the hub extra is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_attention.py"]
    result = subprocess.run(
        command, cwd=repository, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"^8 passed", result.stdout, re.MULTILINE), result.stdout


@pytest.mark.triton
def test_the_hubs_builder_reads_its_configuration(repository):
    pytest.importorskip("kernels", reason="the hub extra is not installed")
    from kernels._rust import Build, Metadata

    backends = Build.open(repository).general.backends
    assert sorted(str(backend).lower().split(".")[-1] for backend in backends) == ["cuda", "rocm"]
    for file in repository.glob("build/*/metadata.json"):
        described = Metadata.read_from_file(file)
        assert (described.name.python_name, described.version) == ("sinkhorn_attention", 1)
