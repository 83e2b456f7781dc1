"""Convert one family of transformers, and check what came of it."""

import math
import re
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sinkformers import set_n_iters, set_tau, to_sinkformer, to_transformer, watch_attention
from sinkformers.conversion.survey import survey
from tests.conversion.families.configurations import model_classes, small_models
from tests.conversion.families.examples import SHORTER, candidates, parts

PATIENCE = 5.0  # seconds of its process in which a model of the family must be found that runs
IDLE = 2  # inputs of a class that do not run what was converted; then the next class is tried
ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-4}  # of a few layers; many models compute SoftMax in float32

_DTYPES = re.compile(r"dtype|Float|Double|float|double")
_LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)

CONVERTED, REFUSED, NOT_BUILT, WRONG = "converted", "refused", "not built", "wrong"

# Why a family was not built; `problem` says what was raised.
NO_MODEL = "it has no model of its own: a tokeniser, or the models of another family"
NO_LIBRARY = "it needs another library"
NO_SIZES = "no small configuration was found"
NO_INPUTS = "no inputs were found that a small model accepts"
IDLE_INPUTS = "no inputs were found that run the modules that are converted"

# Errors that refuse a call of a converted model, and the reasons they give.
AT_THE_CALL = {
    "must not order the tokens": "its mask orders the tokens",
    "a finite number hides later tokens": "its mask orders the tokens",
    "a key is hidden from every query by a finite number": "its mask cannot be told from scores",
    "may be masked or not": "its mask cannot be told from scores",
    "masks its weights after SoftMax": "it masks its weights after SoftMax",
}


class WrongError(Exception):
    """A converted model that is not what it should be."""


class NotRunError(Exception):
    """The inputs do not run what was converted, as texts do not run a vision tower."""


def check(family: str) -> dict[str, Any]:
    """Return what became of a family: its verdict, the model that was tried, and what explains the verdict.

    Models of the family are tried until one is converted, or wrong.
    """
    record: dict[str, Any] = {"family": family, "verdict": NOT_BUILT}
    problems: list[str] = []  # of models that were built
    unbuilt: list[str] = []
    refused: list[dict[str, Any]] = []
    try:
        kinds = model_classes(family)
    except ImportError as error:
        return record | {"note": NO_LIBRARY, "problem": str(error)}
    if not kinds:
        return record | {"note": NO_MODEL}
    start = time.process_time()
    for kind in kinds:
        if time.process_time() > start + PATIENCE:
            break
        result = _check_kind(kind, start + PATIENCE, problems, unbuilt)
        if result is not None and result["verdict"] != REFUSED:
            return record | result
        refused += [] if result is None else [result]
    if refused:
        return record | refused[0]
    if not problems:
        return record | {"note": NO_SIZES, "problem": unbuilt[-1] if unbuilt else ""}
    note = IDLE_INPUTS if IDLE_INPUTS in problems else NO_INPUTS
    return record | {"note": note, "problem": problems[-1]}


def _check_kind(
    kind: type[nn.Module], deadline: float, problems: list[str], unbuilt: list[str]
) -> dict[str, Any] | None:
    """Return what became of the models of a class, or None if none could be built, or run what is converted."""
    for built in small_models(kind, unbuilt):
        if time.process_time() > deadline:
            return None
        for model in (_sharper(built), *parts(built)):
            for tries, inputs in enumerate(_accepted(model, built.config, deadline, problems), 1):
                shapes = {name: list(value.shape) for name, value in inputs.items()}
                result = {"model": kind.__name__, "inputs": shapes} | _judge(model, inputs)
                if result["verdict"] != NOT_BUILT:
                    return result
                problems.insert(0, result["note"])
                if tries == IDLE:
                    break
    return None


def _judge(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Any]:
    found = survey(model, None, None)
    kept = Counter(finding.verdict for finding in found if finding.verdict)
    before = outputs(model, inputs)
    try:
        to_sinkformer(model, 1)
    except ValueError as error:
        if "no bidirectional self-attention" not in str(error):
            return {"verdict": WRONG, "note": f"refused otherwise: {error}"}
        return {"verdict": REFUSED, "kept": dict(kept)}
    adapters = Counter(str(entry.adapter) for entry in model.sinkformer_report.converted.values())
    result = {"adapters": dict(adapters), "kept": dict(kept)}
    try:
        return {"verdict": CONVERTED, **result, "checks": _checks(model, inputs, before, set(adapters))}
    except NotRunError:
        to_transformer(model)
        return {"verdict": NOT_BUILT, "note": IDLE_INPUTS}
    except Exception as error:
        reason = next((reason for sign, reason in AT_THE_CALL.items() if sign in str(error)), None)
        if reason is not None:
            return {"verdict": REFUSED, "kept": {**kept, f"at the call: {reason}": 1}}
        return {"verdict": WRONG, **result, "note": f"{type(error).__name__}: {error}"[:500]}


