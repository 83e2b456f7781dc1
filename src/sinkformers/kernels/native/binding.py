"""The C interface of the compiled kernels, seen from torch: tensors in, tensors out.

The library is built with the package and knows nothing of torch; it gets pointers, sizes and strides. Where it was not
built, `missing` says why, and nobody calls the rest.
"""

import ctypes
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sinkformers.kernels.native.structures import AttentionArguments, OperatorArguments, Structure, disagreement

# What the kernels may keep as exponentiated scores, in all threads together; beyond it each pass makes them again.
WORKSPACE_BYTES = 64 * 2**20
INSTRUCTION_SETS = ("baseline", "avx2", "avx512")


def _load() -> ctypes.CDLL | str:
    """The library, or why there is none. torch is loaded already, so that both share one OpenMP."""
    import sinkformers.kernels.native as package

    found = [path for folder in package.__path__ for path in [Path(folder) / "sinkformers_native.so"] if path.exists()]
    if not found:
        return "it was not built with the package; install a C++ compiler (g++ or clang) and reinstall sinkformers"
    try:
        library = ctypes.CDLL(str(found[0]))
    except OSError as error:
        return f"it could not be loaded: {error}"
    reason = disagreement(library)
    if reason:
        warnings.warn(f"sinkformers: the compiled CPU kernels are not used: {reason}.", RuntimeWarning, stacklevel=2)
    return reason or library


_LIBRARY = _load()
_MISSING = _LIBRARY if isinstance(_LIBRARY, str) else None


def missing() -> str | None:
    """Why the kernels cannot serve, or None where they can."""
    return _MISSING


def _loaded() -> ctypes.CDLL:
    assert not isinstance(_LIBRARY, str), _LIBRARY
    return _LIBRARY


def instruction_set() -> str:
    """The instruction set in use: the best that this processor has, unless told otherwise."""
    return INSTRUCTION_SETS[_loaded().sinkformers_level()]


def use_instruction_set(name: str) -> str:
    """Use a lesser instruction set, to test or to compare; returns the one in use."""
    return INSTRUCTION_SETS[_loaded().sinkformers_set_level(INSTRUCTION_SETS.index(name))]


def release_workspace() -> None:
    """Give back the memory that the kernels keep between calls."""
    if missing() is None:
        _loaded().sinkformers_release()


def _lead_of_two(tensor: Tensor, lead: torch.Size) -> Tensor:
    """The leading axes as (batch, heads)."""
    if len(lead) == 2:
        return tensor
    rest = tensor.shape[len(lead) :]
    if len(lead) > 2:
        return tensor.expand(*lead, *rest).reshape(lead[:-1].numel(), lead[-1], *rest)
    return tensor.reshape(*tensor.shape[: len(lead)], *(1,) * (2 - len(lead)), *rest)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    entries: Tensor | None,
    queries: Tensor | None,
    keys: Tensor | None,
    tau: Tensor | None,
    seed: int | None,
    n_iters: int,
    scale: float,
    l2: bool,
    dropout_p: float,
) -> AttentionArguments:
    """The structure for a call, with its inputs."""
    lead, dtype = query.shape[:-2], query.dtype
    q, k, v = (_lead_of_two(x, lead) for x in (query, key, value))
    batch, heads, n, d = q.shape
    args = AttentionArguments(
        batch=batch,
        heads=heads,
        n=n,
        m=k.shape[2],
        d=d,
        e=v.shape[3],
        n_iters=n_iters,
        threads=torch.get_num_threads(),
        workspace=WORKSPACE_BYTES,
        scale=scale,
        dropout=dropout_p,
        bias_floor=0.0 if bias is None else torch.finfo(bias.dtype).min / 2,
        seed=0 if seed is None else seed,
        l2=l2,
        drops=seed is not None,
    )
    args.read_tokens(query=q, key=k, value=v)
    others = {"bias": bias, "entries": entries, "queries": queries, "keys": keys, "tau": tau}
    for name, tensor in others.items():
        if tensor is not None:
            tensor = tensor if tensor.dtype == torch.bool else tensor.to(dtype)
            args.read_strided(**{name: _lead_of_two(tensor, lead)})
    return args


def _call(name: str, args: Structure, dtype: torch.dtype) -> None:
    if getattr(_loaded(), f"sinkformers_{name}")(ctypes.byref(args), dtype == torch.float64):
        raise MemoryError("sinkformers: the native kernels could not get their workspace.")


