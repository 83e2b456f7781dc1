"""A worker process seen from its parent: ask it, and start another where it died."""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fuzzing.case import Case
from fuzzing.judgement import Verdict

SECONDS = 300  # the longest that a case may take: compiled ones take minutes on a slow machine


def sanitized(library: str | None) -> dict[str, str]:
    """What a library built with AddressSanitizer needs: its runtime loaded before anything else."""
    if library is None or b"libasan" not in Path(library).read_bytes():
        return {}

    def runtime(name: str) -> str:
        return subprocess.run(["c++", f"-print-file-name={name}.so"], capture_output=True, text=True).stdout.strip()

    # Python itself frees nothing at its end. Fresh memory holds NaN.
    address = "detect_leaks=0:max_malloc_fill_size=1000000000:malloc_fill_byte=255"
    options = {"ASAN_OPTIONS": address, "UBSAN_OPTIONS": "print_stacktrace=1"}
    return {"LD_PRELOAD": f"{runtime('libasan')} {runtime('libubsan')}", **options}


class Child:
    def __init__(self, library: str | None = None) -> None:
        self.library, self.environment = library, sanitized(library)
        self.process: subprocess.Popen[str] | None = None
        self.noise: Any = None
        self.backends: list[str] = []

    def start(self) -> None:
        # Freed memory is overwritten at once, so that whatever is read after it was freed is wrong.
        environment = {**os.environ, "MALLOC_PERTURB_": "165", "OMP_NUM_THREADS": "1", **self.environment}
        command = [sys.executable, "-m", "fuzzing.worker", *([self.library] if self.library else [])]
        self.noise = tempfile.TemporaryFile("w+")  # noqa: SIM115
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self.noise, text=True, env=environment)
        first = self._read(SECONDS)
        if first is None:
            raise SystemExit(f"fuzzing: the worker process does not start:\n{self._last_words()}")
        self.backends = json.loads(first)

    def ask(self, case: Case) -> Verdict:
        """The verdict on a case; a process that died or hangs is one too."""
        if self.process is None:
            self.start()
        assert self.process is not None
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(case.to_json() + "\n")
            self.process.stdin.flush()
            answer = self._read(SECONDS)
        except BrokenPipeError:
            answer = None
        if answer is not None:
            found = json.loads(answer)
            if "broken" in found:
                return Verdict(f"the fuzzer itself failed: {found['broken']}", "broken")
            return Verdict(**found)
        return self._death()

    def _read(self, seconds: float) -> str | None:
        """A line, or None where there will be none."""
        assert self.process is not None
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                return None
        return self.process.stdout.readline() or None

    def _death(self) -> Verdict:
        assert self.process is not None
        try:
            code = self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.stop()
            return Verdict(f"no answer within {SECONDS} s", "hangs")
        words = self._last_words()
        self.stop()
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return Verdict(f"the process died ({name})\n{words}", f"crash: {_reported(words) or name}")

    def _last_words(self) -> str:
        self.noise.seek(0)
        lines = self.noise.read().splitlines()
        start = next((i for i, line in enumerate(lines) if "ERROR: " in line or "runtime error" in line), None)
        return "\n".join(lines[start : start + 25] if start is not None else lines[-12:])

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for stream in (self.process.stdin, self.process.stdout):
                if stream is not None:
                    stream.close()
            self.noise.close()
            self.process = None


def _reported(words: str) -> str:
    """What a sanitizer calls it, in a few words."""
    for line in words.splitlines():
        if ": runtime error: " in line:
            place, _, error = line.partition(": runtime error: ")
            return f"{place.rpartition('/')[2]} {' '.join(error.split()[:5])}"
        if "ERROR: AddressSanitizer: " in line:
            return line.partition("ERROR: AddressSanitizer: ")[2].split(" on ")[0]
    return ""
