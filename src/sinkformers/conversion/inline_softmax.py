"""The adapter for modules that compute SoftMax of their scores themselves: that call is replaced where it is written.

A module is converted if its code shows that it attends: a SoftMax over the last axis of scores, which are a product of
two tensors, and values that are multiplied with the result. What code cannot show is checked at every call.
"""

import functools
import re
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinkformers.conversion.adapter import (
    CAUSAL,
    CONVERT,
    CROSS,
    CROSS_NAMES,
    POOLING,
    Adapter,
    Place,
    is_pooling,
    names_used,
    set_on_instance,
)
from sinkformers.conversion.attend import WARNED, normalise, refuse_unknown_cache
from sinkformers.conversion.inline_checks import (
    among_features,
    changed,
    has_projections,
    has_softmax_elsewhere,
    may_be_fused,
    number_of_heads,
)
from sinkformers.conversion.inline_flow import ANY, findings
from sinkformers.conversion.inline_masks import allowed_entries, without_self_padding
from sinkformers.conversion.inline_rewrite import Plan, changes, digest, rewritten
from sinkformers.conversion.inline_values import Findings
from sinkformers.conversion.intercept import CALLS, Subclassed, count, restore
from sinkformers.conversion.settings import LEARNED, is_softmax, settings_of

ATTENTION = re.compile(r"Att(entio)?n")
OTHER_AXIS = "its SoftMax is not over the last axis of its scores"
NO_VALUES = "its SoftMax is not multiplied with values: it pools, gates or normalises something else"
NO_SCORES = "its SoftMax is not of a product of queries and keys"
ANOTHER = "it has another SoftMax, which is not multiplied with values: this is not plain attention"
NOT_SELF = "its queries and keys come from different inputs"
LOOP = "its SoftMax is inside of a loop, which may apply it to its own weights"
IN_PLACE = "it changes the weights of its SoftMax in place"
FUNCTION = "its SoftMax is inside of a function in its method, which may be called with other queries and keys"
ELSEWHERE = "it calls a function that has a SoftMax of its own, where it cannot be replaced"
FUSED = "it may attend by a fused function, such as SDPA, instead of by its SoftMax"
CHANNELS = "it attends among channels, by its name"
NO_PROJECTIONS = "it has no projections, so that it is not known which axis of its input holds tokens"
ALTERED = "it joins the weights of several SoftMax before it uses them"
UNCOUNTED = f"{CROSS}, and its own code does not tell how many came before"
REDUCED = "it has unequally many queries and keys: the tokens are reduced first"
BLOCKS = "it attends between blocks of tokens, each query to its own set of keys: its scores are not square"
_CHANNELS = re.compile(r"channel|XCA|cross_?covariance", re.IGNORECASE)
_RATIO = re.compile(r"(^|_)(sr|reduction)_ratio|(^|_)stride")
_REDUCED_NAMES = re.compile(r"subsampl|downsampl", re.IGNORECASE)
_TOKENS = "_sinkhorn_tokens"  # the number of tokens of the last call that was replaced, or None
_ADDED_UP = "_sinkhorn_added_up"  # the number of features that the last product for scores added up
_BEFORE = "_sinkhorn_weights_before"  # weights that are about to be changed


def _recognise(place: Place) -> str | None:
    if not ATTENTION.search(type(place.module).__name__):
        return None
    found = findings(place.module)
    if found is None or not found.sites:
        return None
    own = set_on_instance(place.module, {"forward", *(name for name, _ in found.sites)})
    reason, examined = _stays(place), own or _examined(place.module, found)[0]
    if reason == CAUSAL and examined != CONVERT:
        return f"{CAUSAL}; {examined}"
    return reason or examined


def _examined(module: nn.Module, found: Findings) -> tuple[str, Plan | None]:
    """Return CONVERT and the plan of a module, or the reason not to convert it."""
    last = [key for key, site in found.sites.items() if site.dim is not None and (site.dim == -1 or site.dim > 1)]
    proven = [key for key in last if key in found.proven]
    if not last:
        return OTHER_AXIS, None
    if not proven:
        return NO_VALUES, None
    if len(proven) < len(last) or any(site.dim is None for site in found.sites.values()):
        return ANOTHER, None
    if found.looped.intersection(proven):
        return LOOP, None
    if found.inside.intersection(proven):
        return FUNCTION, None
    if may_be_fused(type(module)):
        return FUSED, None
    if has_softmax_elsewhere(type(module), {name for name, _ in found.sites}):
        return ELSEWHERE, None
    if not has_projections(module):
        return NO_PROJECTIONS, None
    if found.changed.intersection(proven):
        return IN_PLACE, None
    if any(found.alterations[number].inner is None for number in found.altered):
        return ALTERED, None
    scores = [found.scores[key] for key in proven]
    if not all(value.product for value in scores):
        return NO_SCORES, None
    queries = frozenset().union(*(value.left for value in scores))
    keys = frozenset().union(*(value.right for value in scores))
    if not queries or not keys or any(name.startswith(ANY) for name in queries | keys):
        return NOT_SELF, None
    apart = not queries & keys or any(value.unclear for value in scores)
    others, same = (frozenset(), queries | keys) if apart else (keys - queries, frozenset())
    same = same if len(same) > 1 else frozenset()
    asked = (others and queries) | others | same
    if asked and (any(name != "forward" for name, _ in proven) or any("[" in name for name in asked)):
        return NOT_SELF, None
    names = (tuple(sorted(each)) for each in (queries, others, same))
    made = changes(type(module), found, proven)
    return CONVERT, Plan(made, *names, digest=digest(type(module), (change.method for change in made)))


