"""Write a kernel repository for the Hugging Face hub from the Triton sources: `make hub-kernel`.

Everything in src/sinkformers/kernels/triton is copied, with imports made relative, beside the operator, the card and
the tests in release/hub. The hub's own builder can build the result; as Python needs no compiler, the folders that it
would build are written too, so that the repository can be loaded and uploaded as it is.
"""

import argparse
import ast
import base64
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRITON = ROOT / "src" / "sinkformers" / "kernels" / "triton"
PARTS = Path(__file__).parent / "hub"
OUR_PACKAGE = "sinkformers.kernels.triton"
NAME, MODULE, KERNELS = "sinkhorn-attention", "sinkhorn_attention", "triton_kernels"
BACKENDS = {"cuda": ["7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0"], "rocm": ["gfx90a", "gfx942", "gfx1100"]}
OPS = '''"""The namespace of this build's operators, so that several builds can be loaded at once."""

import torch

ops = torch.ops.{name}


def add_op_namespace_prefix(op_name: str) -> str:
    """The name of an operator with its namespace."""
    return f"{name}::{{op_name}}"
'''


def relative_imports(source: str, path: Path) -> str:
    """The source of the module at `path`, below the package, with the package's imports made relative."""
    dots = "." * len(path.parts)

    def replace(found: re.Match[str]) -> str:
        return f"from {dots}{found[1].removeprefix('.')} import"

    source = re.sub(rf"from {re.escape(OUR_PACKAGE)}((?:\.\w+)*) import", replace, source)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        if any(name.split(".")[0] == "sinkformers" for name in names):
            raise ValueError(f"{path}: line {node.lineno} imports {names[0]}, which the hub does not have.")
    return source


def package_files() -> dict[str, str]:
    """The files of the Python package by their paths in it, without `_ops.py`."""
    files = {name: (PARTS / name).read_text(encoding="utf-8") for name in ("__init__.py", "attention.py")}
    for file in sorted(TRITON.rglob("*.py")):
        path = file.relative_to(TRITON)
        files[f"{KERNELS}/{path.as_posix()}"] = relative_imports(file.read_text(encoding="utf-8"), path)
    return files


def unique_name(files: dict[str, str], backend: str) -> str:
    """A name that another build has only if its files are the same."""
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return f"_{MODULE}_{backend}_{digest[:10]}"


def metadata(files: dict[str, str], backend: str, name: str) -> str:
    """What the loader reads about a build."""
    digests = {path: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for path, text in files.items()}
    return json.dumps(
        {
            "name": NAME,
            "id": name,
            "version": 1,
            "license": "MIT",
            "python-depends": [],
            "backend": {"type": backend, "archs": BACKENDS[backend]},
            "digest": {"algorithm": "sha256", "files": digests},
        },
        indent=2,
    )


def write(folder: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")


def write_repository(out: Path, repo_id: str) -> None:
    """Write the repository to `out`, in place of an earlier one."""
    if out.exists() and not (out / "build.toml").exists():
        raise ValueError(f"{out} is no kernel repository; remove it, or give another folder.")
    shutil.rmtree(out, ignore_errors=True)
    version = re.search(r'__version__ = "(.+)"', (ROOT / "src/sinkformers/__init__.py").read_text(encoding="utf-8"))
    assert version
    for name in ("build.toml", "CARD.md"):
        text = (PARTS / name).read_text(encoding="utf-8")
        write(out, {name: text.replace("@REPO_ID@", repo_id).replace("@VERSION@", version[1])})
    write(out / "tests", {"test_attention.py": (PARTS / "test_attention.py").read_text(encoding="utf-8")})
    files = package_files()
    write(out / "torch-ext" / MODULE, files)
    for backend in BACKENDS:
        name = unique_name(files, backend)
        built = {**files, "_ops.py": OPS.format(name=name)}
        write(out / "build" / f"torch-{backend}", {**built, "metadata.json": metadata(built, backend, name)})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m release.hub_kernel", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/hub-kernel"), help="folder of the repository")
    parser.add_argument("--repo-id", default="sinkformers/sinkhorn-attention", help="its name on the hub")
    given = parser.parse_args()
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", given.repo_id):
        sys.exit(f"--repo-id must be OWNER/NAME, and got {given.repo_id!r}.")
    try:
        write_repository(given.out, given.repo_id)
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    print(f"wrote {given.out}")


if __name__ == "__main__":
    main()
