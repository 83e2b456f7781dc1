"""What the results depend on: devices, processor, threads, compiled kernels, workspace."""

import os
import platform
from pathlib import Path
from typing import Any

import torch

from sinkformers.core.backend import workspace_limit
from sinkformers.core.backends.native import instruction_set
from sinkformers.core.environment import device_name, processor, versions

INSTRUCTION_SETS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "asimd", "sve")


def devices() -> list[torch.device]:
    """The CPU, and every accelerator that torch can use."""
    found = [torch.device("cpu")]
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        found += [torch.device(accelerator.type, index) for index in range(torch.accelerator.device_count())]
    return found


def machine(device: torch.device) -> dict[str, Any]:
    """The machine as records describe it, and the device that was tested. No names of hosts or users."""
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "isa": cpu_features(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "device": device_name(device),
    }


def cpu_features() -> list[str]:
    """The instruction sets of the processor that matter here, where the system lists them."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return []
    lines = (line.lower().partition(":") for line in text.splitlines())
    flags = next((value.split() for name, _, value in lines if name.strip() in ("flags", "features")), [])
    return [name for name in INSTRUCTION_SETS if name in flags]


def described(found: list[torch.device]) -> list[str]:
    """The machine as lines of text."""
    features = ", ".join(cpu_features()) or f"torch uses {torch.backends.cpu.get_cpu_capability()}"
    used, missing = instruction_set()
    native = f"built, using {used}" if used else f"not used: {missing}"
    return [
        ", ".join(f"{name} {version}" for name, version in versions().items()),
        f"{platform.system()} {platform.machine()}, {processor()}, {os.cpu_count()} cores ({features})",
        f"threads: {torch.get_num_threads()}",
        f"compiled CPU kernels: {native}",
        f"their workspace: {workspace_limit() / 2**20:.0f} MiB",
        *(f"device {device}: {device_name(device)}" for device in found),
    ]