def _stays(place: Place) -> str | None:
    """Return why a module that attends is not converted, judging by names and attributes."""
    module: Any = place.module
    around = [type(each).__name__ for each in (module, *([] if place.parent is None else [place.parent]))]
    if any("Cross" in name for name in around) or CROSS_NAMES.search(place.name.rpartition(".")[2]):
        return UNCOUNTED
    if place.parent is not None and CROSS_NAMES.search(place.name):
        return UNCOUNTED
    if any(getattr(module, name, False) is True for name in ("is_causal", "is_decoder", "causal")):
        return CAUSAL
    if any(_is_triangle(each) for each in module.buffers(recurse=False)) or _under_causal_masks(place):
        return CAUSAL
    if _reduces(module):
        return REDUCED
    if _CHANNELS.search(type(module).__name__):
        return CHANNELS
    if any("block" in name for name in names_used(type(module))):
        return BLOCKS
    return POOLING if is_pooling(place) else None


def _reduces(module: nn.Module) -> bool:
    """Return whether a module has fewer keys than queries, or the reverse, by its names and its convolutions."""
    if _REDUCED_NAMES.search(type(module).__name__):
        return True
    for part in module.modules():
        stride = getattr(part, "stride", 1)
        if max(stride if isinstance(stride, tuple) else (stride,)) > 1:
            return True
    ratios = [value for name, value in vars(module).items() if _RATIO.search(name)]
    return any(isinstance(value, int) and value > 1 for value in ratios)


def _is_triangle(buffer: Tensor) -> bool:
    """Return whether a buffer is a causal mask: ones on and below the diagonal."""
    if buffer.dim() < 2 or buffer.shape[-1] != buffer.shape[-2] or buffer.shape[-1] < 2 or buffer.is_meta:
        return False
    return bool((buffer.bool() == torch.ones_like(buffer, dtype=torch.bool).tril()).all())


def _under_causal_masks(place: Place) -> bool:
    """Return whether a module that contains it builds causal masks, and no others."""
    for around in reversed(place.ancestors):
        used = names_used(type(around))
        builds = {name for name in used if "causal_mask" in name or "causal_attention_mask" in name}
        if builds and not any("bidirectional" in name for name in used):
            return True
    return False


