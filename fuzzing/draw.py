"""A seed to a case: which function, which tensors, which settings."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from fuzzing.arguments import size_of
from fuzzing.case import Case
from fuzzing.draw_causal import can_be_chunked, draw_causal, draw_chunks
from fuzzing.draw_modules import draw_module
from fuzzing.layouts import LAYOUTS
from fuzzing.program import arguments_of, output_shapes, strangers

SIZES = (1, 2, 3, 4, 5, 7, 8, 11, 13, 16, 17, 23, 31, 33)
LARGE = (47, 64, 65, 100, 129, 197, 257)
WIDTHS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 32, 33, 40, 64)
WIDE = (255, 257, 1000, 12288, 12304, 16387)
# Numbers and sizes of small matrices, about those for which the native kernels compute one in each lane.
MANY = (7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 80, 81)
SMALL = (1, 3, 4, 16, 17, 24, 33, 47, 63, 64, 65)
FUNCTIONS = {
    "sinkhorn_attention": 52,
    "sinkhorn": 16,
    "causal_sinkhorn": 8,
    "Sinkhorn": 2,
    "sinkhorn_limit": 4,
    "attention_with_weights": 6,
    "marginal_error": 2,
    "modules": 18,
}
# How many scores times iterations the oracle works through.
BUDGET = 400_000


def draw(seed: int, backends: Sequence[str], functions: Sequence[str] | None = None, *, compiles: bool = True) -> Case:
    """The case of a seed, on one of the backends."""
    random = Random(seed)
    choices = {k: w for k, w in FUNCTIONS.items() if not functions or k in functions}
    function = random.choices(list(choices), list(choices.values()))[0]
    case = Case(function=function, seed=seed, backend=random.choice(list(backends)))
    if function == "modules":
        return draw_module(random, case)
    case = _sizes(random, case)
    case = _settings(random, case)
    case = _masks(random, case) if random.random() < 0.6 else case
    case = draw_causal(random, case)
    case = _fit(case)
    case = _chunks_or_transform(random, case, compiles)
    case = _layouts(random, case)
    return _machine(random, case)


def _sizes(random: Random, case: Case) -> Case:
    rank = random.choice((0, 0, 1, 1, 2, 2, 2, 3, 3, 4))
    lead = tuple(random.choice((1, 2, 2, 3, 4)) for _ in range(rank))
    n = random.choice(SIZES if random.random() < 0.85 else LARGE)
    m = n if random.random() < 0.5 else random.choice(SIZES if random.random() < 0.85 else LARGE)
    d, e = (random.choice(WIDTHS) for _ in range(2))
    if random.random() < 0.03:
        n, m = min(n, 33), min(m, 33)
        d, e = (random.choice(WIDE) if random.random() < 0.6 else x for x in (d, e))
    if random.random() < 0.06:
        n, m, d, e = (0 if random.random() < 0.35 else size for size in (n, m, d, e))
        lead = tuple(0 if random.random() < 0.1 else size for size in lead)
    dtype = random.choices(("float32", "float64", "bfloat16", "float16"), (5, 3, 1.5, 1.5))[0]
    case = replace(case, lead=lead, n=n, m=m, d=d, e=e, dtype=dtype)
    if case.function in ("sinkhorn", "Sinkhorn") and 0 not in lead and random.random() < 0.3:
        n, m = (random.choice(SMALL) for _ in range(2))
        return replace(case, lead=(*random.choice(((), (2,))), random.choice(MANY)), n=n, m=m)
    if case.function != "sinkhorn_attention" or not lead or random.random() < 0.75:
        return case
    if random.random() < 0.4 and rank:
        groups = random.choice((2, 3))
        return replace(case, groups=groups, lead=(*lead[:-1], groups * random.choice((1, 2))))
    return replace(case, key_lead=_broadcast(random, lead), value_lead=_broadcast(random, lead))


def _broadcast(random: Random, lead: tuple[int, ...]) -> tuple[int, ...] | None:
    """Leading axes that broadcast to others: some of size 1, some left out."""
    if random.random() < 0.3:
        return None
    lead = tuple(1 if random.random() < 0.5 else size for size in lead)
    return lead[random.randrange(len(lead) + 1) :]


def _settings(random: Random, case: Case) -> Case:
    function = case.function
    n_iters = (
        random.choice((1, 2, 3, 3, 3, 4, 5, 5, 7, 9, 10, 21, 40)) if random.random() < 0.9 else random.randint(1, 40)
    )
    if 0 in (case.n, case.m, case.d, case.e) and random.random() < 0.4:
        n_iters = 1
    tau: float | str = 1.0
    if random.random() < 0.35:
        tau = random.choice((0.0, 0.5, 0.9, "scalar", "heads", "all", round(random.random(), 3)))
    tau_range = (0.0, 1.0) if random.random() < 0.7 else random.choice(((0.0, 0.0), (1.0, 1.0), (0.9, 1.0)))
    std = random.choice((0.1, 1.0, 1.0, 1.0, 2.0, 4.0, 8.0, 30.0, 100.0, 1000.0))
    case = replace(case, n_iters=n_iters, tau=tau, tau_range=tau_range, std=std)
    if function == "sinkhorn_limit":
        tau = 1.0 if random.random() < 0.6 else random.choice((0.3, 0.7, 0.95))
        return replace(
            case,
            std=random.choice((0.1, 0.5, 1.0)),
            tau=tau,
            tau_range=(0.2, 1.0),
            n=min(case.n, 17),
            m=min(case.m, 17),
        )
    if function not in ("sinkhorn_attention", "attention_with_weights"):
        if case.dtype in ("bfloat16", "float16"):
            case = replace(case, std=min(case.std, 30.0))
        return replace(case, hub=random.random() < 0.05)
    scale = random.choice((0.0, -0.3, 1.0, 1e4)) if random.random() < 0.15 else None
    case = replace(case, scale=scale, dropout=random.choice((0.1, 0.5, 0.9, 1.0)) if random.random() < 0.12 else 0.0)
    if scale == 1e4:
        case = replace(case, std=min(std, 0.1))
    if function == "attention_with_weights":
        return case
    if random.random() < 0.2:
        case = replace(case, cost="l2", offset=random.choice((0.0, 0.0, 10.0)), d=min(case.d, 300))
    if (n_iters == 1 or tau == 0) and random.random() < 0.3:
        case = replace(case, causal=True, dropout=0.0)
    if random.random() < 0.1 and case.backend != "reference":
        case = replace(case, gradient="implicit", n_iters=random.choice((3, 5, 9, 21)), tau=random.choice((1.0, 0.7)))
        case = replace(
            case, std=random.choice((0.3, 1.0)), scale=None, n=min(case.n, 17), m=min(case.m, 17), causal=False
        )
        if random.random() < 0.6:
            case = replace(case, gradient="limit", n_iters=3)  # a number for the size of the case only
    return case


def _masks(random: Random, case: Case) -> Case:
    """Any of the masks together, and NaN behind them."""
    attention = case.function in ("sinkhorn_attention", "attention_with_weights")
    changes: dict[str, Any] = {"nan": random.random() < 0.4}
    axes = ("full", "full", "matrix", "keys", "queries", "heads", "batch")
    if not attention:
        patterns = (
            ("rows", "columns")
            if case.function == "sinkhorn_limit"
            else ("random", "triangle", "window", "rows", "columns", "none", "all")
        )
        changes |= {"attn_mask": "bool", "attn_axes": random.choice(axes), "pattern": random.choice(patterns)}
        changes |= {
            name: random.choice((None, None, "plain:one", "plain:full", "zeros:one"))
            for name in ("row_mass", "col_mass")
        }
        if case.function == "sinkhorn_limit":
            changes["attn_axes"] = "full"
        else:
            changes["bias_low"] = random.choice((None, None, "-inf"))
        changes["attn_mask"] = random.choice((None, "bool"))
        return replace(case, **changes)
    kinds = ("random:full", "random:batch", "random:one", "random:full", "all:batch", "none:one")
    for name in ("query_mask", "key_mask"):
        changes[name] = random.choice(kinds) if random.random() < 0.5 else None
    if random.random() < 0.65 and not case.causal:
        bias = case.dtype if random.random() < 0.7 else random.choice(("float16", "float32", "float64"))
        changes["attn_mask"] = random.choice(("bool", bias))
        changes["attn_axes"] = random.choice(axes)
        changes["pattern"] = random.choice(("random", "random", "triangle", "window", "rows", "columns", "none", "all"))
        changes["bias_low"] = random.choice((None, "-inf", 1.0, 0.6, 0.5))
        changes["hub"] = changes["attn_mask"] != "bool" and random.random() < 0.1
        if changes["hub"]:
            changes["attn_axes"] = random.choice(("full", "matrix"))
    if case.gradient != "unrolled" and changes.get("hub"):
        changes["hub"] = False
    if case.gradient == "limit" and "pattern" in changes:  # a limit exists
        changes |= {"pattern": random.choice(("rows", "columns")), "bias_low": None}
    return replace(case, **changes)


def _fit(case: Case) -> Case:
    """Fewer heads where there would be too much to compute; of many matrices, smaller ones in fewer steps."""
    if case.lead and case.lead[-1] in MANY:
        most = max(3, BUDGET // max(1, size_of(case)))
        return replace(case, n_iters=min(case.n_iters, most - most % 2 + case.n_iters % 2))
    while size_of(case) * case.n_iters > BUDGET and math.prod(case.lead) > 1:
        largest = max(range(len(case.lead)), key=lambda axis: case.lead[axis])
        keep = case.groups if largest == len(case.lead) - 1 else 1
        lead = tuple(keep if axis == largest else size for axis, size in enumerate(case.lead))
        if lead == case.lead:
            break
        case = replace(case, lead=lead, key_lead=None, value_lead=None)
    wide = math.prod(case.lead) * max(case.n, case.m) * max(case.d, case.e)
    if wide > 20 * BUDGET or (case.cost == "l2" and size_of(case) * case.d > 20 * BUDGET):
        case = replace(case, lead=(), key_lead=None, value_lead=None, groups=1, n=min(case.n, 17), m=min(case.m, 17))
    if size_of(case) * case.n_iters > 8 * BUDGET:
        case = replace(case, n_iters=5)
    return case


def _chunks_or_transform(random: Random, case: Case, compiles: bool) -> Case:
    if can_be_chunked(case) and random.random() < 0.3:
        return draw_chunks(random, case)
    case = _transform(random, case, compiles)
    if case.definition == "prefix" and case.transform.startswith(("vmap", "jacrev", "compile")):
        # Values cannot be read there, and prefixes beyond the floating-point range are NaN.
        case = replace(case, std=min(case.std, 1.0), scale=None, hub=False, cost="dot", offset=0.0)
    return case


def _transform(random: Random, case: Case, compiles: bool) -> Case:
    if case.function == "marginal_error" or random.random() < 0.7:
        return case
    kinds = ["checkpoint:not", "checkpoint:reentrant"]
    alone = (
        case.dropout == 0
        and not case.nan
        and size_of(case) > 0
        and case.function in ("sinkhorn", "causal_sinkhorn", "sinkhorn_attention")
    )
    if alone and size_of(case) * case.n_iters < BUDGET / 8 and max(case.d, case.e) < 100:
        kinds += ["vmap", "vmap", "vmap_vjp"]
        if math.prod((*case.lead, case.n, max(case.e, case.m))) <= 80 and size_of(case) > 0 and "16" not in case.dtype:
            kinds += ["jacrev", "jacrev:sum", "jacrev:sum"]
    if compiles and random.random() < 0.1 and size_of(case) > 0 and not case.dropout:
        kinds = ["compile:aot_eager", "compile:aot_eager", "compile:inductor"]
    case = replace(case, transform=random.choice(kinds))
    if not case.transform.startswith("vmap"):
        return case
    return _vmap_axes(random, case)


def _vmap_axes(random: Random, case: Case) -> Case:
    """Some of the tensors get one axis more, anywhere; the output and what it is multiplied with always do."""
    masses = {"row_mass", "col_mass", "query_mask", "key_mask"}  # these are written for all samples at once
    names = [each.name for each in arguments_of(case) if each.name not in masses]
    chosen = [name for name in names if random.random() < 0.6] or names[:1]
    if case.hub:
        chosen = [name for name in chosen if name not in ("attn_mask", "scores")] or ["query"]
    ranks = {name: _rank(case, name) for name in chosen}
    if any(rank is None for rank in ranks.values()) or (case.function in ("sinkhorn", "causal_sinkhorn") and case.hub):
        return replace(case, transform="plain")
    dims = {name: random.randint(0, rank) for name, rank in ranks.items() if rank is not None}
    out = len(output_shapes(case)["out"])
    return replace(case, vmap_dims={**dims, "w_out": random.randint(0, out)})


def _rank(case: Case, name: str) -> int | None:
    from fuzzing.arguments import key_lead, mask_shape

    leads: dict[str, Callable[[], int]] = {
        "query": lambda: len(case.lead) + 2,
        "scores": lambda: len(case.lead) + 2,
        "key": lambda: len(key_lead(case, case.key_lead)) + 2,
        "value": lambda: len(key_lead(case, case.value_lead)) + 2,
        "attn_mask": lambda: len(mask_shape(case)),
        "mask": lambda: len(mask_shape(case)),
        "tau": lambda: {"scalar": 0, "heads": len(case.lead[-1:]), "all": len(case.lead)}[str(case.tau)],
    }
    return leads[name]() if name in leads else None


def _layouts(random: Random, case: Case) -> Case:
    names = [each.name for each in arguments_of(case)] + [f"w_{name}" for name in output_shapes(case)]
    layouts = {name: random.choice(LAYOUTS) for name in names if random.random() < 0.3}
    if case.transform == "compile:inductor":  # which reads negative views unnegated, whatever the function
        layouts = {name: layout for name, layout in layouts.items() if layout not in ("negative", "conjugate")}
    return replace(case, layouts={name: layout for name, layout in layouts.items() if layout != "plain"})


def _machine(random: Random, case: Case) -> Case:
    """Threads, workspace and device."""
    if case.backend.startswith("native") and not case.transform.startswith("compile"):
        threads = random.choice((1, 1, 1, 2, 3, 5))
        workspace = random.choice((None, None, None, 0, 5000))
        case = replace(case, threads=threads, workspace=workspace)
    if case.transform != "plain" or random.random() > 0.06 or case.function == "marginal_error" or case.dropout:
        return case
    if random.random() < 0.4:
        return replace(case, device="meta", nan=False)
    names = strangers(case)
    return replace(case, device=random.choice(names), nan=False) if names else case
