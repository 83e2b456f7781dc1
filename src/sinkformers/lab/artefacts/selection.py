"""Selection of runs: those of a preset, restricted or extended by options of the command."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Sequence

from sinkformers.lab.artefacts import record_json
from sinkformers.lab.artefacts.artefact import Arm, Artefact, ExperimentError, Preset, Run
from sinkformers.lab.artefacts.catalogue import ARTEFACTS, find

LARGEST = 999_999_999
MOST = 10_000  # largest number of runs per command


def artefact_named(name: str) -> Artefact:
    """Return the artefact; an unknown name raises `ExperimentError` with all names."""
    found = find(name)
    if found is None:
        names = ", ".join(artefact.name for artefact in ARTEFACTS)
        raise ExperimentError(
            f"there is no artefact {name!r}. Choose one of {names}; `sinkformers list` describes them."
        )
    return found


def preset_named(artefact: Artefact, name: str) -> Preset:
    """Return the preset; an unknown name raises `ExperimentError` with all names."""
    if name not in artefact.presets:
        known = ", ".join(artefact.presets)
        raise ExperimentError(f"{artefact.name} has no preset {name!r}. Choose one of {known}.")
    return artefact.presets[name]


def select_runs(
    artefact: Artefact,
    preset_name: str,
    *,
    seeds: str | None = None,
    n_iters: str | None = None,
    arms: Sequence[str] = (),
) -> list[Run]:
    """Return the runs of a preset, ordered by seed. `seeds` and `n_iters` are lists such as `0-4` or `1,3,inf`.

    An arm that other arms continue keeps its own number of iterations.
    """
    preset = preset_named(artefact, preset_name)
    chosen = preset.arms
    if n_iters is not None:
        given = counts("--n-iters", n_iters)
        first = {arm.after for arm in chosen}
        varied = (arm if arm.name in first else _with(arm, count) for count in given for arm in chosen)
        chosen = tuple({arm.name: arm for arm in varied}.values())
    if arms:
        kept = [arm for arm in chosen if any(fnmatch.fnmatchcase(arm.name, pattern) for pattern in arms)]
        if not kept:
            names = ", ".join(arm.name for arm in chosen)
            raise ExperimentError(f"--arms {' '.join(arms)} holds none of the arms of {preset_name}: {names}.")
        chosen = tuple(kept)
    which = preset.seeds if seeds is None else numbers("--seeds", seeds, lowest=0)
    if len(which) * len(chosen) > MOST:
        raise ExperimentError(
            f"{len(which):,} seeds of {len(chosen):,} arms are {len(which) * len(chosen):,} runs, and {MOST:,} are the "
            "most for one command. Choose fewer with --seeds, --n-iters or --arms."
        )
    return [Run(artefact.name, preset_name, arm, seed) for seed in which for arm in chosen]


def numbers(option: str, text: str, *, lowest: int) -> tuple[int, ...]:
    """Parse a list of numbers: `0-2,5` is (0, 1, 2, 5)."""
    ranges: list[range] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:\s*-\s*(\d{1,9}))?\s*", part, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if last < first or first < lowest:
            raise ExperimentError(
                f"{option} must be whole numbers from {lowest} to {LARGEST:,}, such as {lowest}-4 or {lowest},3,5; "
                f"got {_shortened(text)}."
            )
        ranges.append(range(first, last + 1))
    many = sum(map(len, ranges))  # before the ranges are expanded
    if many > MOST:
        raise ExperimentError(f"{option} names {many:,} numbers, and {MOST:,} are the most; got {_shortened(text)}.")
    return tuple(dict.fromkeys(number for each in ranges for number in each))


def counts(option: str, text: str) -> tuple[int | float, ...]:
    """Parse a list of numbers of iterations: `1-3,inf` is (1, 2, 3, math.inf)."""
    parts = [part.strip() for part in text.split(",")]
    finite = [part for part in parts if part != record_json.LIMIT]
    if not finite:
        return (math.inf,)
    try:
        found = numbers(option, ",".join(finite), lowest=1)
    except ExperimentError as error:
        raise ExperimentError(f"{error} The limit is inf.") from None
    return found if len(finite) == len(parts) else (*found, math.inf)


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def _with(arm: Arm, n_iters: int | float) -> Arm:
    """Return the arm with another number of iterations, in its settings and at the end of its name."""
    return Arm(re.sub(r"n-(\d+|inf)$", f"n-{n_iters}", arm.name), {**arm.settings, "n_iters": n_iters}, arm.after)
