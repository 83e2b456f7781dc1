"""`anneal_tau`: the schedule from SoftMax to Sinkhorn for fine-tuning."""

from torch import nn

from sinkformers.conversion.convert import set_tau
from sinkformers.conversion.survey import Select, check_model
from sinkformers.core import checks

CALLER = "anneal_tau"


def anneal_tau(
    model: nn.Module, step: int, n_steps: int, *, start: float = 0.0, end: float = 1.0, select: Select = None
) -> float:
    """Set `tau` of a converted model for one step of training: linearly from `start` to `end` over `n_steps` steps.

    At `tau=0` a converted model computes what the pretrained one does, so fine-tuning starts from the pretrained model
    and ends with a Sinkformer. The value depends on the step only, so training can be resumed.

    Args:
        model: a model converted by `to_sinkformer`.
        step: number of steps taken before this one; 0 gives `start`, `n_steps` and more give `end`.
        n_steps: number of steps from `start` to `end`; with 0, every step has `end`.
        start, end: values of `tau`, from 0 (SoftMax) to 1 (Sinkhorn).
        select: the modules to change, as in `to_sinkformer`.

    Returns:
        The value of `tau` that was set.

    Examples:
        >>> import torch, sinkformers
        >>> layer = sinkformers.to_sinkformer(torch.nn.MultiheadAttention(16, 4))
        >>> [sinkformers.anneal_tau(layer, step, 4) for step in range(6)]
        [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    """
    check_model(CALLER, model)
    for name, value in (("step", step), ("n_steps", n_steps)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{CALLER}: {name} must be a whole number ≥ 0; got {value!r}.")
    start, end = (checks.probability(CALLER, name, value) for name, value in (("start", start), ("end", end)))
    tau = end if step >= n_steps else start + (end - start) * step / n_steps
    set_tau(model, tau, select=select)
    return tau
