"""The child process: cases in, verdicts out, one line of JSON each. What it does not survive, its parent reports."""

import faulthandler
import importlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from fuzzing.case import BACKENDS, Case


def use_library(path: str) -> None:
    """Load the compiled kernels from another folder than the package's own."""
    from sinkformers.kernels import native
    from sinkformers.kernels.native import binding

    native.__path__.insert(0, str(Path(path).resolve().parent))
    importlib.reload(binding)
    importlib.reload(native)


def available() -> list[str]:
    """The backends that this machine has."""
    import sinkformers.kernels.native as native

    def serves(name: str) -> bool:
        kind, _, instructions = name.partition(":")
        return kind != "native" or (
            native.missing() is None and native.use_instruction_set(instructions) == instructions
        )

    return [name for name in BACKENDS if serves(name)]


def main() -> None:
    """Answers go where standard output went; whatever a library prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    faulthandler.enable()
    if len(sys.argv) > 1:
        use_library(sys.argv[1])
    from fuzzing.judge import judge

    print(json.dumps(available()), file=answers)
    for line in sys.stdin:
        try:
            answer = asdict(judge(Case.from_json(line)))
        except Exception as error:  # of the fuzzer itself: a case that cannot be written or judged
            answer = {"broken": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
