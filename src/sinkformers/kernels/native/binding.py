"""The C interface of the compiled kernels, seen from torch: tensors in, tensors out.

The library is built with the package and knows nothing of torch; it gets pointers, sizes and strides. Where it was not
built, `missing` says why, and nobody calls the rest.
"""

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# What the kernels may keep as exponentiated scores, in all threads together; beyond it each pass makes them again.
WORKSPACE_BYTES = 64 * 2**20
INSTRUCTION_SETS = ("baseline", "avx2", "avx512")

_int = ctypes.c_int64
_pointer = ctypes.c_void_p
_real = ctypes.c_double


class _Strided(ctypes.Structure):
    _fields_ = [("data", _pointer), *((name, _int) for name in "bhij")]


class _Attention(ctypes.Structure):
    _fields_ = [
        *((name, _int) for name in ["batch", "heads", "n", "m", "d", "e", "n_iters", "threads", "workspace"]),
        *((name, _Strided) for name in ["query", "key", "value", "bias", "entries", "queries", "keys", "tau"]),
        *((name, _real) for name in ["scale", "dropout", "bias_floor"]),
        ("seed", ctypes.c_uint64),
        *((name, _int) for name in ["l2", "drops"]),
        ("d_out", _Strided),
        *(
            (name, _pointer)
            for name in ["out", "u", "s", "r", "safe", "d_query", "d_key", "d_value", "d_bias", "d_tau"]
        ),
    ]


class _Operator(ctypes.Structure):
    _fields_ = [
        *((name, _int) for name in ["batch", "n", "m", "n_iters", "threads"]),
        *((name, _pointer) for name in ["scores", "row_weight", "col_target", "tau", "d_weights"]),
        *((name, _pointer) for name in ["weights", "u", "s", "r", "safe", "d_scores", "d_tau"]),
    ]


def _load() -> ctypes.CDLL | str:
    """The library, or why there is none. torch is loaded already, so that both share one OpenMP."""
    import sinkformers.kernels.native as package

    found = [path for folder in package.__path__ for path in [Path(folder) / "sinkformers_native.so"] if path.exists()]
    if not found:
        return "it was not built with the package; install a C++ compiler (g++ or clang) and reinstall sinkformers"
    try:
        return ctypes.CDLL(str(found[0]))
    except OSError as error:
        return f"it could not be loaded: {error}"


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


_NOTHING = _Strided()


def _strided(tensor: Tensor | None, *, matrix: bool = False) -> _Strided:
    """A tensor (b, h, i, …) as pointer and strides, 0 along axes that repeat."""
    if tensor is None:
        return _NOTHING
    steps = tensor.stride()
    if 1 in tensor.shape:
        steps = [0 if size == 1 else step for size, step in zip(tensor.shape, steps, strict=True)]
    return _Strided(tensor.data_ptr(), *steps[: 4 if matrix else 3])


def _lead_of_two(tensor: Tensor, lead: torch.Size) -> Tensor:
    """The leading axes as (batch, heads)."""
    if len(lead) == 2:
        return tensor
    rest = tensor.shape[len(lead) :]
    if len(lead) > 2:
        return tensor.expand(*lead, *rest).reshape(-1, lead[-1], *rest)
    return tensor.reshape(*tensor.shape[: len(lead)], *(1,) * (2 - len(lead)), *rest)


def _features_together(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _arguments(
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
) -> tuple[_Attention, list[Any]]:
    """The structure for a call, and the tensors that it points into."""
    lead, dtype = query.shape[:-2], query.dtype
    tokens = [_features_together(x) for x in (query, key, value)]
    floor = 0.0 if bias is None else torch.finfo(bias.dtype).min / 2
    others = (bias if bias is None else bias.to(dtype), entries, queries, keys, tau if tau is None else tau.to(dtype))
    q, k, v = (_lead_of_two(x, lead) for x in tokens)
    masks = [None if x is None else _lead_of_two(x, lead) for x in others]
    batch, heads, n, d = q.shape
    args = _Attention(
        *(batch, heads, n, k.shape[2], d, v.shape[3], n_iters, torch.get_num_threads(), WORKSPACE_BYTES),
        *(_strided(q), _strided(k), _strided(v)),
        *(_strided(x, matrix=place < 2) for place, x in enumerate(masks)),
        *(scale, dropout_p, floor, 0 if seed is None else seed, l2, seed is not None),
    )
    return args, [q, k, v, *masks]


def _call(name: str, args: ctypes.Structure, dtype: torch.dtype) -> None:
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
        args, _kept = _arguments(query, key, value, *others, n_iters=n_iters, **settings)
        args.out, args.u, args.s, args.r, args.safe = (x.data_ptr() for x in (out, u, s, r, safe))
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
        args, _kept = _arguments(query, key, value, *others, **settings)
        d_out, out = (_features_together(x) for x in (d_out, saved[0]))
        args.d_out = _strided(_lead_of_two(d_out, lead))
        contiguous = [x.contiguous() for x in (out, *saved[1:])]
        args.out, args.u, args.s, args.r = (x.data_ptr() for x in contiguous)
        args.safe, args.d_tau = safe.data_ptr(), d_tau.data_ptr()
        args.d_query, args.d_key, args.d_value = (x.data_ptr() for x in (d_query, d_key, d_value))
        args.d_bias = None if d_bias is None else d_bias.data_ptr()
        _call("attention_backward", args, query.dtype)
    return d_query, d_key, d_value, d_bias, d_tau, safe


# Matrices up to this size, without masses, are dealt to the lanes of a vector, and keep nothing for backward.
TINY = 16


def _place(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _operator(
    scores: Tensor, row_weight: Tensor | None, col_target: Tensor | None, tau: Tensor | None, n_iters: int
) -> _Operator:
    *_, n, m = scores.shape
    batch = scores.numel() // (n * m)
    places = (_place(x) for x in (scores, row_weight, col_target, tau))
    return _Operator(batch, n, m, n_iters, torch.get_num_threads(), *places)


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
        args.weights, args.u, args.s, args.r, args.safe = (x.data_ptr() for x in (weights, u, s, r, safe))
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
        args.d_weights, args.d_scores, args.d_tau = (x.data_ptr() for x in (d_weights, d_scores, d_tau))
        args.u, args.s, args.r, args.safe = (x.data_ptr() for x in (*saved, safe))
        _call("tiny_backward" if tiny else "operator_backward", args, scores.dtype)
    return d_scores, d_tau, safe
