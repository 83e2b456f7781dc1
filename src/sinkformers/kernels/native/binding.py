"""The C interface of the compiled kernels, seen from torch: tensors in, tensors out.

The library is built with the package and knows nothing of torch; it gets pointers, sizes and strides. Where it was not
built, `missing` says why, and the rest is not called.
"""

import ctypes
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sinkformers.kernels.native.arguments import Arguments, Layout, stated_layouts

# What the kernels may keep as exponentiated scores, in all threads together; other rows are recomputed in each pass.
DEFAULT_WORKSPACE = 64 * 2**20
_workspace = DEFAULT_WORKSPACE
INSTRUCTION_SETS = ("baseline", "avx2", "avx512")


class _Library:
    """The loaded library and the layouts of its structures."""

    def __init__(self, library: ctypes.CDLL, attention: Layout, operator: Layout) -> None:
        self.library, self.attention, self.operator = library, attention, operator
        kinds, ways = ("attention", "operator", "tiny"), ("forward", "backward")
        names = [f"{kind}_{way}" for kind in kinds for way in ways]
        self.functions = {name: getattr(library, f"sinkformers_{name}") for name in names}


def _load() -> _Library | str:
    """The library, or why there is none. torch is loaded already, so that both share one OpenMP."""
    import sinkformers.kernels.native as package

    found = [path for folder in package.__path__ for path in [Path(folder) / "sinkformers_native.so"] if path.exists()]
    if not found:
        return "they were not built with the package; install a C++ compiler (g++ or clang) and reinstall sinkformers"
    try:
        library = ctypes.CDLL(str(found[0]))
    except OSError as error:
        return f"they could not be loaded: {error}"
    stated = stated_layouts(library)
    return stated if isinstance(stated, str) else _Library(library, *stated)


_LIBRARY = _load()
_MISSING = _LIBRARY if isinstance(_LIBRARY, str) else None


def missing() -> str | None:
    """Why the kernels cannot serve, or None where they can."""
    return _MISSING


def _loaded() -> _Library:
    assert not isinstance(_LIBRARY, str), _LIBRARY
    return _LIBRARY


def smallest_exponent(dtype: torch.dtype) -> float:
    """The exponent below which the kernels take exp for zero."""
    return _loaded().library.sinkformers_smallest_exponent(dtype == torch.float64)


def attention_fields() -> Container[str]:
    """The names of the arguments that the attention kernels read or write."""
    return _loaded().attention.places


def instruction_set() -> str:
    """The instruction set in use: the best that this processor has, unless `use_instruction_set` chose another."""
    return INSTRUCTION_SETS[_loaded().library.sinkformers_level()]


def use_instruction_set(name: str) -> str:
    """Use a lesser instruction set, to test or to compare; returns the one in use."""
    return INSTRUCTION_SETS[_loaded().library.sinkformers_set_level(INSTRUCTION_SETS.index(name))]


def workspace_limit() -> int:
    """How many bytes of exponentiated scores the kernels may keep."""
    return _workspace


def set_workspace_limit(size: int) -> None:
    """Set `workspace_limit`, for all threads."""
    global _workspace
    _workspace = size


def release_workspace() -> None:
    """Free the memory that the kernels keep between calls."""
    if missing() is None:
        _loaded().library.sinkformers_release()


def _lead_of_two(tensor: Tensor, lead: torch.Size) -> Tensor:
    """The leading axes as (batch, heads)."""
    if len(lead) == 2:
        return tensor
    rest = tensor.shape[len(lead) :]
    if len(lead) > 2:
        return tensor.expand(*lead, *rest).reshape(lead[:-1].numel(), lead[-1], *rest)
    return tensor.reshape(*tensor.shape[: len(lead)], *(1,) * (2 - len(lead)), *rest)


def _batch_and_heads(lead: torch.Size) -> tuple[int, int]:
    """The sizes of `_lead_of_two`."""
    return (lead[:-1].numel(), lead[-1]) if len(lead) > 1 else (lead.numel(), 1)


def _attention(tensors: Mapping[str, Tensor | None], settings: Mapping[str, Any]) -> Arguments:
    """The arguments of a call, with its inputs: every tensor and every number goes into the field of its name."""
    query, key, value = _tokens(tensors)
    lead, dtype = query.shape[:-2], query.dtype
    args = Arguments(_loaded().attention, **settings)
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        tensor = tensor if len(lead) == 2 else _lead_of_two(tensor, lead)
        if name in ("query", "key", "value"):
            args.read_tokens(name, tensor)
        else:
            args.read_strided(name, tensor if tensor.dtype == torch.bool else tensor.to(dtype))
    batch, heads = lead if len(lead) == 2 else _lead_of_two(query, lead).shape[:2]
    args.set(
        batch=batch, heads=heads, n=query.shape[-2], m=key.shape[-2], d=query.shape[-1], e=value.shape[-1],
        threads=torch.get_num_threads(), workspace=_workspace,
    )  # fmt: skip
    return args


def _call(name: str, args: Arguments, dtype: torch.dtype) -> None:
    if _loaded().functions[name](args.packed(), dtype == torch.float64) == 1:
        raise MemoryError("sinkformers: the native kernels could not get their workspace.")


