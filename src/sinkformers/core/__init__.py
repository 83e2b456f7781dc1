"""The operator: definition, fast paths, gradients, limit and diagnostics."""

from sinkformers.core.backend import release_workspace, set_workspace_limit, workspace_limit
from sinkformers.core.causal import causal_sinkhorn
from sinkformers.core.diagnostics import marginal_error
from sinkformers.core.limit import ConvergenceWarning, LimitInfo, sinkhorn_limit
from sinkformers.core.sinkhorn import sinkhorn

__all__ = [
    "ConvergenceWarning",
    "LimitInfo",
    "causal_sinkhorn",
    "marginal_error",
    "release_workspace",
    "set_workspace_limit",
    "sinkhorn",
    "sinkhorn_limit",
    "workspace_limit",
]
