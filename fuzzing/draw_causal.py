"""Causal calls: definitions, triangles and chunks for a case that is drawn already."""

from dataclasses import replace
from random import Random

from fuzzing.case import Case


def draw_causal(random: Random, case: Case) -> Case:
    """The case, or a causal one with most of its settings."""
    if case.function == "causal_sinkhorn":
        return _operator(random, case)
    is_plain = case.function != "sinkhorn_attention" or case.gradient != "unrolled" or case.causal
    return case if is_plain or random.random() > 0.35 else _attention(random, case)


def _operator(random: Random, case: Case) -> Case:
    definition = "prefix" if random.random() < 0.3 else "streaming"
    square = definition == "prefix" or case.attn_mask is None
    m = case.n if square else case.m
    case = replace(case, definition=definition, m=m, n_iters=_odd(random), row_mass=None, col_mass=None)
    case = replace(case, hub=case.hub and definition == "streaming")
    return _small(case) if definition == "prefix" else case


def _attention(random: Random, case: Case) -> Case:
    definition = "prefix" if random.random() < 0.2 else "streaming"
    case = replace(case, definition=definition, n_iters=_odd(random))
    if definition == "prefix" or random.random() < 0.5:
        case = replace(case, m=case.n)
    if case.n == case.m and case.attn_mask is None and (definition == "prefix" or random.random() < 0.8):
        case = replace(case, causal=True)
        if definition == "streaming" and random.random() < 0.5:
            case = replace(case, definition="")  # which the triangle implies
    if definition == "prefix":
        case = _small(replace(case, backend=random.choice(("torch", "auto")), hub=False))
    if case.n_iters == 1 or case.tau == 0:  # torch's own SoftMax draws other entries
        case = replace(case, dropout=0.0)
    return case


def _small(case: Case) -> Case:
    """The oracle has a matrix for every prefix."""
    size = min(case.n, 13)
    case = replace(case, n=size, m=size, bias_low=_low(case))
    if case.groups > 1 or len(case.lead) <= 2:
        return case
    return replace(case, lead=case.lead[:2], key_lead=None, value_lead=None)


def _low(case: Case) -> float | str | None:
    return case.bias_low if case.function == "sinkhorn_attention" else None


def _odd(random: Random) -> int:
    return random.choice((1, 3, 3, 3, 3, 5, 5, 7, 9))


def can_be_chunked(case: Case) -> bool:
    """Whether queries may come in chunks: a triangle whose keys come with them, or cross-attention."""
    streams = case.order == "streaming" and case.function == "sinkhorn_attention" and case.backend != "reference"
    tau_is_plain = not isinstance(case.tau, str)
    return streams and tau_is_plain and case.dropout == 0 and case.n > 0 and not case.hub


def draw_chunks(random: Random, case: Case) -> Case:
    """Cut the queries; some chunks are empty."""
    cuts = sorted(random.randint(0, case.n) for _ in range(random.choice((1, 2, 3, 5))))
    return replace(case, chunks=tuple(b - a for a, b in zip([0, *cuts], [*cuts, case.n], strict=True)))
