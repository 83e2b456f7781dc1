"""Peak memory of one step, each measured in a process of its own.

The number is the highest resident size of the process during one step (output, gradients, workspace and whatever the
step saves, in bytes) less its resident size just before. Before that, the row ran once at n = 256, so that libraries,
threads and code are loaded, and was compared with float64 there; free heap was handed back to the system. Compiled rows
also ran once at full size. Where the kernel lets a process reset its peak (`/proc/self/clear_refs`), the peak is
`VmHWM`; elsewhere it is `ru_maxrss`, which misses what stays below an earlier peak.
"""

import ctypes
import gc
import json
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.case import Case
from benchmarks.steps import Unavailable

STATUS = Path("/proc/self/status")
WARM_UP_N = 256


def measure(row: str, case: Case, threads: int) -> int:
    """Bytes, measured in a fresh process; `Unavailable` with the reason where there are none."""
    command = [sys.executable, "-m", "benchmarks.peak", row, json.dumps(asdict(case)), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        tail = done.stderr.strip().splitlines()[-1:] or [f"ended with code {done.returncode}"]
        raise Unavailable(f"the measuring process failed: {tail[0]}")
    answer = json.loads(lines[-1])
    if "reason" in answer:
        raise Unavailable(answer["reason"])
    return answer["peak_bytes"]


def here(row_name: str, case: Case) -> int:
    """The same in this process, which must be fresh."""
    from benchmarks import agreement
    from benchmarks.case import draw
    from benchmarks.rows import ROWS

    row = ROWS[row_name]
    step = row.prepare(draw(case))
    small = replace(case, batch=1, heads=1, n=WARM_UP_N)
    checked = agreement.check_attention(small, row.prepare, row.formula)
    if not checked.deviation <= checked.tolerance:
        raise Unavailable(f"disagrees with float64 by {checked.deviation:.1e} of the largest entry at n = {WARM_UP_N}")
    if row.compiled:
        step.call()
        step.reset()
    _give_back()
    before, peak = _watch()
    step.call()
    return max(0, peak() - before)


def _watch() -> tuple[int, Callable[[], int]]:
    """The resident size now, and a function for the peak from now on."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return _status("VmRSS"), lambda: _status("VmHWM")
    except OSError:
        return _maxrss(), _maxrss


def _status(field: str) -> int:
    line = next(line for line in STATUS.read_text(encoding="ascii").splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def _maxrss() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _give_back() -> None:
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def main(arguments: Sequence[str]) -> None:
    import torch

    row, case, threads = arguments
    torch.set_num_threads(int(threads))
    try:
        answer = {"peak_bytes": here(row, Case(**json.loads(case)))}
    except (Unavailable, NotImplementedError) as refusal:
        answer = {"reason": str(refusal)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
