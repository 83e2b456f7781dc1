"""`python -m fuzzing`: draw, run, reduce, report."""

import argparse
import itertools
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from fuzzing.case import Case
from fuzzing.child import Child
from fuzzing.draw import FUNCTIONS, draw
from fuzzing.judgement import Verdict
from fuzzing.shrink import features, shrink
from fuzzing.snippet import snippet

STRIDE = 10_000_000  # seeds of cases per seed of a run
CRASHES = 6  # reduced at most; each attempt starts a process


@dataclass
class Tally:
    """What happened so far."""

    cases: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    distinct: dict[tuple[object, ...], str] = field(default_factory=dict)
    repeats: Counter[tuple[object, ...]] = field(default_factory=Counter)
    largest: dict[str, float] = field(default_factory=dict)
    crashes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, case: Case, verdict: Verdict) -> None:
        place = (case.function, case.backend)
        with self.lock:
            self.cases[place] += 1
            self.failures[place] += bool(verdict.complaint)
            for ratio in () if verdict.complaint else verdict.ratios.values():
                self.largest[case.backend] = max(ratio, self.largest.get(case.backend, 0.0))


def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    if options.case is not None:
        sys.exit(_replay(options))
    tally, started = Tally(), time.monotonic()
    seeds = itertools.count(options.seed * STRIDE)
    print(
        f"fuzzing: cases {options.seed * STRIDE} and on, backend {options.backend}, {options.seconds:g} s", flush=True
    )
    deadline = started + options.seconds

    def work() -> None:
        child = Child(options.library)
        child.start()
        backends = _chosen(options.backend, child.backends)
        while time.monotonic() < deadline and (options.cases is None or sum(tally.cases.values()) < options.cases):
            with tally.lock:
                seed = next(seeds)
            case = draw(seed, backends, options.function, compiles=not options.no_compile)
            verdict = child.ask(case)
            tally.note(case, verdict)
            if verdict.complaint:
                _report(tally, case, verdict, child, options.attempts)
        child.stop()

    threads = [threading.Thread(target=work) for _ in range(options.jobs)]
    for thread in threads:
        thread.start()
    while alive := [thread for thread in threads if thread.is_alive()]:
        alive[0].join(10)
        done, failed = sum(tally.cases.values()), sum(tally.failures.values())
        print(f"{time.monotonic() - started:6.0f} s  {done} cases, {failed} failed", file=sys.stderr, flush=True)
    print(summary(tally))
    sys.exit(1 if tally.failures.total() else 0)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzzing", description="Random calls against a float64 oracle.")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--cases", type=int, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0, help=f"the first case is seed · {STRIDE:,}")
    parser.add_argument(
        "--backend", default="all", help="all, or some of native, torch, reference, auto, native:avx2, …"
    )
    parser.add_argument("--function", action="append", choices=list(FUNCTIONS), help="only these; may be repeated")
    parser.add_argument(
        "--case", help="run one case again, by its seed or as printed with a failure; print its program"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--attempts", type=int, default=200, help="cases tried to reduce a failure")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile, which is slow")
    parser.add_argument("--library", help="compiled kernels to use instead of the package's own")
    return parser.parse_args(arguments)


def _chosen(wanted: str, available: list[str]) -> list[str]:
    if wanted == "all":
        return available
    chosen = [name for name in available for each in wanted.split(",") if each in (name, name.partition(":")[0])]
    if not chosen:
        raise SystemExit(f"fuzzing: --backend must name some of {', '.join(available)}; got {wanted}.")
    return chosen


def _replay(options: argparse.Namespace) -> int:
    child = Child(options.library)
    child.start()
    if options.case.isdecimal():
        backends = _chosen(options.backend, child.backends)
        case = draw(int(options.case), backends, options.function, compiles=not options.no_compile)
    else:
        case = Case.from_json(options.case)
    verdict = child.ask(case)
    print(case.to_json())
    print(snippet(case, verdict))
    print(verdict.complaint or f"passed; errors over tolerances: {verdict.ratios}")
    child.stop()
    return 1 if verdict.complaint else 0


def _report(tally: Tally, case: Case, verdict: Verdict, child: Child, attempts: int) -> None:
    """Reduce a failure, and print it unless one like it was printed before."""
    if verdict.family == "crash":
        with tally.lock:
            tally.crashes += 1
            attempts = attempts if tally.crashes <= CRASHES else 0
    small, found = shrink(case, verdict, child.ask, attempts)
    key = (found.family, *features(small))
    text = snippet(small, found)
    with tally.lock:
        tally.repeats[key] += 1
        if key in tally.distinct:
            return
        tally.distinct[key] = text
        print(
            f"\n--- failure {len(tally.distinct)}: {found.kind} (case {case.seed}, {small.to_json()})\n{text}",
            flush=True,
        )


def summary(tally: Tally) -> str:
    """Cases and failures by function and backend."""
    backends = sorted({backend for _, backend in tally.cases})
    lines = [f"{'cases (failed)':24}" + "".join(f"{name:>18}" for name in backends)]
    for function in sorted({function for function, _ in tally.cases}):
        counts = [(tally.cases[function, name], tally.failures[function, name]) for name in backends]
        lines.append(f"{function:24}" + "".join(f"{f'{n} ({bad})' if bad else n:>18}" for n, bad in counts))
    total = [sum(n for (_, name), n in tally.cases.items() if name == backend) for backend in backends]
    lines.append(f"{'all':24}" + "".join(f"{n:>18}" for n in total))
    lines.append(
        f"{'largest error/tolerance':24}" + "".join(f"{tally.largest.get(name, 0.0):>18.2g}" for name in backends)
    )
    lines.append(
        f"{tally.cases.total()} cases, {tally.failures.total()} failed, {len(tally.distinct)} distinct failures"
    )
    return "\n".join(lines)