def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, *others: Any, n_iters: int, **settings: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output (…, n, e), scalings u (…, rows, n), column sums s (…, cols, m), row maxima r (…, n), and safe (…).

    Where `safe` is False the scalings left the floating-point range, and the output of that matrix is not to be used.
    """
    (*lead, n, _), m, e = query.shape, key.shape[-2], value.shape[-1]
    shapes = ((n, e), ((n_iters + 1) // 2, n), (n_iters // 2, m), (n,))
    out, u, s, r = (query.new_empty((*lead, *shape)) for shape in shapes)
    safe = query.new_empty(lead, dtype=torch.bool)
    if safe.numel():
        args = _attention(query, key, value, *others, n_iters=n_iters, **settings)
        args.write(out=out, u=u, s=s, r=r, safe=safe)
        _call("attention_forward", args, query.dtype)
    return out, u, s, r, safe


def attention_backward(
    d_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *others: Any,
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    wants_bias: bool,
    **settings: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """Gradients of query, key, value, of the bias (…, n, m) if wanted and of tau (…), and safe (…).

    `saved` is what the forward pass returned, without `safe`: out, u, s, r.
    """
    lead, n, m = query.shape[:-2], query.shape[-2], key.shape[-2]
    d_query, d_key, d_value = (x.new_empty(x.shape) for x in (query, key, value))
    d_bias = query.new_empty((*lead, n, m)) if wants_bias else None
    d_tau, safe = query.new_empty(lead), query.new_empty(lead, dtype=torch.bool)
    if safe.numel():
        args = _attention(query, key, value, *others, **settings)
        args.read_tokens(d_out=_lead_of_two(d_out, lead))
        out, u, s, r = saved
        args.read(out=out, u=u, s=s, r=r)
        args.write(d_query=d_query, d_key=d_key, d_value=d_value, d_bias=d_bias, d_tau=d_tau, safe=safe)
        _call("attention_backward", args, query.dtype)
    return d_query, d_key, d_value, d_bias, d_tau, safe


# Matrices up to this size, without masses, are dealt to the lanes of a vector, and keep nothing for backward.
TINY = 16


def _operator(
    scores: Tensor, row_weight: Tensor | None, col_target: Tensor | None, tau: Tensor | None, n_iters: int
) -> OperatorArguments:
    *_, n, m = scores.shape
    batch = scores.numel() // (n * m)
    args = OperatorArguments(batch=batch, n=n, m=m, n_iters=n_iters, threads=torch.get_num_threads())
    args.read(scores=scores, row_weight=row_weight, col_target=col_target, tau=tau)
    return args


def operator_forward(
    scores: Tensor,
    row_weight: Tensor | None,
    col_target: Tensor | None,
    tau: Tensor | None,
    n_iters: int,
    *,
    tiny: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Weights (…, n, m), u (…, rows, n), s (…, cols, m), r (…, n) and safe (…); no vectors where `tiny`.

    All tensors are contiguous and of the scores' dtype; scores are minus infinity where masked. Without row weights and
    column targets, columns aim at (rows taking part)/(columns taking part).
    """
    *lead, n, m = scores.shape
    weights, safe = scores.new_empty(scores.shape), scores.new_empty(lead, dtype=torch.bool)
    rows, cols, maxima = (0, 0, 0) if tiny else ((n_iters + 1) // 2, n_iters // 2, n)
    u, s, r = (scores.new_empty((*lead, *shape)) for shape in ((rows, n), (cols, m), (maxima,)))
    if safe.numel():
        args = _operator(scores, row_weight, col_target, tau, n_iters)
        args.write(weights=weights, u=u, s=s, r=r, safe=safe)
        _call("tiny_forward" if tiny else "operator_forward", args, scores.dtype)
    return weights, u, s, r, safe


def operator_backward(
    d_weights: Tensor,
    scores: Tensor,
    row_weight: Tensor | None,
    col_target: Tensor | None,
    tau: Tensor | None,
    n_iters: int,
    *,
    saved: tuple[Tensor, Tensor, Tensor],
    tiny: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the scores (…, n, m) and of tau (…), and safe (…). `saved` is u, s, r of the forward pass."""
    lead = scores.shape[:-2]
    d_scores, d_tau = scores.new_empty(scores.shape), scores.new_empty(lead)
    safe = scores.new_empty(lead, dtype=torch.bool)
    if safe.numel():
        args = _operator(scores, row_weight, col_target, tau, n_iters)
        u, s, r = saved
        args.read(d_weights=d_weights, u=u, s=s, r=r)
        args.write(d_scores=d_scores, d_tau=d_tau, safe=safe)
        _call("tiny_backward" if tiny else "operator_backward", args, scores.dtype)
    return d_scores, d_tau, safe