def _checks(model: nn.Module, inputs: dict[str, Tensor], before: list[Tensor], adapters: set[str]) -> dict[str, Any]:
    """Return what was checked of a model that was just converted with `n_iters=1`; raise what is wrong."""
    made: dict[str, Any] = {}
    unpadded = _unpadded(inputs)
    tolerance = ROUNDING[next(model.parameters()).dtype]
    if adapters == {"softmax"}:
        _expect(_distance(outputs(model, inputs), before) == 0, "n_iters=1 is not the original")
    softmax, columns, padded = _watched(model, unpadded)
    set_n_iters(model, 3)
    set_tau(model, 1e-12)
    relaxed = _watched(model, unpadded)[0]
    set_tau(model, 1.0)
    sinkhorn, balanced, _ = _watched(model, unpadded)
    sinkformer = outputs(model, inputs)
    _expect(all(each.isfinite().all() for each in sinkformer if all(x.isfinite().all() for x in before)), "not finite")
    original = _original(model, unpadded)
    softmax, relaxed, sinkhorn, original = (_valid(each, padded) for each in (softmax, relaxed, sinkhorn, original))
    made["n_iters 1"] = _distance(softmax, original)
    _expect(made["n_iters 1"] <= tolerance, f"n_iters=1 differs by {made['n_iters 1']:.1e}")
    made["tau 0"] = _distance(relaxed, original)
    _expect(made["tau 0"] <= tolerance, f"tau → 0 at n_iters=3 differs from SoftMax by {made['tau 0']:.1e}")
    made["n_iters 3"] = _distance(sinkhorn, original)
    _expect(made["n_iters 3"] > 1e-12, "n_iters=3 changes nothing")
    made["columns"] = [columns, balanced]
    _expect(balanced <= columns, f"columns are no better: {columns:.1e} by SoftMax, {balanced:.1e} by Sinkhorn")
    if "attention_mask" in inputs and "input_ids" in inputs:
        made["padding"] = _padding(model, inputs, tolerance)
    return made


