"""Run checks in several processes at once, with gloo on the loopback interface, and collect what they found.

One process imports torch, which takes seconds, and forks into all ranks. Called with
`python -m tests.distributed.world MODULE SIZE FOLDER`.
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

import torch
import torch.distributed as dist

PASSED = "passed"
TIMEOUT = 120


def run_world(module, size, folder):
    """Run the checks of a module, `CHECKS` by name, in so many processes; return what each rank says of each check.

    A rank that has ended by itself says nothing.
    """
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.distributed.world", module, str(size), str(folder)]
    ended = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=environment, stderr=subprocess.PIPE, text=True, timeout=1800
    )
    results = [Path(folder) / f"{rank}.json" for rank in range(size)]
    assert any(file.exists() for file in results), ended.stderr
    return [json.loads(file.read_text()) if file.exists() else None for file in results]


def main(module, size, folder):
    checks = import_module(module).CHECKS
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                be_rank(checks, rank, size, folder)
                status = 0
            finally:
                sys.stderr.flush()
                os._exit(status)  # the parent's own clean-up is not this process's
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def be_rank(checks, rank, size, folder):
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT))
    results = {}
    try:
        torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
        for name, check in checks.items():
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
    torch.manual_seed(0)
    try:
        check(rank, size)
    except Exception:
        return traceback.format_exc()
    return PASSED


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
