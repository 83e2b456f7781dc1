"""Attention of converted models that stays SoftMax, inside `sequence_parallel`: it would see this rank's tokens alone.

The report of the conversion names it. It is refused where it is called, or warned of where it may be right.
"""

import warnings
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn

from sinkformers.conversion.adapter import CROSS
from sinkformers.conversion.report import REPORT, Report
from sinkformers.conversion.settings import settings_of
from sinkformers.distributed import refuse_in_parallel

# Reasons under which a module may well see all that it has to: cross-attention to a source that every rank has, and
# modules whose code is not known.
_UNKNOWN = ("its forward neither", "compiled by torch.jit", CROSS)
_kept: "WeakKeyDictionary[nn.Module, tuple[ReferenceType[nn.Module], str]]" = WeakKeyDictionary()  # model, and name
_warned: "WeakSet[nn.Module]" = WeakSet()


def check_kept(module: nn.Module) -> None:
    """Raise, or warn once, if a module is called that the report of its model lists as unchanged."""
    if torch.compiler.is_compiling():
        return
    report = module.__dict__.get(REPORT)
    if report is not None:
        for name in report.kept:
            _kept[module.get_submodule(name)] = ref(module), name
    if module in _kept:
        _refuse_or_warn(module, *_kept[module])


def _refuse_or_warn(module: nn.Module, model: "ReferenceType[nn.Module]", name: str) -> None:
    report: Report | Any = getattr(model(), "__dict__", {}).get(REPORT)
    reason = None if report is None else report.kept.get(name)
    # Our own modules pass their tokens to our attention, whether they were converted or not.
    if reason is None or settings_of(module) is not None or type(module).__module__.startswith("sinkformers."):
        return
    title = f"{name or 'the model itself'} [{type(module).__name__}]"
    if not reason.startswith(_UNKNOWN):
        refuse_in_parallel(
            title,
            f"it stays SoftMax ({reason}), and would attend to this rank's tokens alone. Convert it with n_iters=1, "
            'which is SoftMax of the whole sequences (with causal="streaming" if it is causal), or call it outside.',
        )
    if module not in _warned:
        _warned.add(module)
        warnings.warn(
            f"sinkformers: inside sequence_parallel, {title} is the model's own ({reason}). It sees the tokens that "
            "this rank passes to it, and none of the others.",
            stacklevel=2,
        )
