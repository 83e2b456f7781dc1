"""`to_sinkformer`, `to_transformer`, and `set_n_iters` and `set_tau`, which change the settings later."""

import warnings
from dataclasses import replace
from typing import TypeVar

from torch import nn

from sinkformers.conversion.adapter import CONVERT, UNDO, Place, initial_logits, undo_of
from sinkformers.conversion.intercept import CALLS
from sinkformers.conversion.kept_in_parallel import check_kept
from sinkformers.conversion.report import REPORT, Entry, Report
from sinkformers.conversion.settings import (
    LEARNED,
    PARAMETER,
    SETTINGS,
    Settings,
    check,
    check_tau,
    learns_tau,
    settings_of,
    with_tau,
)
from sinkformers.conversion.survey import (
    ADAPTERS,
    UNKNOWN,
    Finding,
    Select,
    adapter_of,
    apply,
    check_model,
    check_select,
    find_converted,
    matches,
    select_converted,
    survey,
)
from sinkformers.core import checks
from sinkformers.distributed import check_modules

Model = TypeVar("Model", bound=nn.Module)

check_modules(check_kept)


def to_sinkformer(
    model: Model,
    n_iters: int | float | str = 3,
    *,
    tau: float | str = 1.0,
    select: Select = None,
    adapter: str | None = None,
    allow_one_way_mask: bool = False,
    causal: str | None = None,
) -> Model:
    """Convert a model's bidirectional self-attention, and causal attention on request, from SoftMax to Sinkhorn.

    The model is changed in place.

    Parameters stay the same objects and the state_dict keeps its keys, so optimisers, checkpoints and wrappers keep
    working. At `n_iters=1` the outputs are those of the original.

    Args:
        model: torch.nn Transformers, Hugging Face and sentence-transformers models, timm, vit-pytorch, x-transformers,
            or any module that contains their attention.
        n_iters: number of normalisations; 1 is SoftMax, `math.inf` the limit (`"inf"` in saved configurations).
        tau: from SoftMax (0) to Sinkhorn (1), or `"learned"`: each module then gets a parameter `sinkhorn_tau` with one
            logit per head, which starts at `tau` = ½.
        select: the modules to convert: a pattern for their names (`"encoder.layer.5.*"`), or a function of
            (name, module). A second call can convert other modules, or change the settings of the same ones.
        adapter: the name of the only adapter to use. `"softmax"` is for modules that compute SoftMax themselves, and
            converts those whose code shows that they attend. `"sdpa"` is used only if named: it intercepts every
            `F.scaled_dot_product_attention` inside the selected modules, or inside those whose `forward` calls it.
        allow_one_way_mask: accept masks that order the tokens, as a causal one does. Converted modules refuse them
            otherwise, since outputs would depend on tokens that the mask hides. Attention that is known to be causal
            is not converted by it.
        causal: `"streaming"` converts causal attention and the cross-attention of decoders too, and encoders that
            process a stream: rows are normalised in order, so that no output depends on a later query, as in
            `causal_sinkhorn`. `n_iters` must then be odd. Bidirectional modules are converted plainly, unless `select`
            matches nothing but those. Where a module is causal already, None keeps its definition.

    Returns:
        The model. `model.sinkformer_report` lists the modules that were converted, and those that were not, with the
        reason. Pooling with one query stays SoftMax, and without `causal` so do causal attention and the
        cross-attention of decoders.

    Examples:
        >>> import torch, sinkformers
        >>> layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
        >>> encoder = sinkformers.to_sinkformer(torch.nn.TransformerEncoder(layer, 2), n_iters=5)
        >>> print(encoder.sinkformer_report)
        2 of 2 attention modules converted
          layers.0.self_attn [MultiheadAttention] Sinkhorn (torch.nn)
          layers.1.self_attn [MultiheadAttention] Sinkhorn (torch.nn)
    """
    settings = check("to_sinkformer", n_iters, tau, allow_one_way_mask, causal)
    check_model("to_sinkformer", model)
    check_select("to_sinkformer", select)
    found = find_converted(model)  # modules that attend by Sinkhorn already become converted ones
    if settings.tau == LEARNED and not found:
        _warn_of_lost_tau(model)
    findings = survey(model, adapter, select, causal)
    chosen = [each for each in findings if each.verdict == CONVERT and matches(select, each.place)]
    if not chosen:
        raise ValueError(_nothing_to_convert(model, findings))
    logits = initial_logits("to_sinkformer", settings.tau, [each.place for each in chosen])
    each_settings = _settings_each(settings, chosen, named=select is not None)
    for each, own in zip(chosen, each_settings, strict=True):
        apply(each, own, logits[id(each.place.module)])
    model.__dict__[REPORT] = Report([_entry(each) for each in findings])
    _finish(model)
    return model


def _warn_of_lost_tau(model: nn.Module) -> None:
    """Warn if a saved configuration says that tau was learned: transformers leaves out parameters it does not know."""
    stored = getattr(getattr(model, "config", None), "sinkhorn", None)
    each = [stored, *stored.get("modules", {}).values()] if isinstance(stored, dict) else []
    if any(settings.get("tau") == LEARNED for settings in each):
        warnings.warn(
            "to_sinkformer: the configuration of this model says that tau was learned. Its parameters sinkhorn_tau are "
            "added only now, so from_pretrained left their values out, and they begin at tau=0.5. Load them: "
            "model.load_state_dict(saved, strict=False), where `saved` is the state_dict in the saved file.",
            stacklevel=3,
        )


