"""Modules as programs: how they are built, what they take, and their masks. Their parameters are drawn too."""

import inspect
from typing import Any

from fuzzing.arguments import normal, shown
from fuzzing.case import Case
from fuzzing.layouts import SHARED
from fuzzing.module_oracles import ORACLES

MODULES = tuple(ORACLES)

# Constructor arguments by position, from a case.
POSITIONAL = {
    "MultiheadAttention": lambda case: (case.d, case.module.get("heads", 1)),
    "SelfAttention": lambda case: (case.d, case.module.get("heads", 1), case.e),
    "MAB": lambda case: (case.d, case.e, 4 * case.module.get("heads", 1), case.module.get("heads", 1)),
    "SAB": lambda case: (case.d, 4 * case.module.get("heads", 1), case.module.get("heads", 1)),
    "ISAB": lambda case: (
        case.d,
        4 * case.module.get("heads", 1),
        case.module.get("heads", 1),
        case.module.get("points", 1),
    ),
    "PMA": lambda case: (case.d, case.module.get("heads", 1), case.module.get("points", 1)),
    "OffsetAttention": lambda case: (case.d, case.e),
    "InvertibleAttention": lambda case: (case.d, case.module.get("heads", 1), case.e),
    "EquilibriumAttention": lambda case: (case.d, case.module.get("heads", 1), case.e),
}
# Which tensors a module takes, and which masks stand over them.
TAKES = {"MultiheadAttention": ("query", "key", "value"), "MAB": ("x", "y")}


def takes(case: Case) -> tuple[str, ...]:
    names = TAKES.get(case.function, ("x",))
    return ("query",) if case.module.get("self") and case.function == "MultiheadAttention" else names


def module_program(case: Case) -> str:
    from fuzzing.program import transformed

    home = "sinkformers" if case.function == "MultiheadAttention" else "sinkformers.modules"
    lines = ["import torch", f"from {home} import {case.function}", "", f"torch.manual_seed({case.seed})"]
    made = [*map(repr, POSITIONAL[case.function](case)), *_options(case)]
    lines.append(f"layer = {case.function}({', '.join(made)}).to(torch.{case.dtype})")
    lines.append("for parameter in layer.parameters(): torch.nn.init.normal_(parameter, std=0.5)")
    shapes = token_shapes(case)
    names = takes(case)
    lines += [normal(case, name, shapes[name], std=case.std if at == 0 else 1.0) for at, name in enumerate(names)]
    masks, mask_lines = _masks(case)
    lines += [*mask_lines, normal(case, "w_out", shapes["out"])]
    if case.function == "MultiheadAttention" and case.module.get("weights"):
        lines.append(normal(case, "w_weights", shapes["weights"]))
    lines += _spoil(case, masks)
    outputs = ["out"] + ["weights"] * ("w_weights" in " ".join(lines))
    wanted = list(names) if case.function not in ("InvertibleAttention", "EquilibriumAttention") else []
    lines += [f"{name} = {name}.detach().requires_grad_()" for name in wanted]
    lines += ["", f"def call({', '.join(names)}):", f"    return {_called(case, masks)}", ""]
    if not wanted:
        return "\n".join([*lines, *_smoke(case, masks)]) + "\n"
    lines += transformed(case, list(names), wanted, outputs)
    text = "\n".join(lines) + "\n"
    # Gradients of the parameters, under their own names.
    listed = f"[{', '.join(wanted)}]"
    text = text.replace(f"{listed}, [w_", f"[{', '.join(wanted)}, *layer.parameters()], [w_")
    text = text.replace(
        f"{', '.join('d_' + name for name in wanted)}, = torch",
        f"{', '.join('d_' + name for name in wanted)}, *grads = torch",
    )
    named = 'results |= {f"d_{name}": g for (name, _), g in zip(layer.named_parameters(), grads)}'
    return text + (named + "\n" if "*grads" in text else "")


def _options(case: Case) -> list[str]:
    known = inspect.signature(_class(case.function).__init__).parameters
    options = {k: v for k, v in case.module.items() if k in OPTIONS.get(case.function, ())}
    if case.function not in ("EquilibriumAttention",):
        options["n_iters"] = case.n_iters
    if "tau" in known or "options" in known:
        options |= {} if case.tau == 1 else {"tau": case.tau}
    options |= {"allow_one_way_mask": True} if "allow_one_way_mask" in known and case.attn_mask else {}
    return [f"{name}={value!r}" for name, value in options.items()]


OPTIONS = {
    "MultiheadAttention": ("bias", "add_bias_kv", "add_zero_attn", "kdim", "vdim", "batch_first"),
    "SelfAttention": ("tie_qk", "bias"),
    "MAB": ("norm", "scale_by"),
    "SAB": ("norm", "scale_by"),
    "ISAB": ("norm", "scale_by"),
    "PMA": ("norm", "scale_by", "literal"),
    "OffsetAttention": ("port",),
    "EquilibriumAttention": ("pull",),
}


def _class(name: str) -> Any:
    import sinkformers.modules

    return getattr(sinkformers.modules, name)


