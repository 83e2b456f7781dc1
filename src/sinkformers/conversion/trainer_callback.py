"""`AnnealTau`: `anneal_tau` as a callback for the Trainer of Hugging Face transformers."""

from typing import Any

from transformers import TrainerCallback

from sinkformers.conversion.schedule import anneal_tau
from sinkformers.core import checks


class AnnealTau(TrainerCallback):
    """Anneal `tau` of a converted model from `start` to `end` over the first part of a training run.

    Args:
        fraction: fraction of all steps that the schedule takes; 0 sets `end` at once.
        start, end: values of `tau`, from 0 (SoftMax) to 1 (Sinkhorn).

    Examples:
        >>> from sinkformers.hf import AnnealTau
        >>> callbacks = [AnnealTau(fraction=0.5)]  # Trainer(model=to_sinkformer(model), …, callbacks=callbacks)
    """

    def __init__(self, fraction: float = 0.5, start: float = 0.0, end: float = 1.0) -> None:
        self.fraction = checks.probability("AnnealTau", "fraction", fraction)
        self.start = checks.probability("AnnealTau", "start", start)
        self.end = checks.probability("AnnealTau", "end", end)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        n_steps = round(self.fraction * state.max_steps)
        anneal_tau(kwargs["model"], state.global_step, n_steps, start=self.start, end=self.end)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_step_begin(args, state, control, **kwargs)
