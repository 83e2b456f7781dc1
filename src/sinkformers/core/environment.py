"""What a message, a file or a report names: versions and devices."""

import platform
from functools import cache

import torch

from sinkformers import __version__

_TRITONS = ("triton", "pytorch-triton-rocm", "pytorch-triton", "triton-windows")


@cache
def versions() -> dict[str, str]:
    """The versions that numbers and times depend on, by name."""
    found = {"sinkformers": __version__, "torch": str(torch.__version__)}
    triton = next((version for name in _TRITONS if (version := _installed(name))), None)
    others = {"triton": triton, "cuda": torch.version.cuda, "hip": torch.version.hip}
    return (
        found | {name: version for name, version in others.items() if version} | {"python": platform.python_version()}
    )


def device_name(device: torch.device) -> str:
    """The model of a device and its architecture, without its number, since equal devices are alike."""
    if device.type == "cuda" and torch.cuda.is_available():
        found = torch.cuda.get_device_properties(device)
        architecture = getattr(found, "gcnArchName", "") if torch.version.hip else f"sm_{found.major}{found.minor}"
        return f"{found.name} ({architecture})"
    if device.type == "cpu":
        return f"CPU ({processor()}, {torch.get_num_threads()} threads)"
    return device.type


@cache
def processor() -> str:
    """The name of the processor, or of its architecture where the system does not tell."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = (line.partition(":")[2].strip() for line in file if line.lower().startswith("model name"))
            return next(names, None) or platform.machine()
    except OSError:
        return platform.processor() or platform.machine()


def _installed(name: str) -> str | None:
    from importlib import metadata  # takes longer to import than everything else here

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
