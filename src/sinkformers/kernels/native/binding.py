"""The C interface of the compiled kernels, seen from torch: tensors in, tensors out.

The library is built with the package and knows nothing of torch; it gets pointers, sizes and strides. Where it was not
built, `missing` says why, and the rest is not called.
"""

import ctypes
import sys
from collections.abc import Container, Mapping, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from sinkformers.kernels.native.arguments import Arguments, Layout, stated_layouts
from sinkformers.kernels.native.state import StateSizes, flags, packed_state, state_sizes

# What the kernels may keep as exponentiated scores, in all threads together; other rows are recomputed in each pass.
DEFAULT_WORKSPACE = 64 * 2**20
_workspace = DEFAULT_WORKSPACE
INSTRUCTION_SETS = ("baseline", "avx2", "avx512", "avx512_bf16")


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
    if not found and sys.platform == "win32":
        return "there are none for Windows: they use vector types of GCC and clang, and the memory of Linux and macOS"
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


def one_thread() -> str | None:
    """Why calls use one thread only, or None where they are distributed over threads."""
    if missing() is None and not _loaded().library.sinkformers_threaded():
        return "they were built without OpenMP, which Apple's compiler lacks, and use one thread"
    return None


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


_TOKENS = ("query", "key", "value")
Settings = tuple[tuple[str, float], ...]
"""Numbers by the names of their fields; hashable, so that what follows from them is computed once."""


def _attention(tensors: Mapping[str, Tensor], settings: Settings, n_iters: int, seed: int) -> Arguments:
    """The arguments of a call, with its inputs: every tensor and every number goes into the field of its name."""
    query = tensors["query"]
    lead = query.shape[:-2]
    sizes = (query.shape, tensors["value"].shape, torch.get_num_threads(), _workspace)
    args = Arguments(_filled(settings, n_iters, *sizes), seed=seed)
    for name, tensor in tensors.items():
        tensor = tensor if len(lead) == 2 else _lead_of_two(tensor, lead)
        if name in _TOKENS:
            args.read_tokens(name, tensor)
        else:
            args.read_strided(name, tensor if tensor.dtype == torch.bool else tensor.to(query.dtype))
    return args


@lru_cache(maxsize=1024)
def _filled(
    settings: Settings, n_iters: int, query: torch.Size, value: torch.Size, threads: int, workspace: int
) -> Layout:
    """The layout of attention, with the numbers of a call filled in."""
    (*_, n, d), (*_, m, e), (batch, heads) = query, value, _batch_and_heads(query[:-2])
    return _loaded().attention.filled(
        batch=batch, heads=heads, n=n, m=m, d=d, e=e, n_iters=n_iters, threads=threads,
        workspace=workspace, **dict(settings),
    )  # fmt: skip


def _call(name: str, args: Arguments, dtype: torch.dtype, matrices: int) -> bool:
    """Run a kernel, and return whether all matrices are safe."""
    if matrices == 0:
        return True
    code = _loaded().functions[name](args.packed(), dtype == torch.float64)
    if code == 1:
        raise MemoryError("sinkformers: the native kernels could not get their workspace.")
    return code == 0


def _run_forward(
    name: str, args: Arguments, like: Tensor, lead: Sequence[int], sizes: StateSizes, packed: bool
) -> tuple[list[Tensor], Tensor | None]:
    """Allocate the state, run a kernel, and return the state and `safe`."""
    matrices = prod(lead)
    if packed:
        length, parts = packed_state(sizes, matrices)
        memory = like.new_empty(length)
        args.divide(memory, parts)
        return [memory], None if _call(name, args, like.dtype, matrices) else flags(memory, lead)
    u, s, r = (like.new_empty(shape) for shape in sizes.shapes(lead))
    safe = like.new_empty(lead, dtype=torch.bool)
    args.write(u=u, s=s, r=r, safe=safe)
    _call(name, args, like.dtype, matrices)
    return [u, s, r], safe


def _run_backward(
    name: str,
    args: Arguments,
    like: Tensor,
    lead: Sequence[int],
    sizes: StateSizes,
    state: Sequence[Tensor],
    d_tau: Tensor | None,
) -> Tensor | None:
    """Pass the state, run a kernel, and return `safe`, or None where all matrices are."""
    matrices = prod(lead)
    if len(state) == 1:
        args.divide(state[0], packed_state(sizes, matrices)[1])
    elif state:
        args.read(**dict(zip(("u", "s", "r"), state, strict=True)))
    memory = like.new_empty(2 * matrices)
    args.divide(memory, {"d_tau": 0, "safe": matrices})  # the kernels write a gradient of tau in any case
    args.write(d_tau=d_tau)
    return None if _call(name, args, like.dtype, matrices) else flags(memory, lead)


