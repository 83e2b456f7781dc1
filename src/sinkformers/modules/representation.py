"""What modules show of their settings when they are printed."""

from typing import Any

from torch import Tensor


def describe(**settings: Any) -> str:
    """Return `name=value` for each setting, joined by commas; None, False and a probability of 0.0 are left out.

    Pass None for a setting that has its default value. `n_iters` and `tau` are always shown. No tensor is read, so
    that modules on any device, meta included, can be printed.

    Examples:
        >>> from sinkformers.modules.representation import describe
        >>> describe(num_heads=2, n_iters=7, tau=0.3, dropout=0.0)
        'num_heads=2, n_iters=7, tau=0.3'
    """
    always = ("n_iters", "tau")
    shown = {name: value for name, value in settings.items() if name in always or not _is_trivial(value)}
    return ", ".join(f"{name}={_text(value)}" for name, value in shown.items())


def _is_trivial(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, float) and value == 0)


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        kind = "learned" if value.requires_grad else "tensor"
        return kind if value.dim() == 0 else f"{kind} {tuple(value.shape)}"
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    return str(value)
