"""Fake runs, written to disk as a training would write them."""

import json
from pathlib import Path

MACHINE = {"cpu": "abacus", "cores": 2}


def epoch(number, accuracy, *, gap=0.5, layers=("blocks.0.attention",)):
    """Return one entry of a log; epoch 0 is before training."""
    return {
        "epoch": number,
        "rate": 0.001,
        "train": {"accuracy": accuracy + 0.01, "loss": 1 - accuracy} if number else {},
        "test": {"accuracy": accuracy, "loss": 1.1 - accuracy},
        "columns": {"gap": gap, "within_0.1": 0.25, "quantiles": [1 - gap, 1 - gap / 2, 1, 1 + gap / 2, 1 + gap]},
        "layers": [
            {"name": name, "gap": gap, "within_0.1": 0.25, "row_error": 1e-7, "column_error": 2 * gap}
            for name in layers
        ],
    }


def write_run(root, *, artefact="figure6", preset="small", seed=0, n_iters=1, final=0.9, **other):
    """Write a finished run of three epochs; `other` holds further settings, and overrides of `metrics` and `run`."""
    metrics, run = other.pop("metrics", {}), other.pop("run", {})
    arm = other.pop("arm", f"n-{n_iters}")
    epochs = other.pop("epochs", None) or [epoch(0, 0.1), epoch(1, final / 2), epoch(2, final)]
    folder = Path(root, artefact, preset, arm, f"seed-{seed}")
    written = {
        "artefact": artefact,
        "preset": preset,
        "arm": arm,
        "seed": seed,
        "settings": {**other, "n_iters": n_iters},
        "config": {"epochs": 2, "batch": 100},
        "data": {"name": "mnist", "train": 600, "test": 100},
        "parameters": 51850,
        "metric": "accuracy",
        "epochs": epochs,
    }
    about = {
        "versions": {"python": "3.11.7", "torch": "2.13.0", "sinkformers": "0.1.0"},
        "commit": "0123abc",
        "machine": MACHINE,
        "processes": 1,
        "threads": 1,
        "device": "cpu",
        "precision": "no",
        "seconds_per_epoch": [2.0, 2.0],
        "resumed": 0,
        "finished": "2026-01-01T00:00:00",
    }
    folder.mkdir(parents=True)
    (folder / "metrics.json").write_text(json.dumps(written | metrics), encoding="utf-8")
    (folder / "run.json").write_text(json.dumps(about | run), encoding="utf-8")
    return folder


def write_unfinished(root, *, arm="n-1", seed=9, epochs=3, artefact="figure6", preset="small"):
    """Write a run in training: its log has a line before training, `epochs` more, and one that is not complete."""
    folder = Path(root, artefact, preset, arm, f"seed-{seed}")
    folder.mkdir(parents=True)
    lines = "".join(json.dumps(epoch(number, 0.5)) + "\n" for number in range(epochs + 1))
    (folder / "log.jsonl").write_text(lines + '{"epoch": 99, "tr', encoding="utf-8")
    return folder
