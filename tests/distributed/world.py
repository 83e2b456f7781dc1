"""Run checks in several processes at once, with gloo on the loopback interface, and collect what they found.

Every process imports torch, which takes seconds, so that one world runs many checks. Called with
`python -m tests.distributed.world MODULE RANK SIZE FOLDER`.
"""

import gc
import json
import os
import subprocess
import sys
import traceback
import warnings
from datetime import timedelta
from importlib import import_module
from pathlib import Path

PASSED = "passed"
TIMEOUT = 60


def run_world(module, size, folder):
    """Run the checks of a module, `CHECKS` by name, in so many processes; return what each rank says of each check."""
    processes = start_world(module, size, folder)
    errors = []
    try:
        for process in processes:
            errors.append(process.communicate(timeout=600)[1])
    finally:
        for process in processes:
            process.kill()
    results = [Path(folder) / f"{rank}.json" for rank in range(size)]
    assert all(file.exists() for file in results), "\n".join(errors)
    return [json.loads(file.read_text()) for file in results]


def start_world(module, size, folder):
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.world", module, str(rank), str(size), str(folder)],
            cwd=Path(__file__).parents[2],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def main(module, rank, size, folder):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT))
    results = {}
    try:
        torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
        for name, check in import_module(module).CHECKS.items():
            results[name] = _outcome(check, rank, size)
            every = [None] * size
            dist.all_gather_object(every, results[name])
            if any(outcome != PASSED for outcome in every):  # the ranks may be out of step
                break
    finally:
        (Path(folder) / f"{rank}.json").write_text(json.dumps(results))
        gc.collect()
        dist.destroy_process_group()


def _outcome(check, rank, size):
    import torch

    torch.manual_seed(0)
    try:
        check(rank, size)
    except Exception:
        return traceback.format_exc()
    return PASSED


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
