"""All results of the theory in numbers.

    sinkformers run theory --preset small --out runs

Writes `theory.json` with every number, and a page with tables and figures that opens offline.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sinkformers.lab.artefacts.artefact import Preset
from sinkformers.lab.artefacts.theory import SMOKE, Sizes
from sinkformers.lab.theory import (
    deep_limit,
    equations,
    first_order,
    high_dimension,
    proposition1,
    proposition2,
    proposition3,
    proposition4,
    rank_collapse,
    regimes,
    theorem1,
    unconverged,
)
from sinkformers.lab.theory.sweep import Sweep


@dataclass(frozen=True)
class Study:
    """One record per result; the names are the keys of theory.json."""

    proposition1: proposition1.Proposition1
    proposition2: proposition2.Proposition2
    proposition3: proposition3.Proposition3
    theorem1: theorem1.Theorem1
    proposition4: proposition4.Proposition4
    equations: equations.Equations
    first_order: first_order.FirstOrder
    high_dimension: high_dimension.HighDimension
    regimes: regimes.Regimes
    deep_limit: deep_limit.DeepLimit
    unconverged: unconverged.Unconverged
    rank_collapse: rank_collapse.RankCollapse


# The figure of convergence: fewer results than the smoke preset, with more values each.
FIGURE = replace(
    SMOKE,
    per_axis=(401, 51),
    eps=((0.03, 0.01, 0.003, 0.001), (0.08, 0.04, 0.02, 0.01)),
    samples=(128, 256, 512, 1024),
    repeats=16,
)


def run(sizes: Sizes, *, started: Callable[[str], None] = lambda name: None) -> Study:
    """Compute all results in float64. `started` is called with the name of each result before it is computed."""
    found = {}
    for name, result in _results(sizes).items():
        started(name)
        found[name] = result()
    return Study(**found)


def convergence(sizes: Sizes = FIGURE) -> list[Sweep]:
    """Compute only the errors by ε and by number of particles."""
    theorem, proposition = (_results(sizes)[name]() for name in ("theorem1", "proposition4"))
    return [*theorem.by_eps[:2], proposition.by_eps[1], theorem.by_particles[-1]]


def _results(sizes: Sizes) -> dict[str, Callable[[], Any]]:
    per_axis, eps = sizes.per_axis, sizes.eps
    return {
        "proposition1": lambda: proposition1.run(n=sizes.particles),
        "proposition2": lambda: proposition2.run(n=sizes.particles),
        "proposition3": lambda: proposition3.run(n=min(sizes.particles, 13)),
        "theorem1": lambda: theorem1.run(
            per_axis=per_axis, eps=eps, sample_eps=0.05, samples=sizes.samples, repeats=sizes.repeats
        ),
        "proposition4": lambda: proposition4.run(eps=1e-5, local=41, per_axis=per_axis, widths=eps),
        "equations": lambda: equations.run(
            n=per_axis[0] // 5 * 2 + 1, cells=801, eps=sizes.flow_eps, plane=sizes.plane, plane_eps=sizes.plane_eps
        ),
        "first_order": lambda: first_order.run(per_axis=per_axis, eps=eps),
        "high_dimension": lambda: high_dimension.run(
            dim=10,
            eps=(1e-1, 1e-2, 1e-3, 1e-4),
            sample_eps=(16.0, 4.0, 1.0, 0.25, 0.0625),
            samples=sizes.high_dimension_samples,
        ),
        "regimes": lambda: regimes.run(
            per_axis=sizes.cloud, eps=0.4, times=(0.0, 0.1, 0.2, 0.4), contraction_times=(0.0, 0.5, 1.0, 2.0, 4.0)
        ),
        "deep_limit": lambda: deep_limit.run(depths=sizes.depths, n=sizes.particles),
        "unconverged": lambda: unconverged.run(n=sizes.particles, eps=(1.0, 0.3, 0.1)),
        "rank_collapse": lambda: rank_collapse.run(depths=(0, 1, 2, 4, 8, 16), n=sizes.particles),
    }


def make(preset: Preset, folder: Path) -> str:
    """Compute all results, write theory.json and the page, and return the notes, with the two corrected constants."""
    from sinkformers.lab.theory import page

    study = run(preset.config, started=lambda name: print(f"{page.TITLES[name]} …", flush=True))
    (folder / "theory.json").write_text(json.dumps(asdict(study), indent=1, ensure_ascii=False) + "\n", "utf-8")
    page.write(study, folder, about=preset.about)
    return "\n".join(note for name in page.TITLES for note in page.notes(name, getattr(study, name)))