def _watched(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[list[Tensor], float, list[Tensor]]:
    """Return the outputs, the mean error of columns, and which tokens (batch, n) are padding, for each of the calls.

    Raises if rows are wrong, or if nothing attends.
    """
    with watch_attention(model) as watch:
        found = outputs(model, inputs)
    calls = [call for module in watch.values() for call in module.calls]
    if not calls and not any(entry.calls for entry in model.sinkformer_report.converted.values()):
        raise NotRunError
    if calls and all(call.column_sums.shape[-1] == 1 for call in calls):
        raise NotRunError  # a single token attends to itself
    _expect(bool(calls), "nothing attended by Sinkhorn")
    rows = max(call.row_error.max().item() for call in calls)
    _expect(rows <= 1e-4, f"rows sum to 1 only to {rows:.1e}")
    padded = [~call.rows.any(1) for call in calls]
    return found, sum(call.column_error.mean().item() for call in calls) / len(calls), padded


def _valid(found: list[Tensor], padded: list[Tensor]) -> list[Tensor]:
    """Return outputs with zeros for tokens (batch, n, features) that a model pads by itself, as UDOP does.

    Padded queries have zeros where SoftMax gives them weights. A token that was wrongly taken for padding would be
    missing among the keys of all others, whose outputs would differ.
    """
    for padding in (each for each in padded if each.any()):
        fits = [each.dim() == 3 and each.shape[:2] == padding.shape for each in found]
        found = [x.masked_fill(padding[..., None], 0.0) if fit else x for x, fit in zip(found, fits, strict=True)]
    return found


def _original(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    to_transformer(model)
    found = outputs(model, inputs)
    to_sinkformer(model, 3)
    return found


def _padding(model: nn.Module, inputs: dict[str, Tensor], tolerance: float) -> str:
    """Return whether a padded text gives the outputs of the text alone, where that holds for the original."""
    to_transformer(model)
    try:
        before = [_last(outputs(model, each)) for each in (inputs, _second(inputs))]
    except ValueError:  # a group norm of single numbers, for instance
        before = [None]
    to_sinkformer(model, 3)
    if None in before:
        return "cannot be compared"
    together = _last(outputs(model, inputs))
    alone = _last(outputs(model, _second(inputs)))
    if together is None or alone is None or None in before or before[0][1:2, :SHORTER].shape != before[1].shape:
        return "cannot be compared"
    if _distance([before[0][1:2, :SHORTER]], [before[1]]) > tolerance:
        return "not a property of the original"
    difference = _distance([together[1:2, :SHORTER]], [alone])
    _expect(difference <= tolerance, f"padding changes outputs by {difference:.1e}")
    return "equals deletion"


def _last(found: list[Tensor]) -> Tensor | None:
    """Return the first output with one vector per token."""
    return next((each for each in found if each.dim() == 3), None)


def _second(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the second text alone, without its padding."""
    length = inputs["input_ids"].shape[1]
    texts = {name: each[1:2] if each.dim() else each for name, each in inputs.items()}
    return {
        name: each[:, :SHORTER] if each.dim() > 1 and each.shape[1] == length else each for name, each in texts.items()
    }


def _unpadded(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.ones_like(each) if name == "attention_mask" else each for name, each in inputs.items()}


def outputs(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Return all tensors of numbers that a model returns."""
    torch.manual_seed(0)
    with torch.no_grad():
        out = model(**inputs)
    return list(_tensors(out))


def _tensors(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        if found.is_floating_point() and found.numel():
            yield found
    elif isinstance(found, dict):
        for each in found.values():
            yield from _tensors(each)
    elif isinstance(found, list | tuple):
        for each in found:
            yield from _tensors(each)


def _distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference, relative to the largest number of each tensor; infinity for other shapes."""
    if [each.shape for each in found] != [each.shape for each in expected]:
        return math.inf
    largest = 0.0
    for one, two in zip(found, expected, strict=True):
        finite = two.isfinite()
        scale = max(two[finite].abs().max().item() if finite.any() else 0.0, 1e-30)
        difference = (one - two)[finite].abs().max().item() / scale if finite.any() else 0.0
        largest = max(largest, difference if torch.equal(one.isfinite(), finite) else math.inf)
    return largest


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise WrongError(otherwise)


def _accepted(model: nn.Module, config: Any, deadline: float, problems: list[str]) -> Iterator[dict[str, Tensor]]:
    """Yield inputs that a model accepts, in float64 if it can."""
    again = set[Any]()  # inputs that may do in float32
    for dtype in (torch.float64, torch.float32):
        tried = set[Any]()
        for inputs in candidates(model.to(dtype), config, dtype):
            if time.process_time() > deadline:
                return
            kind = tuple((name, tuple(value.shape)) for name, value in inputs.items())
            if kind in tried or (dtype == torch.float32 and kind not in again):
                continue
            tried.add(kind)
            again.add(kind)
            try:
                found = outputs(model, inputs)
                if not found or any(each.isnan().any() for each in found):
                    continue
                if dtype == torch.float64 and not _same_in_single_precision(model, inputs, found):
                    continue
            except Exception as error:
                problems.append(f"{type(model).__name__}: {type(error).__name__}: {error}"[:200])
                if not _DTYPES.search(str(error)):
                    again.discard(kind)
                continue
            again.discard(kind)
            yield inputs


def _same_in_single_precision(model: nn.Module, inputs: dict[str, Tensor], found: list[Tensor]) -> bool:
    """Return whether float64 changes little. torch's SDPA misreads float32 masks there, which EoMT gives it."""
    numbers = {name: each.float() if each.is_floating_point() else each for name, each in inputs.items()}
    try:
        single = outputs(model.float(), numbers)
    except Exception:  # LeViT keeps biases of the first dtype
        return True
    finally:
        model.double()
    return _distance([each.double() for each in single], found) < 0.1


def _sharper(model: nn.Module) -> nn.Module:
    """Draw weights again so that numbers stay of order 1 on their way through a model, in place.

    Fresh models attend almost uniformly, start branches with zeros, or lose their signal in convolutions.
    """
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, _NORMS) and module.weight is not None:
            nn.init.ones_(module.weight)
        if isinstance(module, _LINEAR) and module.weight.numel():
            inputs = module.weight[0].numel()
            weight = torch.randn(module.weight.shape, generator=generator) / inputs**0.5
            module.weight.data = weight.to(module.weight)
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.numel() > 1 and not parameter.std() > 0:  # learned queries and positions
            parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter)
    return model
