"""Doubly stochastic attention: Sinkhorn's algorithm where Transformers use SoftMax.

The public names are imported from their packages when first used, so that the command line starts without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinkformers.attention import SinkhornCache, Tuning, backend_for, sinkhorn_attention, tune
    from sinkformers.conversion import (
        anneal_tau,
        set_n_iters,
        set_tau,
        to_sinkformer,
        to_transformer,
        watch_attention,
    )
    from sinkformers.core import (
        ConvergenceWarning,
        LimitInfo,
        causal_sinkhorn,
        marginal_error,
        release_workspace,
        set_workspace_limit,
        sinkhorn,
        sinkhorn_limit,
        workspace_limit,
    )
    from sinkformers.distributed import sequence_parallel
    from sinkformers.modules import MultiheadAttention, Sinkhorn
    from sinkformers.viewing import AttentionView, view_attention

__version__ = "0.2.0"

__all__ = [
    "AttentionView",
    "ConvergenceWarning",
    "LimitInfo",
    "MultiheadAttention",
    "Sinkhorn",
    "SinkhornCache",
    "Tuning",
    "anneal_tau",
    "backend_for",
    "causal_sinkhorn",
    "marginal_error",
    "release_workspace",
    "sequence_parallel",
    "set_n_iters",
    "set_tau",
    "set_workspace_limit",
    "sinkhorn",
    "sinkhorn_attention",
    "sinkhorn_limit",
    "to_sinkformer",
    "to_transformer",
    "tune",
    "view_attention",
    "watch_attention",
    "workspace_limit",
]

_PACKAGE = {
    "AttentionView": "viewing",
    "ConvergenceWarning": "core",
    "LimitInfo": "core",
    "MultiheadAttention": "modules",
    "Sinkhorn": "modules",
    "SinkhornCache": "attention",
    "Tuning": "attention",
    "anneal_tau": "conversion",
    "backend_for": "attention",
    "causal_sinkhorn": "core",
    "marginal_error": "core",
    "release_workspace": "core",
    "sequence_parallel": "distributed",
    "set_n_iters": "conversion",
    "set_tau": "conversion",
    "set_workspace_limit": "core",
    "sinkhorn": "core",
    "sinkhorn_attention": "attention",
    "sinkhorn_limit": "core",
    "to_sinkformer": "conversion",
    "to_transformer": "conversion",
    "tune": "attention",
    "view_attention": "viewing",
    "watch_attention": "conversion",
    "workspace_limit": "core",
}


def __getattr__(name: str) -> Any:
    if name not in _PACKAGE:
        raise AttributeError(f"module 'sinkformers' has no attribute {name!r}")
    value = getattr(import_module(f"sinkformers.{_PACKAGE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
