"""The limit of Sinkhorn's algorithm: attention beside SDPA and n_iters 21, a whole model, and solvers side by side."""

import math
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.contest import Entry, compete
from benchmarks.measurement import Measurement
from benchmarks.progress import Progress
from benchmarks.settings import Settings
from benchmarks.solvers import NEWTON
from benchmarks.suites.conversion import ORIGINAL, model_entry
from benchmarks.suites.entries import SHAPES, attention_entry
from benchmarks.suites.limit_entries import curves, pick_solvers, solver_entry, solver_label
from benchmarks.suites.limit_model import NAME, minilm

ROWS = ("sdpa", "native", "torch")
LABELS = ("64 × 128", "16 × 512", "8 × 1024")
STDS = (1.0, 4.0, 8.0)
TOL = 1e-3
MANY = 21  # iterations to compare with
MODEL = f"{NAME}, inference"
MODEL_N_ITERS = (None, 3, MANY, math.inf)
N, QUICK_N = 1024, 256
SOLVER_STDS = {4.0: False, 8.0: False, 16.0: True, 30.0: True}  # whether ours is alone: others would take minutes
CURVE_STDS = (4.0, 8.0, 16.0)
SECONDS, MODEL_SECONDS, SOLVER_SECONDS = 15.0, 30.0, 10.0


def run(settings: Settings, progress: Progress) -> Iterator[Measurement]:
    for label in LABELS[:1] if settings.quick else LABELS:
        for std in STDS:
            entries = list(_attention(label, std, settings))
            yield from compete("limit", attention_label(label, std), entries, settings.plan(SECONDS), progress)
    entries = [model_entry(minilm(settings.data), n_iters, training=False) for n_iters in MODEL_N_ITERS]
    yield from compete("limit", MODEL, entries, settings.plan(MODEL_SECONDS), progress, baseline=ORIGINAL)
    n = QUICK_N if settings.quick else N
    for curve in curves(n, CURVE_STDS):
        progress.show(curve)
        yield curve
    for std, alone in SOLVER_STDS.items():  # last, since some have threads of their own
        entries = [solver_entry(solver, n, std) for solver in pick_solvers(settings, ours=alone)]
        plan = settings.plan(SOLVER_SECONDS, least=1)
        yield from compete("limit", solver_label(n, std), entries, plan, progress, baseline=NEWTON)


def attention_label(shape: str, std: float) -> str:
    return f"{shape}, std {std:g}"


def _attention(label: str, std: float, settings: Settings) -> Iterator[Entry]:
    case = replace(SHAPES[label], n_iters=MANY, std=std)
    for row in settings.pick(ROWS):
        if row.name in ("sdpa", "native"):
            yield attention_entry(row, case)
        if row.name != "sdpa":
            yield attention_entry(row, replace(case, tol=TOL))
