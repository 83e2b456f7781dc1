"""A case as a program: what the fuzzer runs is what it prints when a case fails.

A program defines `call`, the tensors that it takes, and `results`, the output and every gradient by name.
"""

import inspect
from collections.abc import Callable

from fuzzing.arguments import Argument, attention_arguments, batched, mask_shape, normal, operator_arguments, shown
from fuzzing.case import Case
from fuzzing.layouts import SHARED

ATTENTION = ("sinkhorn_attention", "attention_with_weights")
OPERATORS = ("sinkhorn", "Sinkhorn", "sinkhorn_limit", "causal_sinkhorn")
HOME = {"attention_with_weights": "sinkformers.attention"}


def program(case: Case) -> str:
    """The whole text."""
    from fuzzing.modules import MODULES, module_program

    if case.function in MODULES:
        return module_program(case)
    home = HOME.get(case.function, "sinkformers")
    lines = [
        "import torch",
        f"from {home} import {case.function}{', SinkhornCache' if case.chunks else ''}",
        "",
        *settings(case),
        f"torch.manual_seed({case.seed})",
    ]
    arguments = arguments_of(case)
    for each in arguments:
        lines += each.lines
    outputs = output_shapes(case)
    for name, shape in outputs.items():
        lines.append(normal(case, f"w_{name}", shape))
    if case.nan:
        lines += _spoil(case)
    lines += devices(case, [each.name for each in arguments], list(outputs))
    wanted = [each.name for each in arguments if each.differentiable and not case.chunks]
    lines += [f"{name} = {name}.detach().requires_grad_()" for name in wanted]
    lines += [
        "",
        *_definition(case, arguments),
        *transformed(case, [each.name for each in arguments], wanted, list(outputs)),
    ]
    return "\n".join(lines) + "\n"


def arguments_of(case: Case) -> list[Argument]:
    if case.function in ATTENTION:
        return attention_arguments(case)
    if case.function == "marginal_error":
        return [each for each in operator_arguments(case) if each.name in ("scores", "mask")]
    return operator_arguments(case)


def strangers(case: Case) -> list[str]:
    """The tensors that can be on a device of their own: a tau without axes goes with any, as in torch."""
    names = [each.name for each in arguments_of(case)]
    others = [name for name in names[1:] if name != "tau" or (case.tau != "scalar" and case.lead)]
    return names if others else names[1:]


def output_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    matrix, tokens = (*case.lead, case.n, case.m), (*case.lead, case.n, case.e)
    if case.function == "attention_with_weights":
        return {"out": tokens, "weights": matrix}
    if case.function == "marginal_error":
        return {"rows": case.lead, "cols": case.lead}
    return {"out": tokens if case.function in ATTENTION else matrix}


def settings(case: Case) -> list[str]:
    """What is set for the whole process."""
    lines = [] if case.threads == 1 else [f"torch.set_num_threads({case.threads})"]
    backend, _, instructions = case.backend.partition(":")
    if backend == "native":
        lines.append(f"from sinkformers.kernels import native; native.use_instruction_set({instructions!r})")
        if case.workspace is not None:
            lines.append(f"native.set_workspace_limit({case.workspace})")
    return lines


def devices(case: Case, names: list[str], outputs: list[str]) -> list[str]:
    if case.device == "cpu":
        return []
    if case.device == "meta":
        return [f'{name} = {name}.to("meta")' for name in [*names, *(f"w_{name}" for name in outputs)]]
    return [f'{case.device} = {case.device}.to("meta")']


def _spoil(case: Case) -> list[str]:
    """NaN wherever nothing may be read: tokens and entries that a mask removes."""
    if case.function not in ATTENTION:
        name, mask = "scores", f"mask.expand({shown((*case.lead, case.n, case.m))})"
        if case.attn_mask != "bool" or case.layouts.get(name) in SHARED or case.hub:
            return []
        if case.definition == "prefix":  # which has the scores between all of its tokens
            read = "valid.any(-1)[..., None] & valid.any(-2)[..., None, :]"
            return [f"valid = {mask}", f"{name}.masked_fill_(~({read}), torch.nan)"]
        return [f"{name}.masked_fill_(~{mask}, torch.nan)"]
    everyone = f"torch.ones({shown((*case.lead, case.n, case.m))}, dtype=torch.bool)"
    lines = [f"valid = {everyone}{'.tril()' if case.causal else ''}"]
    for name, size, place in (("query_mask", case.n, "[..., None]"), ("key_mask", case.m, "[..., None, :]")):
        if getattr(case, name) is not None:
            axes = token_mask_shape(case, getattr(case, name).partition(":")[2], size)
            lines.append(f"valid = valid & {name}.reshape({shown(axes)}){place}")
    if case.attn_mask == "bool":
        lines.append("valid = valid & attn_mask")
    elif case.attn_mask is not None:
        low = f"attn_mask <= torch.finfo(torch.{case.attn_mask}).min / 2"
        full = case.attn_axes == "full" and case.layouts.get("attn_mask") not in SHARED
        lines += ["others = valid", f"valid = valid & ~({low})"]
        lines += ["attn_mask.masked_fill_(~others, torch.nan)"] if full else []
    tokens = (("query", "-1"), ("key", "-2"), ("value", "-2"), ("w_out", "-1"))
    for name, axis in tokens:
        shared = case.layouts.get(name) in SHARED
        repeated = {"key": case.key_lead, "value": case.value_lead}.get(name) is not None or case.groups > 1
        if not shared and not repeated:
            lines.append(f"{name}.masked_fill_(~valid.any({axis})[..., None], torch.nan)")
    return lines


