"""The tensors of a case, each as the lines of Python that make it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fuzzing.case import Case
from fuzzing.layouts import SHARED, expression

BATCH = 3  # entries of an axis that vmap maps over


@dataclass(frozen=True)
class Argument:
    """A tensor of the call; `keyword` is how it is passed, or None for by position."""

    name: str
    lines: list[str]
    keyword: str | None = None
    differentiable: bool = False


def shown(shape: Sequence[int]) -> str:
    return ", ".join(map(str, shape)) if len(shape) else "()"


def batched(case: Case, name: str, shape: Sequence[int]) -> list[int]:
    """The shape with the axis that vmap maps over."""
    at = case.vmap_dims.get(name) if case.transform.startswith("vmap") else None
    return [*shape] if at is None else [*shape[:at], BATCH, *shape[at:]]


def _layout(case: Case, name: str) -> str:
    return case.layouts.get(name, "plain")


def normal(case: Case, name: str, shape: Sequence[int], *, std: float = 1.0, offset: float = 0.0) -> str:
    """The line that makes a tensor of normal entries."""

    def make(size: Sequence[int]) -> str:
        text = f"torch.randn({shown(size)}, dtype=torch.{case.dtype})"
        text = text if std == 1 else f"({text} * {std})"
        return text if offset == 0 else f"({text} + {offset})"

    is_complex = case.dtype in ("float32", "float64")
    return f"{name} = {expression(batched(case, name, shape), _layout(case, name), make, is_complex=is_complex)}"


def attention_arguments(case: Case) -> list[Argument]:
    """Query, key and value, then whatever masks and relaxations there are."""
    shapes = {
        "query": (*case.lead, case.n, case.d),
        "key": (*key_lead(case, case.key_lead), case.m, case.d),
        "value": (*key_lead(case, case.value_lead), case.m, case.e),
    }
    moved = {"query": (case.std, case.offset), "key": (1.0, case.offset), "value": (1.0, 0.0)}
    found = [
        Argument(name, [normal(case, name, shape, std=moved[name][0], offset=moved[name][1])], None, True)
        for name, shape in shapes.items()
    ]
    if case.attn_mask is not None:
        is_bias = case.attn_mask != "bool"
        found.append(Argument("attn_mask", _bias(case) if is_bias else _mask(case, "attn_mask"), "attn_mask", is_bias))
    for name, size in (("query_mask", case.n), ("key_mask", case.m)):
        if getattr(case, name) is not None:
            found.append(Argument(name, [_token_mask(case, name, size)], name))
    return found + relaxation(case)


def operator_arguments(case: Case) -> list[Argument]:
    """Scores, then whatever mask, masses and relaxation there are."""
    scores = normal(case, "scores", (*case.lead, case.n, case.m), std=case.std)
    lines = [scores]
    if case.hub:
        lines = [
            f"scores = {_hub(case, case.dtype)}.expand({shown(batched(case, 'scores', (*case.lead, case.n, case.m)))})"
        ]
    elif case.bias_low is not None:
        lines += _fill(
            "scores",
            case,
            f"torch.rand({shown(batched(case, 'scores', (*case.lead, case.n, case.m)))}) < 0.2",
            "-torch.inf",
        )
    found = [Argument("scores", lines, None, True)]
    if case.attn_mask == "bool":
        found.append(Argument("mask", _mask(case, "mask"), "mask"))
    for name, size in (("row_mass", case.n), ("col_mass", case.m)):
        kind = getattr(case, name)
        if kind is not None and size and case.function != "Sinkhorn":  # nothing cannot sum to 1
            found.append(Argument(name, _mass(case, name, kind, size), name))
    return found + relaxation(case)


def key_lead(case: Case, lead: tuple[int, ...] | None) -> tuple[int, ...]:
    if case.groups > 1:
        return (*case.lead[:-1], case.lead[-1] // case.groups)
    return case.lead if lead is None else lead


def relaxation(case: Case) -> list[Argument]:
    if not isinstance(case.tau, str):
        return []
    shape = {"scalar": (), "heads": case.lead[-1:], "all": case.lead}[case.tau]
    low, high = case.tau_range
    dtype = "float32" if case.dtype in ("float16", "bfloat16") else case.dtype
    shape = batched(case, "tau", shape)
    text = f"torch.rand({shown(shape)}, dtype=torch.{dtype})"
    text = text if (low, high) == (0, 1) else f"{low} + {high - low:.6g} * {text}"
    return [Argument("tau", [f"tau = {text}", *relaid(case, "tau")], "tau", True)]


def relaid(case: Case, name: str) -> list[str]:
    """The line that gives a vector of a certain content another layout."""
    layout = _layout(case, name)
    if layout in ("negative", "conjugate"):
        return [f"{name} = torch._neg_view(-{name})"]
    if layout.startswith("every_second"):
        return [f"{name} = torch.stack([{name}, {name}], -1)[..., 0]"]
    return []


def mask_shape(case: Case) -> tuple[int, ...]:
    """The shape of `attn_mask` or `mask`, without the axis of vmap."""
    lead, matrix = case.lead, (case.n, case.m)
    return {
        "full": (*lead, *matrix),
        "matrix": matrix,
        "keys": (1, case.m),
        "queries": (case.n, 1),
        "heads": (*lead[-1:], *matrix),
        "batch": (*lead[:1], *(1,) * (len(lead) - 1), *matrix),
    }[case.attn_axes]


def _pattern(case: Case, name: str, shape: Sequence[int], layout: str) -> str:
    if case.pattern == "random":
        # Of a boolean tensor there is no negative view.
        layout = "plain" if layout in ("negative", "conjugate") else layout
        return expression(shape, layout, lambda size: f"(torch.rand({shown(size)}) < 0.7)", is_complex=False)
    if case.pattern in ("rows", "columns"):
        keep = -2 if case.pattern == "rows" else -1
        line = [size if axis - len(shape) == keep else 1 for axis, size in enumerate(shape)]
        return f"(torch.rand({shown(line)}) < 0.6).expand({shown(shape)})"
    ones = f"torch.ones({shown(shape)}, dtype=torch.bool)"
    ends = {"triangle": ".tril()", "window": ".tril(1).triu(-1)", "all": "", "none": ".logical_not()"}
    return ones + ends[case.pattern]


def _mask(case: Case, name: str) -> list[str]:
    return [f"{name} = {_pattern(case, name, batched(case, name, mask_shape(case)), _layout(case, name))}"]


def _hub(case: Case, dtype: str) -> str:
    """Every row and column meets one of the entries 0, the rest is −1000."""
    rows, cols = f"torch.arange({case.n})[:, None] == 0", f"torch.arange({case.m}) < {max(1, case.n // 2)}"
    return f"torch.where(({rows}) | ({cols}), 0.0, -1000.0).to(torch.{dtype})"


def _bias(case: Case) -> list[str]:
    name, shape = "attn_mask", batched(case, "attn_mask", mask_shape(case))
    assert case.attn_mask is not None
    if case.hub:
        return [f"attn_mask = {_hub(case, case.attn_mask)}.expand({shown(shape)}).clone()"]

    def make(size: Sequence[int]) -> str:
        return f"torch.randn({shown(size)}, dtype=torch.{case.attn_mask})"

    is_complex = case.attn_mask in ("float32", "float64")
    lines = [f"{name} = {expression(shape, _layout(case, name), make, is_complex=is_complex)}"]
    if case.bias_low is None:
        return lines
    low = "-torch.inf" if case.bias_low == "-inf" else f"{case.bias_low} * torch.finfo(torch.{case.attn_mask}).min"
    return lines + _fill(name, case, f"~{_pattern(case, name, shape, 'plain')}", low)


def _fill(name: str, case: Case, where: str, value: str) -> list[str]:
    """In place where the layout allows it, so that it stays."""
    if _layout(case, name) in SHARED:
        return [f"{name} = {name}.masked_fill({where}, {value})"]
    return [f"{name}.masked_fill_({where}, {value})"]


def _token_mask(case: Case, name: str, size: int) -> str:
    kind, _, axes = getattr(case, name).partition(":")
    shape = {"full": (*case.lead, size), "batch": (*case.lead[:1], size), "one": (size,)}[axes]
    if kind != "random":
        return f"{name} = torch.{'ones' if kind == 'all' else 'zeros'}({shown(shape)}, dtype=torch.bool)"
    layout = _layout(case, name)
    layout = "plain" if layout in ("negative", "conjugate") else layout
    return f"{name} = " + expression(shape, layout, lambda s: f"(torch.rand({shown(s)}) < 0.7)", is_complex=False)


def _mass(case: Case, name: str, kind: str, size: int) -> list[str]:
    """Positive, or with zeros among them; normalised in float64 and rounded once."""
    kind, _, axes = kind.partition(":")
    shape = (*case.lead, size) if axes == "full" else (size,)
    lines = [f"{name} = torch.rand({shown(shape)}, dtype=torch.float64) + 0.1"]
    if kind == "zeros" and size > 1:
        lines.append(f"{name}[..., torch.arange({size}) % 3 == 1] = 0")
    lines.append(f"{name} = ({name} / {name}.sum(-1, keepdim=True)).to(torch.{case.dtype})")
    return lines + relaid(case, name)


def size_of(case: Case) -> int:
    """How many scores a case has."""
    return math.prod((*case.lead, case.n, case.m)) * (BATCH if case.transform.startswith("vmap") else 1)
