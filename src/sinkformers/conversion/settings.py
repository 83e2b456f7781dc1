"""What a converted module is told: how many iterations, and how far from SoftMax towards Sinkhorn."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from sinkformers.core import checks

LEARNED = "learned"
PARAMETER = "sinkhorn_tau"  # the one parameter that tau="learned" adds to a module: a logit per head


@dataclass(frozen=True)
class Settings:
    """Kept by every converted module as its plain attribute `sinkhorn`; pickled, copied and guarded on as such."""

    n_iters: int = 3
    tau: float | str = 1.0
    allow_one_way_mask: bool = field(default=False, repr=False)


def check(caller: str, n_iters: Any, tau: Any, allow_one_way_mask: Any = False) -> Settings:
    """Settings from what a user passed, or what a configuration file holds."""
    if not isinstance(allow_one_way_mask, bool):
        raise TypeError(f"{caller}: allow_one_way_mask must be True or False; got {allow_one_way_mask!r}.")
    return Settings(checks.iterations(caller, n_iters), check_tau(caller, tau), allow_one_way_mask)


def check_tau(caller: str, tau: Any) -> float | str:
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
    """The settings of a converted module; None for any other."""
    settings = module.__dict__.get("sinkhorn")
    return settings if isinstance(settings, Settings) else None


def relaxation(module: nn.Module, settings: Settings) -> float | Tensor:
    """`tau` as attention takes it; learned ones are sigmoids of the logits, one a head."""
    if isinstance(settings.tau, str):
        return module.get_parameter(PARAMETER).sigmoid()
    return settings.tau


class UnderSettings(nn.Module):
    """A module of ours that was converted: `n_iters` and `tau` are those of its settings."""

    sinkhorn: Settings

    @property
    def n_iters(self) -> int:
        return self.sinkhorn.n_iters

    @property
    def tau(self) -> float | Tensor:
        return relaxation(self, self.sinkhorn)

    @property
    def allow_one_way_mask(self) -> bool:
        return self.sinkhorn.allow_one_way_mask


def is_softmax(settings: Settings) -> bool:
    return settings.n_iters == 1 or settings.tau == 0


def assign(module: nn.Module, settings: Settings, logits: Tensor | None) -> None:
    """Give a module its settings, with the parameter that they need and without one that they do not."""
    learns = PARAMETER in module._parameters
    if settings.tau == LEARNED and not learns:
        assert logits is not None
        module.register_parameter(PARAMETER, nn.Parameter(logits))
    elif settings.tau != LEARNED and learns:
        del module._parameters[PARAMETER]
    module.__dict__["sinkhorn"] = settings


def with_tau(caller: str, name: str, module: nn.Module, tau: float | str, logits: Tensor | None) -> None:
    """A new `tau` for a converted module. One that is learned stays so, and goes on from the number given."""
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
