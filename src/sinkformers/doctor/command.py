"""The command: what is here, whether it agrees with float64, and on request how fast it is."""

import argparse
import itertools
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from sinkformers.doctor import record, text
from sinkformers.doctor.agreement import Finding, compare_all
from sinkformers.doctor.benchmark import Timed, time_all
from sinkformers.doctor.machine import described, devices


def main(arguments: Sequence[str] | None = None, *, program: str = "python -m sinkformers.doctor") -> int:
    """Examine the installation. Returns 1 where a backend disagrees with float64 or raises, else 0."""
    asked = _parser(program).parse_args(arguments)
    if asked.json is not None and (reason := _why_not_written(asked.json)):
        print(f"{program}: --json: {reason}", file=sys.stderr)
        return 2
    found = devices()
    if asked.device is not None:
        known = [str(device) for device in found]
        if asked.device not in known:
            print(f"{program}: --device: there is no {asked.device} here, only {', '.join(known)}.", file=sys.stderr)
            return 2
        found = [torch.device(asked.device)]
    for line in described(found):
        print(line)
    findings: list[Finding] = []
    timed: list[Timed] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for device in found:
            findings += _compare(device)
        for device in found if asked.bench else ():
            timed += _time(device)
    for message in dict.fromkeys(str(warning.message) for warning in caught):
        print(f"\nwarning: {message}")
    code = _verdict(findings)
    if asked.json is not None:
        options = (["--bench"] if asked.bench else []) + (["--device", asked.device] if asked.device else [])
        command = " ".join([program, *options])
        try:
            record.write(asked.json, command, findings, timed)
        except OSError as error:
            print(f"{program}: cannot write {asked.json}: {error.strerror or error}.", file=sys.stderr)
            return 2
        print(f"Written: {asked.json}")
    return code


def _why_not_written(file: Path) -> str | None:
    """What is wrong with the name of a file, which is better known before minutes of work than after."""
    if file.is_dir():
        return f"{file} is a folder; name a file in it."
    return None if file.parent.is_dir() else f"there is no folder {file.parent}; create it, or name another."


def _compare(device: torch.device) -> list[Finding]:
    print(f"\nAgreement with float64 on {device}: largest deviation of output and of gradients, ÷ largest entry")
    found = []
    for _, group in itertools.groupby(compare_all(device), key=lambda finding: finding.problem):
        findings = list(group)
        print("\n".join(text.agreement_table(findings)), flush=True)
        found += findings
    return found


def _time(device: torch.device) -> list[Timed]:
    print(f"\nTime of forward and backward on {device}, heads × tokens, head size 64: median over interleaved rounds")
    found = []
    for _, group in itertools.groupby(time_all(device), key=lambda timed: (timed.shape, timed.dtype)):
        rows = list(group)
        print("\n".join(text.benchmark_table(rows)), flush=True)
        found += rows
    return found


def _verdict(findings: Sequence[Finding]) -> int:
    wrong = [finding for finding in findings if finding.disagrees]
    compared = sum(not finding.cannot for finding in findings)
    if not wrong:
        print(f"\nAll {compared} results agree with float64 to rounding.")
        return 0
    print(f"\n{len(wrong)} of {compared} results DISAGREE with float64:")
    for finding in wrong:
        what = finding.raised or (
            f"deviates by {finding.output:.1e} (output) and {finding.gradients:.1e} (gradients), where rounding "
            f"explains {finding.allowed:.1e}"
        )
        print(f"  {finding.problem}, {finding.backend}, {finding.dtype}, {finding.device}: {what}")
    print("Please report this with all of the output above. Until then, backend= names another backend.")
    return 1


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description="Show what serves Sinkhorn attention on this machine, and compare every backend with float64.",
        epilog="The exit code is 1 where a backend disagrees.",
    )
    parser.add_argument("--bench", action="store_true", help="time the backends beside torch's SDPA and eager SoftMax")
    parser.add_argument("--device", metavar="NAME", help="examine this device alone, cuda:0 for instance")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record that the benchmarks' report reads")
    return parser
