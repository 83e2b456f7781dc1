"""What is printed of a failure: the program of the reduced case, and what it should have given."""

from fuzzing.case import Case
from fuzzing.judgement import Verdict
from fuzzing.program import program


def snippet(case: Case, verdict: Verdict) -> str:
    """Python to paste."""
    lines = [program(case).rstrip()]
    if verdict.witness is not None:
        name, place, value = verdict.witness
        at = f"[{', '.join(map(str, place))}]" if place else ""
        lines.append(f'print(results["{name}"]{at}.item(), "should be", {value!r})')
    remarks = [f"# {line}" for line in verdict.complaint.splitlines()[:12]]
    return "\n".join([*remarks, *lines, ""])
