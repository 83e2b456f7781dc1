"""The settings of a converted module: the number of iterations, `tau`, and the definition of causal attention."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sinkformers.core import checks
from sinkformers.core.causal import DEFINITIONS, causal_iterations
from sinkformers.modules.representation import describe

LEARNED = "learned"
LIMIT = "inf"  # math.inf in a configuration file
SETTINGS = "sinkhorn"  # the attribute of a converted module that holds its settings
PARAMETER = "sinkhorn_tau"  # the parameter that tau="learned" adds to a module: one logit per head


@dataclass(frozen=True, repr=False)
class Settings:
    """The settings of one converted module, kept as its plain attribute `sinkhorn`."""

    n_iters: int | float = 3
    tau: float | str = 1.0
    allow_one_way_mask: bool = False
    causal: str | None = None  # how rows are normalised in order; None where they are not

    def describe(self) -> str:
        """Return the settings as the `extra_repr` of a converted module shows them."""
        optional = {"allow_one_way_mask": self.allow_one_way_mask, "causal": self.causal}
        return describe(n_iters=self.n_iters, tau=self.tau, **optional)

    def __repr__(self) -> str:
        return f"Settings({self.describe()})"

    def with_iterations(self, caller: str, n_iters: int | float) -> "Settings":
        """Return the settings with another number of iterations, which causal attention needs to be odd."""
        return replace(self, n_iters=n_iters if self.causal is None else causal_iterations(caller, n_iters))


def check(caller: str, n_iters: Any, tau: Any, allow_one_way_mask: Any = False, causal: Any = None) -> Settings:
    """Return validated settings from a user's arguments or from a configuration file.

    `n_iters` may be `"inf"`, as `saved_iterations` writes it. With `causal` it must be odd where a module is causal,
    which is not known here.
    """
    if not isinstance(allow_one_way_mask, bool):
        raise TypeError(f"{caller}: allow_one_way_mask must be True or False; got {allow_one_way_mask!r}.")
    n_iters = math.inf if isinstance(n_iters, str) and n_iters == LIMIT else n_iters
    iterations, tau = checks.iterations(caller, n_iters), check_tau(caller, tau)
    return Settings(iterations, tau, allow_one_way_mask, check_definition(caller, causal))


def check_definition(caller: str, causal: Any) -> str | None:
    """Return the definition of causal attention for a model that is converted, or None."""
    if causal is None:
        return None
    checks.one_of(caller, "causal", causal, DEFINITIONS)
    if causal == "prefix":
        raise NotImplementedError(
            f'{caller}: causal="prefix" is not available for converted models: it needs n_iters − 1 products of n×n '
            'matrices per head, and has no cache, so that a model could not generate. Pass causal="streaming", or '
            'call sinkhorn_attention(…, causal="prefix").'
        )
    return causal


def saved_iterations(n_iters: int | float) -> int | str:
    """Return `n_iters` as configuration files have it; JSON has no infinity."""
    return n_iters if isinstance(n_iters, int) else LIMIT


def check_tau(caller: str, tau: Any) -> float | str:
    """Return `tau` as a float, or `"learned"`."""
    if isinstance(tau, str) and tau == LEARNED:
        return LEARNED
    if isinstance(tau, Tensor | str):
        got = repr(tau) if isinstance(tau, str) else "a tensor"
        raise TypeError(
            f'{caller}: tau must be a number from 0 (SoftMax) to 1 (Sinkhorn), or "learned"; got {got}. '
            f'"learned" gives each head a parameter.'
        )
    number = checks.setting(caller, tau)
    assert isinstance(number, float)
    return number


def settings_of(module: nn.Module) -> Settings | None:
    """Return the settings of a converted module, or None for any other module."""
    settings = module.__dict__.get(SETTINGS)
    return settings if isinstance(settings, Settings) else None


def tau_of(module: nn.Module, settings: Settings) -> float | Tensor:
    """Return `tau` as attention takes it; a learned one is the sigmoid of the logits, one value per head."""
    if isinstance(settings.tau, str):
        return module.get_parameter(PARAMETER).sigmoid()
    return settings.tau


def learns_tau(module: nn.Module) -> bool:
    """Return whether a module has the parameter that `tau="learned"` adds."""
    return any(name == PARAMETER for name, _ in module.named_parameters(recurse=False))


class ReadsSettings(nn.Module):
    """A converted module of ours: its `n_iters`, `tau`, `causal` and `allow_one_way_mask` are those of its settings."""

    sinkhorn: Settings

    @property
    def n_iters(self) -> int | float:
        return self.sinkhorn.n_iters

    @property
    def tau(self) -> float | Tensor:
        return tau_of(self, self.sinkhorn)

    @property
    def allow_one_way_mask(self) -> bool:
        return self.sinkhorn.allow_one_way_mask

    @property
    def causal(self) -> str | None:
        return self.sinkhorn.causal

    def _settings(self) -> dict[str, Any]:
        return {"n_iters": self.sinkhorn.n_iters, "tau": self.sinkhorn.tau, "causal": self.sinkhorn.causal}


def is_softmax(settings: Settings) -> bool:
    """Return whether attention with these settings is SoftMax."""
    return settings.n_iters == 1 or settings.tau == 0


def assign(module: nn.Module, settings: Settings, logits: Tensor | None) -> None:
    """Store the settings of a module, and add or remove the parameter of a learned `tau` to match them."""
    learns = learns_tau(module)
    if settings.tau == LEARNED and not learns:
        assert logits is not None
        module.register_parameter(PARAMETER, nn.Parameter(logits))
    elif settings.tau != LEARNED and learns:
        delattr(module, PARAMETER)
    module.__dict__[SETTINGS] = settings


def with_tau(caller: str, name: str, module: nn.Module, tau: float | str, logits: Tensor | None) -> None:
    """Change `tau` of a converted module. A learned `tau` stays learned, and its logits are set to the given number."""
    settings = settings_of(module)
    assert settings is not None
    if settings.tau != LEARNED or not isinstance(tau, float):
        assign(module, replace(settings, tau=tau), logits)
        return
    if not 0 < tau < 1:
        raise ValueError(
            f"{caller}: the tau of {name!r} is learned, so it must lie strictly between 0 and 1; got {tau}. "
            "To fix it, convert the module again: to_sinkformer(model, tau=…)."
        )
    with torch.no_grad():
        module.get_parameter(PARAMETER).fill_(math.log(tau / (1 - tau)))
