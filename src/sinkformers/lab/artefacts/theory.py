"""The theory in numbers: the sizes at which `sinkformers.lab.theory` computes its results.

sinkformers run theory --preset small --out runs
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sinkformers.lab.artefacts.artefact import Artefact, Preset


@dataclass(frozen=True)
class Sizes:
    """Problem sizes, which determine the run time."""

    particles: int  # in the tests of identities
    per_axis: tuple[int, int]  # quadrature points per axis in 1-D and 2-D
    eps: tuple[tuple[float, ...], tuple[float, ...]]
    samples: tuple[int, ...]
    repeats: int
    high_dimension_samples: tuple[int, ...]
    flow_eps: tuple[float, ...]
    plane: int  # grid cells per axis of the plane, for the nonlocal equation
    plane_eps: tuple[float, ...]
    cloud: int  # grid points per axis of the clouds that flow
    depths: tuple[int, ...]


SMOKE = Sizes(
    particles=11,
    per_axis=(201, 31),
    eps=((0.02, 0.01, 0.005, 0.0025), (0.08, 0.04, 0.02)),
    samples=(64, 128, 256),
    repeats=4,
    high_dimension_samples=(128, 512),
    flow_eps=(0.04, 0.02, 0.01),
    plane=21,
    plane_eps=(0.32, 0.16, 0.08),
    cloud=21,
    depths=(4, 8, 16),
)
SMALL = Sizes(
    particles=31,
    per_axis=(1001, 71),
    eps=((0.03, 0.01, 0.003, 0.001, 0.0005, 0.00025), (0.08, 0.04, 0.02, 0.01, 0.005)),
    samples=(128, 256, 512, 1024, 2048),
    repeats=8,
    high_dimension_samples=(256, 1024, 4096),
    flow_eps=(0.04, 0.02, 0.01, 0.005, 0.0025),
    plane=41,
    plane_eps=(0.32, 0.16, 0.08, 0.04),
    cloud=31,
    depths=(4, 8, 16, 32, 64, 128),
)


def make(preset: Preset, folder: Path) -> str:
    """Compute all results, write them to `folder`, and return the text to print."""
    from sinkformers.lab.theory import study

    return study.make(preset, folder)


THEORY = Artefact(
    name="theory",
    title="Flows, energies and limits in numbers",
    paper="Theorem 1 with the constant 1, Proposition 4 with W_K⁻¹; here ½ and W_K⁻ᵀ",
    presets={
        "small": Preset(
            about="up to 5,041 particles on a grid and 4,096 sampled, float64",
            takes="minutes",
            data="",
            seeds=(),
            arms=(),
            config=SMALL,
        ),
        "smoke": Preset(
            about="up to 961 particles on a grid and 512 sampled, float64",
            takes="seconds",
            data="",
            seeds=(),
            arms=(),
            config=SMOKE,
        ),
    },
    make=make,
)
