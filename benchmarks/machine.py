"""Where and with what a run was made."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
PACKAGES = ("torch", "sinkformers", "numpy", "POT", "geomloss", "pykeops", "ott-jax", "jax")
ISA = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "asimd", "sve")


def machine(threads: int) -> dict[str, Any]:
    info = _cpu_info()
    flags = set(info.get("flags", info.get("features", "")).split())
    return {
        "cpu": info.get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "isa": [name for name in ISA if name in flags],
        "threads": threads,
        "system": f"{platform.system()} {platform.machine()}",
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> dict[str, Any]:
    """The commit, and whether anything but the records and the page made from them differs from it."""
    found = _git("rev-parse", "--short=12", "HEAD")
    changed = _git("status", "--porcelain", "--", ".", ":!benchmarks/records", ":!docs")
    return {"commit": found or "unknown", "dirty": bool(changed)}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _cpu_info() -> dict[str, str]:
    """The first processor's entries, by lower-case name."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip().lower(): value.strip() for name, _, value in pairs}
