"""What is known of the values of a mask."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sinkformers.core.modes import readable
from sinkformers.core.ranges import masked_bias

# Answers by the tensor that owns a mask's memory: the version of its contents, and what was asked of its views. The
# tensors are referenced weakly, and their entries end with them.
_ANSWERS = WeakTensorKeyDictionary()
_ANSWERS_EACH = 16


def hides_nothing(bias: Tensor, threshold: float | None = None) -> bool:
    """Whether all numbers of a float mask are known to lie above a threshold, by default that of masked entries.

    They are read at every call, since results depend on the answer and not every change in place shows in a version.
    An accelerator, which would have to be waited for, is not asked.
    """
    if bias.device.type != "cpu" or bias.numel() == 0 or not can_be_read(bias):
        return False
    return bool(once(bias).amin() > (masked_bias(bias.dtype) if threshold is None else threshold))


def once(mask: Tensor) -> Tensor:
    """A mask without gradient, and with one entry along each axis that only repeats."""
    return mask.detach()[tuple(slice(1) if stride == 0 else slice(None) for stride in mask.stride())]


def can_be_read(mask: Tensor) -> bool:
    """Whether Python may branch on the values of a mask."""
    return (
        readable(mask)
        and getattr(type(mask), "__torch_dispatch__", None) is torch._C._disabled_torch_dispatch_impl
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._get_tracing_state() is None
        and not (mask.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def remembered(mask: Tensor, question: str, answer: Callable[[], bool]) -> bool:
    """The answer to a question about a mask, found once for its contents. Views of one tensor are distinguished."""
    if mask.is_inference():  # no version would tell of a change
        return answer()
    owner = mask if mask._base is None else mask._base
    version, answers = _ANSWERS.get(owner) or (None, {})
    if version != owner._version:
        version, answers = owner._version, {}
        _ANSWERS[owner] = version, answers
    place: tuple[Any, ...] = (question, mask.data_ptr(), mask.shape, mask.stride(), mask.dtype)
    found = answers.get(place)
    if found is None:
        found = answer()
        if len(answers) >= _ANSWERS_EACH:
            answers.clear()
        answers[place] = found
    return found