def to_transformer(model: Model) -> Model:
    """Restore every converted module of a model to SoftMax, in place, and keep its current weights.

    Parameters added by `tau="learned"` are removed. A model without converted modules is returned unchanged.

    Examples:
        >>> import torch, sinkformers
        >>> layer = sinkformers.to_sinkformer(torch.nn.MultiheadAttention(16, 4))
        >>> type(sinkformers.to_transformer(layer))
        <class 'torch.nn.modules.activation.MultiheadAttention'>
    """
    check_model("to_transformer", model)
    for module in model.modules():
        if settings_of(module) is None:
            continue
        adapter, undo = adapter_of(module), undo_of(module)
        if learns_tau(module):
            delattr(module, PARAMETER)
        for name in (SETTINGS, UNDO):
            del module.__dict__[name]
        adapter.restore(module, undo.state)
    model.__dict__.pop(REPORT, None)
    _finish(model)
    return model


def set_n_iters(model: nn.Module, n_iters: int | float, *, select: Select = None) -> None:
    """Set the number of iterations of all converted modules, or of those that `select` matches.

    Examples:
        >>> import torch, sinkformers
        >>> layer = sinkformers.to_sinkformer(torch.nn.MultiheadAttention(16, 4))
        >>> sinkformers.set_n_iters(layer, 21)
        >>> layer.sinkhorn
        Settings(n_iters=21, tau=1.0)
    """
    n_iters = checks.iterations("set_n_iters", n_iters)
    found = [(place.module, settings_of(place.module)) for place in select_converted("set_n_iters", model, select)]
    changed = [(module, old.with_iterations("set_n_iters", n_iters)) for module, old in found if old is not None]
    for module, settings in changed:  # all of them, or none if one is causal and the number is even
        module.__dict__[SETTINGS] = settings
    _finish(model)


def set_tau(model: nn.Module, tau: float | str, *, select: Select = None) -> None:
    """Set `tau` of all converted modules, or of those that `select` matches; an annealing schedule calls it each step.

    A learned `tau` stays a parameter, and is set to the given number. `"learned"` adds the parameter where it is
    missing.

    Examples:
        >>> import torch, sinkformers
        >>> layer = sinkformers.to_sinkformer(torch.nn.MultiheadAttention(16, 4), tau="learned")
        >>> sinkformers.set_tau(layer, 0.25)
        >>> layer.sinkhorn_tau.sigmoid()
        tensor([0.2500, 0.2500, 0.2500, 0.2500], grad_fn=<SigmoidBackward0>)
    """
    tau = check_tau("set_tau", tau)
    places = select_converted("set_tau", model, select)
    logits = initial_logits("set_tau", tau, places)
    for name, module, _ in places:
        with_tau("set_tau", name, module, tau, logits[id(module)])
    report = model.__dict__.get(REPORT)
    for entry in report.entries if report is not None else []:
        if entry.adapter is not None:
            entry.parameter = _parameter(entry.name, model.get_submodule(entry.name))
    _finish(model)


def _settings_each(settings: Settings, chosen: list[Finding], *, named: bool) -> list[Settings]:
    """Return the settings of each module: `causal` is for those that are causal, or for all if `named` ones are not.

    A module that is causal already keeps its definition where none is given.
    """
    for_all = named and not any(each.is_causal for each in chosen)
    found = []
    for each in chosen:
        causal, old = settings.causal, settings_of(each.place.module)
        if causal is None and old is not None:
            causal = old.causal
        own = replace(settings, causal=causal if each.is_causal or for_all else None)
        found.append(own.with_iterations("to_sinkformer", own.n_iters))
    return found


def _entry(finding: Finding) -> Entry:
    (name, module, _), row, verdict, _ = finding
    settings = settings_of(module)
    if settings is None:
        return Entry(name, type(module).__name__, None, verdict or "not selected")
    assert row is not None
    calls = module.__dict__.get(CALLS, {})
    return Entry(name, undo_of(module).kind, row.name, "", _parameter(name, module), calls, settings.causal)


def _parameter(name: str, module: nn.Module) -> str | None:
    if not learns_tau(module):
        return None
    return f"{name}.{PARAMETER}" if name else PARAMETER


def _finish(model: nn.Module) -> None:
    for row in ADAPTERS.values():
        row.finish(model)


def _nothing_to_convert(model: nn.Module, findings: list[Finding]) -> str:
    kind = type(model).__name__
    possible = [finding.place for finding in findings if finding.verdict == CONVERT]
    if possible:
        names = ", ".join(repr(place.name) for place in possible)
        return f"to_sinkformer: select matches none of the modules of this {kind} that can be converted: {names}."
    reasons: dict[str, list[Place]] = {}
    for finding in findings:
        reasons.setdefault(finding.verdict, []).append(finding.place)
    listed = "".join(
        f"\n  {places[0].name or kind} [{type(places[0].module).__name__}]"
        + (f" and {len(places) - 1} more" if len(places) > 1 else "")
        + f": {verdict}"
        for verdict, places in reasons.items()
    )
    message = f"to_sinkformer: this {kind} has no bidirectional self-attention that an adapter knows how to convert."
    if not reasons or UNKNOWN in reasons:
        listed += (
            "\nIf a module calls F.scaled_dot_product_attention, name it: "
            'to_sinkformer(model, adapter="sdpa", select=…).'
        )
    return message + ("" if reasons else " No attention was found at all.") + listed