def attention_forward(
    tensors: Mapping[str, Tensor | None], settings: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output (…, n, e), scalings u (…, rows, n), column sums s (…, cols, m), row maxima r (…, n), and safe (…).

    `tensors` holds query, key and value, and what else the structure takes, by name; `settings` holds its numbers.
    Where `safe` is False the scalings left the floating-point range, and the output of that matrix must not be used.
    """
    query, key, value = _tokens(tensors)
    (*lead, n, _), m, e, n_iters = query.shape, key.shape[-2], value.shape[-1], settings["n_iters"]
    out = query.new_empty((*lead, n, e))
    u, s = query.new_empty((*lead, (n_iters + 1) // 2, n)), query.new_empty((*lead, n_iters // 2, m))
    r, safe = query.new_empty((*lead, n)), query.new_empty(lead, dtype=torch.bool)
    if safe.numel():
        args = _attention(tensors, settings)
        args.write(out=out, u=u, s=s, r=r, safe=safe)
        _call("attention_forward", args, query.dtype)
    return out, u, s, r, safe


def attention_backward(
    tensors: Mapping[str, Tensor | None],
    settings: Mapping[str, Any],
    *,
    d_out: Tensor,
    saved: Mapping[str, Tensor],
    bias_lead: torch.Size | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """Gradients of query, key, value, of the bias and of tau (…), and safe (…).

    `saved` is what the forward pass returned, without `safe`: out, u, s, r. The gradient of the bias is (*bias_lead, n,
    m), None for None. It is summed over the leading axes of size 1 in `bias_lead`, and of use only if all are safe.
    """
    query, key, value = _tokens(tensors)
    lead, n, m = query.shape[:-2], query.shape[-2], key.shape[-2]
    d_query, d_key, d_value = (x.new_empty(x.shape) for x in (query, key, value))
    d_bias = None if bias_lead is None else query.new_empty((*bias_lead, n, m))
    d_tau, safe = query.new_empty(lead), query.new_empty(lead, dtype=torch.bool)
    if safe.numel():
        args = _attention(tensors, settings)
        args.read_tokens("d_out", _lead_of_two(d_out, lead))
        args.read(**saved)
        args.write(d_query=d_query, d_key=d_key, d_value=d_value, d_tau=d_tau, safe=safe)
        if d_bias is not None:
            args.write_strided("d_bias", d_bias.view(*_batch_and_heads(d_bias.shape[:-2]), n, m))
        _call("attention_backward", args, query.dtype)
    return d_query, d_key, d_value, d_bias, d_tau, safe


def _tokens(tensors: Mapping[str, Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
    return tensors["query"], tensors["key"], tensors["value"]  # pyright: ignore[reportReturnType]


# Matrices up to this size, without masses, are distributed over the lanes of a vector, and keep nothing for backward.
TINY = 16


def _operator(scores: Tensor, n_iters: int, safe_product: float, **tensors: Tensor | None) -> Arguments:
    *_, n, m = scores.shape
    args = Arguments(
        _loaded().operator, batch=scores.numel() // (n * m), n=n, m=m, n_iters=n_iters, threads=torch.get_num_threads(),
        safe_product=safe_product,
    )  # fmt: skip
    args.read(scores=scores, **tensors)
    return args


def operator_forward(
    scores: Tensor, *, n_iters: int, tiny: bool, safe_product: float, **tensors: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Weights (…, n, m), u (…, rows, n), s (…, cols, m), r (…, n) and safe (…); no vectors where `tiny`.

    `tensors` are row_weight (…, n), col_target (…, m) and tau (…), all of the scores' dtype; scores are minus infinity
    where masked. Without row weights and column targets, columns aim at (valid rows)/(valid columns).
    """
    *lead, n, m = scores.shape
    weights, safe = scores.new_empty(scores.shape), scores.new_empty(lead, dtype=torch.bool)
    rows, cols, maxima = (0, 0, 0) if tiny else ((n_iters + 1) // 2, n_iters // 2, n)
    u, s, r = (scores.new_empty((*lead, *shape)) for shape in ((rows, n), (cols, m), (maxima,)))
    if safe.numel():
        args = _operator(scores, n_iters, safe_product, **tensors)
        args.write(weights=weights, u=u, s=s, r=r, safe=safe)
        _call("tiny_forward" if tiny else "operator_forward", args, scores.dtype)
    return weights, u, s, r, safe


def operator_backward(
    scores: Tensor,
    *,
    n_iters: int,
    tiny: bool,
    safe_product: float,
    d_weights: Tensor,
    saved: Mapping[str, Tensor],
    **tensors: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the scores (…, n, m) and of tau (…), and safe (…). `saved` is u, s, r of the forward pass."""
    lead = scores.shape[:-2]
    d_scores, d_tau = scores.new_empty(scores.shape), scores.new_empty(lead)
    safe = scores.new_empty(lead, dtype=torch.bool)
    if safe.numel():
        args = _operator(scores, n_iters, safe_product, **tensors)
        args.read(d_weights=d_weights, **saved)
        args.write(d_scores=d_scores, d_tau=d_tau, safe=safe)
        _call("tiny_backward" if tiny else "operator_backward", args, scores.dtype)
    return d_scores, d_tau, safe