def token_mask_shape(case: Case, axes: str, size: int) -> tuple[int, ...]:
    """A mask over tokens with ones for the leading axes that it lacks."""
    missing = (1,) * len(case.lead)
    return {"full": (*case.lead, size), "batch": (*case.lead[:1], *missing[1:], size), "one": (*missing, size)}[axes]


def keywords(case: Case, arguments: list[Argument]) -> list[str]:
    """What stands in the call after the tensors by position."""
    words = [f"{each.keyword}={each.name}" for each in arguments if each.keyword]
    if case.function == "marginal_error":
        return words
    if case.gradient == "limit":
        words.append('n_iters=float("inf")')
    elif case.function != "sinkhorn_limit":
        words.append(f"n_iters={case.n_iters}")
    if case.gradient == "limit" or case.function == "sinkhorn_limit":
        words.append(f"tol={limit_tolerance(case)}")
    if not isinstance(case.tau, str) and case.tau != 1:
        words.append(f"tau={case.tau}")
    if case.function in ATTENTION:
        optional = {"scale": case.scale, "dropout_p": case.dropout or None}
        words += [f"{name}={value}" for name, value in optional.items() if value is not None]
    if case.function == "sinkhorn_attention":
        words += [f'causal="{case.definition}"'] * bool(case.definition)
        words += ["is_causal=True"] * case.causal + ["enable_gqa=True"] * (case.groups > 1)
        words += [f'cost="{case.cost}"'] * (case.cost != "dot") + [f'gradient="{case.gradient}"'] * (
            case.gradient == "implicit"
        )
    if case.function == "causal_sinkhorn":
        words.append(f'definition="{case.definition}"')
    if case.function in ("sinkhorn_attention", "sinkhorn"):
        words.append(f'backend="{case.compared_backend}"')
    return words + one_way(case)


def limit_tolerance(case: Case) -> float:
    return 1e-10 if case.dtype == "float64" else 1e-6


def one_way(case: Case) -> list[str]:
    """Masks that order the tokens are passed on purpose, where the function needs a keyword for it."""
    function = public(case.function)
    masked = case.function in ATTENTION and case.attn_mask is not None and not case.definition
    return ["allow_one_way_mask=True"] * (masked and "allow_one_way_mask" in inspect.signature(function).parameters)


def public(name: str) -> Callable[..., object]:
    from importlib import import_module

    return getattr(import_module(HOME.get(name, "sinkformers")), name)


def _definition(case: Case, arguments: list[Argument]) -> list[str]:
    names = [each.name for each in arguments]
    positional = [each.name for each in arguments if each.keyword is None]
    words = keywords(case, arguments)
    if case.function == "Sinkhorn":
        made = ", ".join(word for word in words if not word.startswith("mask="))
        called = ", ".join([*positional, *(word for word in words if word.startswith("mask="))])
        inside = f"Sinkhorn({made})({called})"
    elif case.function == "sinkhorn_limit":
        words.append("return_info=True")
        inside = f"sinkhorn_limit({', '.join([*positional, *words])})[0]"
    elif case.chunks:
        return _in_chunks(case, names, words)
    else:
        inside = f"{case.function}({', '.join([*positional, *words])})"
    return [f"def call({', '.join(names)}):", f"    return {inside}", ""]


def _in_chunks(case: Case, names: list[str], words: list[str]) -> list[str]:
    """Calls with a cache, one chunk of queries after the other; cross-attention has all keys in each of them."""
    part, upto = "[..., start:stop, :]", ":stop" if case.causal else ":"
    tokens = [f"query{part}", *(f"{name}{part if case.causal else ''}" for name in ("key", "value"))]
    rows = "start:stop" if case.attn_mask and mask_shape(case)[-2] != 1 else ":"
    cuts = {"query_mask": "[..., start:stop]", "key_mask": f"[..., {upto}]", "attn_mask": f"[..., {rows}, :]"}
    words = [f"{word}{cuts.get(word.partition('=')[2], '')}" for word in words]
    layer = "cache[0]" if case.causal else "cache.cross(0)"
    stops = [sum(case.chunks[: at + 1]) for at in range(len(case.chunks))]
    spans = list(zip([0, *stops], stops, strict=False))
    return [
        f"def call({', '.join(names)}):",
        "    cache = SinkhornCache()",
        "    return torch.cat([",
        f"        sinkhorn_attention({', '.join([*tokens, *words])}, cache={layer})",
        f"        for start, stop in {spans}",
        "    ], -2)",
        "",
    ]