def token_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """Of the inputs and outputs."""
    batch, n, m, module = case.lead, case.n, case.m, case.module
    if case.function == "MultiheadAttention":
        m = n if module.get("self") else m
        extra = bool(module.get("add_bias_kv")) + bool(module.get("add_zero_attn"))

        def order(size: int, width: int) -> tuple[int, ...]:
            return (*batch, size, width) if module.get("batch_first") or not batch else (size, *batch, width)

        heads = () if module.get("average", True) else (module.get("heads", 1),)
        found = {"query": order(n, case.d), "key": order(m, module.get("kdim") or case.d)}
        found |= {"value": order(m, module.get("vdim") or case.d), "out": order(n, case.d)}
        return {**found, "weights": (*batch, *heads, n, m + extra)}
    width = 4 * module.get("heads", 1)
    if case.function == "MAB":
        return {"x": (*batch, n, case.d), "y": (*batch, m, case.e), "out": (*batch, n, width)}
    outs = {"SAB": width, "ISAB": width}
    rows = module.get("points", 1) if case.function == "PMA" else n
    return {"x": (*batch, n, case.d), "out": (*batch, rows, outs.get(case.function, case.d))}


def _masks(case: Case) -> tuple[dict[str, str], list[str]]:
    """Padding, by the keyword that takes it; boolean, False at padding except in `MultiheadAttention`."""
    batch, lines, masks = case.lead, [], {}
    ignore = case.function == "MultiheadAttention"
    m = case.n if case.module.get("self") and ignore else case.m
    sizes = {"query_mask": case.n, "key_mask": m}
    if case.function not in ("MAB", "MultiheadAttention"):
        sizes = {"query_mask": case.n}
    keywords = (
        {"query_mask": "query_padding_mask", "key_mask": "key_padding_mask"}
        if ignore
        else {"query_mask": "query_mask", "key_mask": "key_mask"}
    )
    if case.function not in ("MAB", "MultiheadAttention"):
        keywords = {"query_mask": "mask"}
    for name, size in sizes.items():
        if (
            getattr(case, name) is None
            or case.function == "OffsetAttention"
            or (ignore and name == "query_mask" and case.module.get("self"))
        ):
            continue
        lines.append(f"{name} = torch.rand({shown((*batch, size))}) < 0.7")
        if ignore and name == "key_mask" and case.module.get("float_padding"):
            lines.append(f"padding = torch.where({name}, 0.0, -torch.inf).to(torch.{case.dtype})")
            masks[keywords[name]] = "padding"
        else:
            masks[keywords[name]] = f"~{name}" if ignore else name
    if ignore and case.attn_mask is not None:
        extra = 0
        shape = (case.n, m + extra)
        if case.attn_axes == "heads":
            shape = (max(1, *batch, 1) * case.module.get("heads", 1), *shape)
        lines.append(f"attn_mask = torch.rand({shown(shape)}) < 0.2")
        if case.attn_mask != "bool":
            lines.append(
                f"attn_mask = torch.randn({shown(shape)}).masked_fill(attn_mask, -torch.inf).to(torch.{case.dtype})"
            )
        masks["attn_mask"] = "attn_mask"
    return masks, lines


def _spoil(case: Case, masks: dict[str, str]) -> list[str]:
    """NaN at the padding, and nothing asked of the output there."""
    lines = []
    axis = ".mT" if case.function == "MultiheadAttention" and not case.module.get("batch_first") and case.lead else ""
    self_attention = case.function == "MultiheadAttention" and case.module.get("self")
    queries = "key_mask" if self_attention else "query_mask"
    has = {name for name in ("query_mask", "key_mask") if any(name in text for text in masks.values())}
    if "padding" in masks.values():
        has.add("key_mask")
    if queries in has and case.function != "PMA":
        lines.append(f"w_out = w_out.masked_fill(~{queries}{axis}[..., None], 0.0)")
    if not case.nan:
        return lines
    padded = {"query": queries, "x": "query_mask", "key": "key_mask", "value": "key_mask", "y": "key_mask"}
    for name in takes(case):
        if padded[name] in has and case.layouts.get(name) not in SHARED:
            lines.append(f"{name}.masked_fill_(~{padded[name]}{axis}[..., None], torch.nan)")
    return lines


def _called(case: Case, masks: dict[str, str]) -> str:
    words = [f"{keyword}={text}" for keyword, text in masks.items()]
    if case.function != "MultiheadAttention":
        return f"layer({', '.join([*takes(case), *words])})"
    tokens = ["query"] * 3 if case.module.get("self") else ["query", "key", "value"]
    weights = bool(case.module.get("weights"))
    words += ["need_weights=False"] * (not weights) + ["average_attn_weights=False"] * (
        not case.module.get("average", True)
    )
    if masks.get("attn_mask") and "allow_one_way_mask" in inspect.signature(_class(case.function).forward).parameters:
        words.append("allow_one_way_mask=True")
    return f"layer({', '.join([*tokens, *words])})" + ("" if weights else "[0]")


def _smoke(case: Case, masks: dict[str, str]) -> list[str]:
    """Layers that solve for something: what they promise of it."""
    mask = masks.get("mask", "None")
    if case.function == "InvertibleAttention":
        return ["out = call(x)", f"results = dict(out=out, back=layer.inverse(out, {mask}))"]
    lines = ["z = x.detach().requires_grad_()", f"out, info = layer(z, {mask}, return_info=True)"]
    return [*lines, "(d_x,) = torch.autograd.grad(out, z, w_out)", "results = dict(out=out, d_x=d_x, error=info.error)"]