def attention_forward(
    tensors: Mapping[str, Tensor],
    settings: Settings,
    *,
    n_iters: int,
    seed: int,
    packed: bool = False,
    keeps_state: bool = True,
    **written: Tensor,
) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """Output (…, n, e), state, and safe (…), which is None where `packed` and all matrices are safe.

    `tensors` holds query, key and value, and what else the structure takes, by name; `settings` holds its numbers,
    except those that differ from call to call; `written` holds tensors for what else it gives.
    The state is u (…, rows, n), s (…, cols, m) and r (…, n), or with `packed` one tensor that holds them all; nothing
    without `keeps_state`, for calls whose backward pass needs none of it.
    Where `safe` is False the scalings left the floating-point range, and the output of that matrix must not be used.
    """
    query, value = tensors["query"], tensors["value"]
    (*lead, n, _), (*_, m, e) = query.shape, value.shape
    out, args = query.new_empty(*lead, n, e), _attention(tensors, settings, n_iters, seed)
    args.write(out=out, **written)
    sizes = state_sizes(n, m, n_iters) if keeps_state else StateSizes(0, n, 0, m, 0)
    state, safe = _run_forward("attention_forward", args, query, lead, sizes, packed)
    return out, state, safe


def attention_backward(
    tensors: Mapping[str, Tensor],
    settings: Settings,
    *,
    n_iters: int,
    seed: int,
    d_out: Tensor,
    out: Tensor,
    state: Sequence[Tensor],
    bias_lead: torch.Size | None,
    **read: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of query, key, value, of the bias, of tau (…) if given, and safe (…).

    `out`, `state` and what else is `read` are those of the forward pass, the state in either form. `safe` is None where
    all matrices are safe. The gradient of the bias is (*bias_lead, n, m), None for None. It is summed over the leading
    axes of size 1 in `bias_lead`, and then of use only if all matrices are safe.
    """
    query, key, value = tensors["query"], tensors["key"], tensors["value"]
    (*lead, n, _), m = query.shape, key.shape[-2]
    d_query, d_key, d_value = query.new_empty(*query.shape), key.new_empty(*key.shape), value.new_empty(*value.shape)
    d_bias = None if bias_lead is None else query.new_empty(*bias_lead, n, m)
    d_tau = query.new_empty(lead) if "tau" in tensors else None
    args = _attention(tensors, settings, n_iters, seed)
    args.read_tokens("d_out", d_out if len(lead) == 2 else _lead_of_two(d_out, query.shape[:-2]))
    args.read(out=out, **read)
    args.write(d_query=d_query, d_key=d_key, d_value=d_value)
    if d_bias is not None:
        args.write_strided("d_bias", d_bias.view(*_batch_and_heads(d_bias.shape[:-2]), n, m))
    sizes = state_sizes(n, m, n_iters)
    safe = _run_backward("attention_backward", args, query, lead, sizes, state, d_tau)
    return d_query, d_key, d_value, d_bias, d_tau, safe


# Matrices up to this size, without masses, are distributed over the lanes of a vector, and keep nothing for backward.
TINY = 16


def _operator(scores: Tensor, n_iters: int, safe_product: float, **tensors: Tensor | None) -> Arguments:
    args = Arguments(_filled_operator(scores.shape, n_iters, safe_product, torch.get_num_threads()))
    args.read(scores=scores, **tensors)
    return args


@lru_cache(maxsize=1024)
def _filled_operator(scores: torch.Size, n_iters: int, safe_product: float, threads: int) -> Layout:
    *lead, n, m = scores
    numbers = {"n_iters": n_iters, "safe_product": safe_product, "threads": threads}
    return _loaded().operator.filled(batch=prod(lead), n=n, m=m, **numbers)


@lru_cache(maxsize=1024)
def _operator_sizes(n: int, m: int, n_iters: int, *, tiny: bool) -> StateSizes:
    """The sizes of the state of `operator_forward`: no vectors where `tiny`."""
    return StateSizes(0, n, 0, m, 0) if tiny else state_sizes(n, m, n_iters)


def operator_forward(
    scores: Tensor, *, n_iters: int, tiny: bool, safe_product: float, packed: bool = False, **tensors: Tensor | None
) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """Weights (…, n, m), state and safe (…) as in `attention_forward`; no vectors where `tiny`.

    `tensors` are row_weight (…, n), col_target (…, m) and tau (…), all of the scores' dtype; scores are minus infinity
    where masked. Without row weights and column targets, columns aim at (valid rows)/(valid columns).
    """
    *lead, n, m = scores.shape
    weights, args = scores.new_empty(*scores.shape), _operator(scores, n_iters, safe_product, **tensors)
    args.write(weights=weights)
    name, sizes = "tiny_forward" if tiny else "operator_forward", _operator_sizes(n, m, n_iters, tiny=tiny)
    state, safe = _run_forward(name, args, scores, lead, sizes, packed)
    return weights, state, safe


def operator_backward(
    scores: Tensor,
    *,
    n_iters: int,
    tiny: bool,
    safe_product: float,
    d_weights: Tensor,
    state: Sequence[Tensor],
    tau: Tensor | None,
    **tensors: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of the scores (…, n, m), of tau (…) if given, and safe (…), as in `attention_backward`."""
    *lead, n, m = scores.shape
    d_scores, d_tau = scores.new_empty(*scores.shape), None if tau is None else scores.new_empty(lead)
    args = _operator(scores, n_iters, safe_product, tau=tau, **tensors)
    args.read(d_weights=d_weights)
    args.write(d_scores=d_scores)
    name, sizes = "tiny_backward" if tiny else "operator_backward", _operator_sizes(n, m, n_iters, tiny=tiny)
    return d_scores, d_tau, _run_backward(name, args, scores, lead, sizes, state, d_tau)
