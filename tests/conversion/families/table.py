"""The table of families in docs/convert.md, written from the records of the sweep."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import transformers

from tests.conversion.families.configurations import families

BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
COMMAND = "python -m tests.conversion.families --out build/families.jsonl --table docs/convert.md"

_CAUSAL = re.compile(r"^causal|^cross-attention")


def write_table(page: Path, records: list[dict[str, Any]]) -> None:
    """Write the table between its markers on a page."""
    text = page.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n\n{table(records)}\n{END}{after}")


def table(records: list[dict[str, Any]]) -> str:
    """Return the table."""
    rows: dict[str, list[str]] = {}
    for record in records:
        rows.setdefault(outcome(record), []).append(record["family"])
    built = sum(record["verdict"] != "not built" for record in records)
    order = sorted(rows, key=lambda row: (_rank(row), -len(rows[row])))
    lines = [
        f"transformers {transformers.__version__}: {len(records)} of {len(families())} families were tried, "
        f"and {built} could be built.",
        f"`{COMMAND}` writes this table.",
        *_states(records),
        "",
        "| outcome | | families |",
        "| --- | --- | --- |",
        *(f"| {row} | {len(rows[row])} | {', '.join(sorted(rows[row]))} |" for row in order),
    ]
    return "\n".join(lines) + "\n"


def _states(records: list[dict[str, Any]]) -> list[str]:
    """Return a sentence for records that were made by several states of the code, as where files were joined."""
    states = Counter(record.get("code") for record in records).most_common()
    if len(states) < 2:
        return []
    return [f"{len(records) - states[0][1]} of the records are of another state of the code than the others."]


def outcome(record: dict[str, Any]) -> str:
    """Return the row of a family."""
    if record["verdict"] == "converted":
        adapters = set(record["adapters"])
        if adapters == {"softmax"}:
            return "converted: SoftMax of their own"
        return (
            "converted: both kinds of attention" if "softmax" in adapters else "converted: by the registry or torch.nn"
        )
    if record["verdict"] == "wrong":
        return f"wrong: {record['note']}"
    if record["verdict"] != "refused":
        return f"could not be built here: {record['note']}"
    reasons = [reason for reason in record["kept"] if not _CAUSAL.search(reason)]
    if not record["kept"]:
        return "no attention"
    return f"refused: {min(reasons)}" if reasons else "causal or cross-attention only"


def _rank(row: str) -> int:
    starts = ("wrong", "converted", "causal", "no attention", "refused", "could not")
    return next(rank for rank, start in enumerate(starts) if row.startswith(start))
