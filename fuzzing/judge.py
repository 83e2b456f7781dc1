"""Run one case and say what is wrong with it."""

import traceback
import warnings
from typing import Any

import torch
from torch import Tensor

from fuzzing.case import Case
from fuzzing.expected import expect
from fuzzing.expected_modules import expect_module
from fuzzing.judgement import Verdict
from fuzzing.leaves import Expected
from fuzzing.modules import MODULES
from fuzzing.program import ATTENTION, arguments_of, output_shapes, program, public, strangers

Namespace = dict[str, Any]


def judge(case: Case) -> Verdict:
    if case.device not in ("cpu", "meta") and case.device not in strangers(case):
        raise ValueError(f"there is no {case.device} to put on another device")
    before, after = program(case).split("\ndef call", 1)
    space: Namespace = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _prepare(case)
            exec(compile(before, "<case>", "exec"), space)
            tensors = {name: x for name, x in space.items() if isinstance(x, Tensor)}
            copies = {name: x.detach().clone() for name, x in tensors.items()}
            exec(compile("\ndef call" + after, "<case>", "exec"), space)
            torch.set_num_threads(1)  # for the oracle, whose many small operations would wait for one another
    except Exception as error:
        return _refused(case, error)
    if case.device not in ("cpu", "meta"):
        return Verdict(f"{case.device} on another device was accepted", "accepts another device")
    changed = [name for name, x in tensors.items() if case.device == "cpu" and not _same(copies[name], x.detach())]
    if changed:
        return Verdict(f"the call changed its input {changed[0]}", "changes its input")
    results: dict[str, Tensor] = space["results"]
    if case.device == "meta":
        return _shapes(case, tensors, results)
    if case.function in MODULES:
        expected = expect_module(case, space)
    else:
        inputs = {name: copies[name] for name in _names(case)}
        expected = expect(case, inputs, _dropout(case) if case.dropout else None)
    return compare(results, expected)


def _names(case: Case) -> list[str]:
    if case.function in MODULES:
        return []
    return [each.name for each in arguments_of(case)] + [f"w_{name}" for name in output_shapes(case)]


def _prepare(case: Case) -> None:
    """Fresh memory holds NaN, and settings are those of a new process."""
    from sinkformers.kernels import native

    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    if native.missing() is None:
        native.use_instruction_set("avx512_bf16")
        native.set_workspace_limit(native.DEFAULT_WORKSPACE)
    if case.transform.startswith("compile"):
        torch._dynamo.reset()


def _refused(case: Case, error: Exception) -> Verdict:
    line = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    if case.device not in ("cpu", "meta"):
        if case.device in str(error) and isinstance(error, TypeError | ValueError | RuntimeError):
            return Verdict()
        return Verdict(
            f"{case.device} is on another device, and the message does not name it: {line}", "names no device"
        )
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if "sinkformers" in frame.filename] or frames
    place = f"{places[-1].filename.rpartition('sinkformers/')[2]}:{places[-1].name}"
    return Verdict(f"raised {line} ({place})", f"raises {type(error).__name__} in {place}")


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | (a != a)).all())


def _shapes(case: Case, tensors: dict[str, Tensor], results: dict[str, Tensor]) -> Verdict:
    for name, shape in output_shapes(case).items() if case.function not in MODULES else ():
        if tuple(results[name].shape) != tuple(shape) or results[name].device.type != "meta":
            got = (tuple(results[name].shape), results[name].device.type)
            return Verdict(f"{name} on meta is {got}, should be {tuple(shape)} on meta", "shape on meta")
    for name, x in results.items():
        source = tensors.get(name.removeprefix("d_"))
        if name.startswith("d_") and source is not None and (source.shape, source.dtype) != (x.shape, x.dtype):
            return Verdict(f"{name} on meta is {tuple(x.shape)}, should be {tuple(source.shape)}", "shape on meta")
    return Verdict()


def _dropout(case: Case) -> Tensor:
    """What the weights are multiplied with: seen in the output of uniform weights and a value of ones and zeros."""
    dtype, lead = getattr(torch, case.dtype), case.lead
    query, key = torch.zeros(*lead, case.n, 1, dtype=dtype), torch.zeros(*lead, case.m, 1, dtype=dtype)
    value = torch.eye(case.m, dtype=dtype).expand(*lead, case.m, case.m)
    options: Namespace = {"n_iters": case.n_iters, "dropout_p": case.dropout}
    if case.function == "sinkhorn_attention":
        options |= {"backend": case.compared_backend, "cost": case.cost}
        options |= {"tau": float(case.tau)} if not isinstance(case.tau, str) else {"tau": torch.ones(())}
    torch.manual_seed(case.seed)
    seen: Any = public(case.function)(query, key, value, **options)
    kept = (seen[0] if case.function != "sinkhorn_attention" else seen) > 0
    return kept.double() / (1 - case.dropout) if case.dropout < 1 else kept.double()


def compare(results: dict[str, Tensor], expected: dict[str, Expected]) -> Verdict:
    """The first result that is off, in the order of the results."""
    verdict = Verdict()
    for name, (value, tolerance) in expected.items():
        if name not in results:
            return Verdict(f"{name} is missing", f"{name} missing")
        got = results[name].detach()
        if got.shape != value.shape:
            return Verdict(f"{name} has shape {tuple(got.shape)}, should be {tuple(value.shape)}", f"{name} shape")
        if not value.numel():
            continue
        # A value beyond the range of the result's dtype is infinite there.
        value = torch.where(value.abs() > torch.finfo(got.dtype).max, value.sign() * torch.inf, value)
        error = torch.where(got.double() == value, 0.0, (got.double() - value).abs())
        ratio = torch.where(error == 0, 0.0, error / tolerance)
        ratio = torch.where(value.isfinite() & tolerance.isfinite(), ratio.nan_to_num(nan=torch.inf), 0.0)
        worst = int(ratio.argmax())
        verdict.ratios[name] = ratio.max().item()
        if ratio.max() > 1 and not verdict.complaint:
            at = [int(i) for i in torch.unravel_index(torch.tensor(worst), ratio.shape)]
            what = f"{name}{at} is {got.flatten()[worst].item():.6g}, should be {value.flatten()[worst].item():.6g}"
            within = (
                f" within {tolerance.flatten()[worst].item():.2g}; the largest entry is {value.abs().max().item():.3g}"
            )
            kind = f"{name} {'not finite' if not got.isfinite().all() else 'wrong'}"
            verdict.complaint, verdict.kind = what + within, kind
            verdict.witness = (name, at, value.flatten()[worst].item())
    return verdict


__all__ = ["ATTENTION", "Verdict", "judge"]