def transformed(case: Case, names: list[str], wanted: list[str], outputs: list[str]) -> list[str]:
    """The call inside a transform, and its gradients."""
    listed, weights = ", ".join(names), ", ".join(f"w_{name}" for name in outputs)
    kind, _, detail = case.transform.partition(":")
    if kind == "plain" or kind == "compile":
        lines = [f'call = torch.compile(call, backend="{detail}")'] if kind == "compile" else []
        made = f"call({listed})"
    elif kind == "checkpoint":
        lines = ["from torch.utils.checkpoint import checkpoint"]
        made = f"checkpoint(call, {listed}, use_reentrant={detail == 'reentrant'})"
    elif kind == "vmap":
        dims = ", ".join(str(case.vmap_dims.get(name)) for name in names)
        places = (
            repr(tuple(case.vmap_dims[f"w_{name}"] for name in outputs))
            if len(outputs) > 1
            else case.vmap_dims["w_out"]
        )
        lines, made = [], f"torch.vmap(call, in_dims=({dims},), out_dims={places})({listed})"
    elif kind == "vmap_vjp":
        return _per_sample(case, names, wanted)
    else:
        return _jacobian(case, names, wanted)
    if case.dropout:
        lines.append(f"torch.manual_seed({case.seed})")
    lines.append(f"{', '.join(outputs)} = {made}")
    if not wanted or case.function == "marginal_error":
        return [*lines, f"results = dict({', '.join(f'{name}={name}' for name in outputs)})"]
    if detail == "reentrant":  # which has no torch.autograd.grad
        lines.append(f"torch.autograd.backward([{', '.join(outputs)}], [{weights}])")
        found = [f"d_{name}=torch.zeros_like({name}) if {name}.grad is None else {name}.grad" for name in wanted]
        return [*lines, f"results = dict({', '.join([*(f'{name}={name}' for name in outputs), *found])})"]
    unused = "allow_unused=True, materialize_grads=True"
    grads = f"torch.autograd.grad([{', '.join(outputs)}], [{', '.join(wanted)}], [{weights}], {unused})"
    lines.append(f"{', '.join('d_' + name for name in wanted)}, = {grads}")
    results = [*outputs, *(f"d_{name}" for name in wanted)]
    return [*lines, f"results = dict({', '.join(f'{name}={name}' for name in results)})"]


def _per_sample(case: Case, names: list[str], wanted: list[str]) -> list[str]:
    """vmap around a vector-Jacobian product; an argument without a batch axis gets the sum over the samples."""
    dims = ", ".join(str(case.vmap_dims.get(name)) for name in [*names, "w_out"])
    lines = [
        f"def pull({', '.join([*names, 'w_out'])}):",
        f"    out, back = torch.func.vjp(lambda {', '.join(wanted)}: call({', '.join(names)}), {', '.join(wanted)})",
        "    return out, *back(w_out)",
        "",
        f"out, *grads = torch.vmap(pull, in_dims=({dims}))({', '.join([*names, 'w_out'])})",
    ]
    moves = [
        f"d_{name}=grads[{at}].movedim(0, {case.vmap_dims[name]})"
        if name in case.vmap_dims
        else f"d_{name}=grads[{at}].sum(0)"
        for at, name in enumerate(wanted)
    ]
    return [*lines, f"results = dict(out=out.movedim(0, {case.vmap_dims['w_out']}), {', '.join(moves)})"]


def _jacobian(case: Case, names: list[str], wanted: list[str]) -> list[str]:
    """All vector-Jacobian products at once, contracted afterwards; `:sum` sums the first axis of the output."""
    summed = case.transform.endswith(":sum") and case.lead
    places = tuple(names.index(name) for name in wanted)
    lines = [f"def summed({', '.join(names)}):", f"    return call({', '.join(names)}).sum(0)", ""] if summed else []
    name = "summed" if summed else "call"
    lines.append(f"jacobians = torch.func.jacrev({name}, argnums={places})({', '.join(names)})")
    lines.append(f"out, w = call({', '.join(names)}), {'w_out[0]' if summed else 'w_out'}")
    parts = [
        f"d_{name}=torch.tensordot(w.to({name}.dtype), jacobians[{at}], w.dim())" for at, name in enumerate(wanted)
    ]
    return [*lines, f"results = dict(out=out, {', '.join(parts)})"]


__all__ = ["ATTENTION", "OPERATORS", "batched", "mask_shape", "program"]
