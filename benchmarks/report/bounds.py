"""How long a call may take at most, in units of the time of its baseline, by suite, shape and n_iters."""

import math

from benchmarks.case import BAND_WINDOW, BIAS, RANDOM_WINDOW, TRAINED_BIAS

Bounds = dict[str, dict[float, float]]


def _counts(few: float, some: float, many: float) -> dict[float, float]:
    """Return bounds for n_iters 3, 5 and 21."""
    return {3: few, 5: some, 21: many}


ATTENTION: Bounds = {
    "256 × 64": _counts(0.70, 0.75, 0.90),
    "64 × 128": _counts(0.70, 0.75, 0.90),
    "128 × 197": _counts(0.80, 0.80, 0.95),
    "16 × 512": _counts(0.85, 0.90, 1.05),
    "8 × 1024": _counts(1.00, 1.05, 1.20),
    "2 × 4096": _counts(0.85, 0.88, 1.05),
}
INFERENCE: Bounds = {shape: {5: 0.90 if int(shape.split()[-1]) <= 512 else 1.15} for shape in ATTENTION}
MASKED: Bounds = {
    f"128 × 197, {BIAS}": _counts(0.80, 0.80, 0.90),
    f"128 × 197, {TRAINED_BIAS}": _counts(0.80, 0.80, 0.90),
    f"128 × 197, {RANDOM_WINDOW}": {5: 0.80},
    f"128 × 197, {BAND_WINDOW}": {5: 0.80},
    f"16 × 512, {BIAS}": _counts(0.85, 0.85, 1.00),
    f"16 × 512, {BIAS}, forward": {5: 0.95},
    f"16 × 512, {TRAINED_BIAS}": _counts(0.90, 0.90, 1.00),
    f"16 × 512, {RANDOM_WINDOW}": {5: 0.80},
    f"16 × 512, {BAND_WINDOW}": {5: 0.80},
}
CAUSAL: Bounds = {"16 × 512": {3: 1.3}, "8 × 1024": {3: 1.3}, "2 × 4096": {3: 1.5}}
TOKEN: Bounds = {"8 × 4096, one token": {3: 1.5}}
HALF: Bounds = {
    "256 × 64, bfloat16": _counts(0.80, 0.80, 1.05),
    "64 × 128, bfloat16": _counts(0.80, 0.80, 1.05),
    "128 × 197, bfloat16": _counts(0.80, 0.80, 1.05),
    "16 × 512, bfloat16": _counts(0.80, 0.80, 1.05),
    "8 × 1024, bfloat16": _counts(0.80, 0.80, 1.05),
    "2 × 4096, bfloat16": _counts(0.80, 0.80, 1.05),
    "8 × 1024, float16": _counts(0.30, 0.30, 0.30),
}
LONG: Bounds = {
    "8 × 8192, 64 MiB": _counts(1.10, 1.30, 3.00),
    "8 × 8192, 1 GiB": _counts(0.95, 1.00, 1.40),
}
CALL: Bounds = {"1 × 16": {3: 1.6}}
OPERATOR: Bounds = {
    "(256, 32, 32)": _counts(1.5, 2.0, 4.0),
    "(64, 64, 64)": _counts(1.3, 1.5, 2.5),
    "(1, 20000, 64)": _counts(1.5, 2.0, 3.5),
    "(1, 4096, 4096)": _counts(1.2, 1.3, 1.8),
}
TRAINING: Bounds = {"ViT": {3: 1.0}, "text encoder": {5: 1.0}}
LIMIT: Bounds = {  # of the time at n_iters 21
    f"{shape}, std {std}": {math.inf: bound}
    for shape in ("64 × 128", "16 × 512", "8 × 1024")
    for std, bound in ((1, 1.15), (4, 1.5), (8, 3.0))
}
LIMIT_MODEL: Bounds = {"all-MiniLM-L6-v2, inference": {math.inf: 1.5}}
LIMIT_PRODUCTS = {"n = 1024, std 8": 150, "n = 1024, std 16": 400, "n = 1024, std 30": 800}
LIMIT_POT = {"n = 1024, std 8": 30.0}  # how many times longer POT takes
CONVERSION: Bounds = {f"{model}, training step": {3: 1.0} for model in ("Swin", "BEiT", "T5 encoder")}