class Inline(Subclassed):
    """First base of a converted class. Its changed methods call these."""

    def _sinkhorn_weights(
        self,
        scores: Tensor,
        *,
        dim: int,
        dtype: torch.dtype | None = None,
        mask: Tensor | None = None,
        original: Any = None,
        cross: bool = False,
    ) -> Tensor:
        """Return the weights for scores (…, n, m), in place of the module's own call of SoftMax."""
        settings = settings_of(self)
        assert settings is not None
        self.__dict__[_TOKENS] = None
        if settings.causal is not None and not cross and scores.dim() > 1:
            refuse_unknown_cache(self, settings, *scores.shape[-2:])
        reason = _left_alone(dim, scores, cross) or among_features(self, scores, self.__dict__.pop(_ADDED_UP, None))
        count(self, reason or "SoftMax call")
        if reason is not None and not is_softmax(settings) and not cross:
            _warn(self, scores, reason)
        softmax = F.softmax(scores, dim, dtype=dtype) if original is None else original(scores, mask, dim)
        if reason is not None:
            return softmax
        self.__dict__[_TOKENS] = scores.shape[-1]
        if mask is not None:
            scores = scores.masked_fill(~mask.bool(), -torch.inf)
        scores = scores if dtype is None else scores.to(dtype)
        heads = number_of_heads(self)
        if settings.tau == LEARNED and scores.dim() == 3 and heads != 1:
            raise NotImplementedError(
                f'sinkformers: {type(self).__name__}: tau="learned" has one value per head, and these scores have '
                f"heads and batch in one axis; got shape {tuple(scores.shape)}. Pass a number as tau."
            )
        allowed = None
        if not is_softmax(settings):
            one_way = settings.allow_one_way_mask
            allowed = allowed_entries(f"sinkformers: {type(self).__name__}", scores, heads, allow_one_way=one_way)
            if allowed is not None and not one_way and type(self).__name__ == "SinkhornXLNetRelativeAttention":
                allowed = without_self_padding(allowed)
        return normalise(self, settings, scores, allowed, softmax if is_softmax(settings) else None)

    def _sinkhorn_operand(self, weights: Tensor) -> Tensor:
        """Return weights that were viewed in another shape, and are about to be multiplied with values."""
        tokens = self.__dict__.get(_TOKENS)
        if tokens is not None and tuple(weights.shape[-2:]) != (tokens, tokens):
            raise RuntimeError(
                f"sinkformers: {type(self).__name__} multiplies values with weights of shape {tuple(weights.shape)}, "
                f"where Sinkhorn made them for {tokens} tokens. Leave the module out with `select`."
            )
        return weights

    def _sinkhorn_before(self, weights: Tensor) -> Tensor:
        """Return weights that are about to be changed, by a mask for instance, and remember them."""
        self.__dict__[_BEFORE] = weights
        return weights

    def _sinkhorn_after(self, weights: Tensor) -> Tensor:
        """Return weights that were changed; raise if entries were masked, which column sums have counted."""
        before, settings = self.__dict__.pop(_BEFORE), settings_of(self)
        assert settings is not None
        replaced = not is_softmax(settings) and self.__dict__.get(_TOKENS) is not None
        if replaced and (not isinstance(weights, Tensor) or changed(before, weights)):
            raise NotImplementedError(
                f"sinkformers: {type(self).__name__} masks its weights after SoftMax, or changes them otherwise, so "
                "that their columns do not sum to one. Leave the module out with `select`, or mask the scores instead."
            )
        return weights

    def _sinkhorn_factor(self, tensor: Tensor, axis: int) -> Tensor:
        """Return the first factor of scores, and remember how many features their product adds up."""
        self.__dict__[_ADDED_UP] = tensor.shape[axis]
        return tensor

    def _sinkhorn_crosses(self, queries: Any, others: Any, same: Any) -> bool:
        """Return whether the arguments of `forward` are those of cross-attention."""
        if any(isinstance(each, Tensor) and all(each is not query for query in queries) for each in others):
            return True
        tensors = [each for each in same if isinstance(each, Tensor)]
        return any(each is not tensors[0] for each in tensors)


def _left_alone(dim: int, scores: Tensor, cross: bool) -> str | None:
    """Return what a call is counted as that stays SoftMax, or None for one that is replaced."""
    if scores.dim() < 2 or dim not in (-1, scores.dim() - 1):
        return "SoftMax call over another axis left alone"
    if cross:
        return "cross-attention call left SoftMax"
    return None if scores.shape[-1] == scores.shape[-2] else "call with unequally many queries and keys left SoftMax"


def _warn(module: nn.Module, scores: Tensor, reason: str) -> None:
    """Warn, once per module, of a call that is not replaced although the module is converted."""
    if module.__dict__.get(WARNED) or torch.compiler.is_compiling():
        return
    module.__dict__[WARNED] = True
    n, m = scores.shape[-2:] if scores.dim() > 1 else (1, 0)
    how = reason.removeprefix("call that attends ").removesuffix(" left SoftMax")
    how = how if reason.startswith("call that attends") else f"with {n} queries to {m} keys"
    warnings.warn(
        f"sinkformers: {type(module).__name__} attends {how}, and stays SoftMax there: only attention among the same "
        "tokens is replaced. The report counts such calls.",
        stacklevel=3,
    )


@functools.cache
def _inline(kind: type[nn.Module], plan: Plan) -> type[nn.Module]:
    body = {"_sinkhorn_original": kind, "_sinkhorn_make": (_inline, plan), "__module__": __name__}
    return type(f"Sinkhorn{kind.__name__}", (Inline, kind), {**rewritten(kind, plan), **body})


def _convert(place: Place) -> None:
    found = findings(place.module)
    assert found is not None
    plan = _examined(place.module, found)[1]
    assert plan is not None
    place.module.__class__ = _inline(type(place.module), plan)
    place.module.__dict__[CALLS] = {}


def _restore(module: nn.Module, undo: Any) -> None:
    restore(module, undo)
    for name in (_TOKENS, _ADDED_UP, _BEFORE):
        module.__dict__.pop(name, None)


SOFTMAX = Adapter("softmax", _recognise, _convert, _restore, converts_causal=True)
