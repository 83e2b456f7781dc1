"""A failing case to the simplest one that fails in the same way: one field after the other towards its default."""

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from fuzzing.case import Case
from fuzzing.judgement import Verdict

Ask = Callable[[Case], Verdict]
SIMPLE = Case()
# In this order: first what removes most.
FIELDS = (
    *("transform", "layouts", "nan", "attn_mask", "query_mask", "key_mask", "row_mass", "col_mass", "dropout", "hub"),
    *(
        "gradient",
        "cost",
        "chunks",
        "definition",
        "causal",
        "scale",
        "tau",
        "tau_range",
        "offset",
        "bias_low",
        "pattern",
        "attn_axes",
        "groups",
    ),
    *("key_lead", "value_lead", "dtype", "std", "threads", "workspace", "backend", "seed"),
)
SIZES = ("n", "m", "d", "e", "n_iters")


def shrink(case: Case, verdict: Verdict, ask: Ask, attempts: int = 200, seconds: float = 60) -> tuple[Case, Verdict]:
    """The smallest failing case found, and its verdict."""
    end = time.monotonic() + seconds
    tried = {case.to_json()}
    improved = True
    while improved and attempts > 0 and time.monotonic() < end:
        improved = False
        for candidate in _simpler(case):
            text = candidate.to_json()
            if text in tried:
                continue
            tried.add(text)
            attempts -= 1
            found = ask(candidate)
            if found.complaint and found.family == verdict.family:
                case, verdict, improved = candidate, found, True
                break
            if attempts <= 0 or time.monotonic() > end:
                break
    return case, verdict


def _simpler(case: Case) -> Iterator[Case]:
    """Cases with less in them, the largest steps first."""
    for name in FIELDS:
        simple = "streaming" if (name, case.function) == ("definition", "causal_sinkhorn") else getattr(SIMPLE, name)
        if getattr(case, name) != simple:
            plain = {"vmap_dims": {}} if name == "transform" else {}
            yield replace(case, **{name: simple}, **plain)
    if case.backend.startswith("native") and case.backend != "native:baseline":
        yield replace(case, backend="native:baseline")
    for axis in range(len(case.lead)):
        yield _without_axis(case, axis)
    for key in case.layouts:
        yield replace(case, layouts={k: v for k, v in case.layouts.items() if k != key})
    for key in case.vmap_dims:
        if not key.startswith("w_"):
            yield replace(case, vmap_dims={k: v for k, v in case.vmap_dims.items() if k != key})
    for key in case.module:
        yield replace(case, module={k: v for k, v in case.module.items() if k != key})
    for name in SIZES:
        size = getattr(case, name)
        for smaller in sorted({1, 2, 3, size // 4, size // 2, size - 4, size - 1}):
            if 0 < smaller < size:
                yield replace(case, **{name: smaller})
    for axis, size in enumerate(case.lead):
        for smaller in (1, 2):
            if smaller < size:
                lead = tuple(smaller if a == axis else s for a, s in enumerate(case.lead))
                yield replace(case, lead=lead, key_lead=None, value_lead=None)
    if isinstance(case.tau, str):
        yield replace(case, tau=0.5)
        yield replace(case, tau="scalar")
    if case.std > 1:
        for std in (2.0, 8.0, 30.0, 100.0):
            if std < case.std:
                yield replace(case, std=std)


def _without_axis(case: Case, axis: int) -> Case:
    lead = case.lead[:axis] + case.lead[axis + 1 :]
    dims = {name: max(0, min(at - 1, at if at <= axis else at - 1)) for name, at in case.vmap_dims.items()}
    return replace(case, lead=lead, key_lead=None, value_lead=None, vmap_dims=dims)


def features(case: Case) -> tuple[Any, ...]:
    """What a reduced case still needs, without its sizes: two failures alike in it have one cause, most likely."""
    kept = []
    for each in fields(Case):
        value = getattr(case, each.name)
        if each.name in ("seed", *SIZES, "vmap_dims") or value == getattr(SIMPLE, each.name):
            continue
        if each.name == "lead":
            value = min(len(value), 3)
        elif each.name == "layouts":
            value = tuple(sorted(value.values()))
        elif each.name == "backend":
            value = case.compared_backend
        elif each.name == "dtype":
            value = "half" if "16" in value else "full"
        elif each.name == "module":
            value = tuple(sorted(map(str, value.items())))
        elif each.name in ("std", "threads", "workspace", "dropout", "tau_range"):
            value = True
        kept.append((each.name, value))
    return tuple(kept)
