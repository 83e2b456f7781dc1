"""The modules' mathematics in plain torch operations, in any dtype. Nothing here is imported from the library."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuzzing import oracle
from fuzzing.case import Case

Tensors = dict[str, Tensor]


def heads_of(x: Tensor, count: int) -> Tensor:
    """Tokens (…, n, heads·d) as (…, heads, n, d)."""
    return x.unflatten(-1, (count, -1)).transpose(-3, -2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(-3, -2).flatten(-2)


def attend(
    case: Case,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    valid: Tensor,
    scale: float,
    bias: Tensor | None = None,
    n_iters: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and weights of heads (…, heads, n, d)."""
    scores = scale * query @ key.mT
    scores = scores if bias is None else scores + bias
    valid = valid.expand(scores.shape)
    tau = torch.tensor(float(case.tau), dtype=scores.dtype).expand(scores.shape[:-2])
    run = oracle.iterate(
        scores, valid, case.n_iters if n_iters is None else n_iters, tau if n_iters is None else torch.ones_like(tau)
    )
    return run.weights @ value, run.weights


def pairs(queries: Tensor | None, keys: Tensor | None, n: int, m: int) -> Tensor:
    """Valid entries (…, 1, n, m) of valid tokens (…, n) and (…, m)."""
    rows = torch.ones(n, dtype=torch.bool) if queries is None else queries
    cols = torch.ones(m, dtype=torch.bool) if keys is None else keys
    return (rows[..., :, None] & cols[..., None, :]).unsqueeze(-3)


def clean(x: Tensor, valid: Tensor | None) -> Tensor:
    return x if valid is None else torch.where(valid[..., None], x, 0.0)


def self_attention(case: Case, p: Tensors, x: Tensors, masks: Tensors) -> Tensors:
    mask, heads = masks.get("query_mask"), case.module.get("heads", 1)
    tokens = clean(x["x"], mask)
    parts = F.linear(tokens, p["project.weight"], p.get("project.bias"))
    parts = parts.chunk(2 if case.module.get("tie_qk") else 3, -1)
    query, key, value = (heads_of(part, heads) for part in (parts[0], parts[-2], parts[-1]))
    seen, _ = attend(case, query, key, value, pairs(mask, mask, case.n, case.n), case.e**-0.5)
    return {"out": F.linear(joined(seen), p["out.weight"], p["out.bias"])}


def mab(
    case: Case,
    p: Tensors,
    x: Tensor,
    y: Tensor,
    queries: Tensor | None,
    keys: Tensor | None,
    n_iters: int | None = None,
) -> Tensor:
    heads = case.module.get("heads", 1)
    x, y = clean(x, queries), clean(y, keys)
    q = F.linear(x, p["query.weight"], p["query.bias"])
    k, v = (F.linear(y, p[f"{name}.weight"], p[f"{name}.bias"]) for name in ("key", "value"))
    width = q.shape[-1] if case.module.get("scale_by") == "width" else q.shape[-1] // heads
    valid = pairs(queries, keys, q.shape[-2], k.shape[-2])
    lead = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    q, k, v = (t.expand(*lead, *t.shape[-2:]) for t in (q, k, v))
    seen, _ = attend(
        case, heads_of(q, heads), heads_of(k, heads), heads_of(v, heads), valid, width**-0.5, n_iters=n_iters
    )
    h = _norm(q + joined(seen), p, "attention_norm")
    return _norm(h + F.linear(h, p["out.weight"], p["out.bias"]).relu(), p, "out_norm")


def _norm(x: Tensor, p: Tensors, name: str) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"]) if f"{name}.weight" in p else x


def within(p: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix + "."): x for name, x in p.items() if name.startswith(prefix + ".")}


def mab_module(case: Case, p: Tensors, x: Tensors, masks: Tensors) -> Tensors:
    return {"out": mab(case, p, x["x"], x["y"], masks.get("query_mask"), masks.get("key_mask"))}


def sab(case: Case, p: Tensors, x: Tensors, masks: Tensors) -> Tensors:
    mask = masks.get("query_mask")
    return {"out": mab(case, within(p, "mab"), x["x"], x["x"], mask, mask)}


def isab(case: Case, p: Tensors, x: Tensors, masks: Tensors) -> Tensors:
    mask = masks.get("query_mask")
    induced = mab(case, within(p, "induce"), p["inducing"], x["x"], None, mask)
    return {"out": mab(case, within(p, "spread"), x["x"], induced, mask, None)}


def pma(case: Case, p: Tensors, x: Tensors, masks: Tensors) -> Tensors:
    single = case.module.get("points", 1) == 1 and not case.module.get("literal")
    found = mab(case, within(p, "mab"), p["seeds"], x["x"], None, masks.get("query_mask"), 1 if single else None)
    return {"out": found}


def offset_attention(case: Case, p: Tensors, x: Tensors, masks: Tensors) -> Tensors:
    tokens = x["x"]
    key, value = F.linear(tokens, p["key.weight"]), F.linear(tokens, p["value.weight"], p["value.bias"])
    scores = key @ key.mT
    if case.module.get("port"):  # SoftMax along rows, columns divided by their sums, the result transposed
        weights = scores.softmax(-1)
        weights = (weights / weights.sum(-2, keepdim=True)).mT
    else:
        everyone = torch.ones(scores.shape, dtype=torch.bool)
        tau = torch.tensor(float(case.tau), dtype=scores.dtype).expand(scores.shape[:-2])
        weights = oracle.iterate(scores, everyone, case.n_iters, tau).weights
    moved = F.linear(tokens - weights @ value, p["out.weight"], p["out.bias"])
    flat = moved.flatten(0, -2)
    mean, spread = flat.mean(0), flat.var(0, correction=0)
    normed = (moved - mean) / (spread + 1e-5).sqrt() * p["norm.weight"] + p["norm.bias"]
    return {"out": tokens + normed.relu()}


def multihead(case: Case, p: Tensors, x: Tensors, masks: Tensors) -> Tensors:
    """True in `key_mask` and `query_mask` is valid here, True in a boolean `attn_mask` is ignored, as in torch."""
    module, heads = case.module, case.module.get("heads", 1)
    query, key, value = (x.get(name, x["query"]) for name in ("query", "key", "value"))
    first = module.get("batch_first") or not case.lead
    query, key, value = (t if first else t.transpose(0, 1) for t in (query, key, value))
    keys = masks.get("key_mask")
    queries = keys if module.get("self") else masks.get("query_mask")
    query, key, value = clean(query, queries), clean(key, keys), clean(value, keys)
    if "in_proj_weight" in p:
        matrices = p["in_proj_weight"].chunk(3)
    else:
        matrices = tuple(p[f"{name}_proj_weight"] for name in "qkv")
    biases = p["in_proj_bias"].chunk(3) if "in_proj_bias" in p else (None,) * 3
    q, k, v = (F.linear(t, w, b) for t, w, b in zip((query, key, value), matrices, biases, strict=True))
    if "bias_k" in p:
        k, v = (
            torch.cat([t, p[name][0].expand(*t.shape[:-2], 1, -1)], -2) for t, name in ((k, "bias_k"), (v, "bias_v"))
        )
    if module.get("add_zero_attn"):
        k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
    extra = k.shape[-2] - key.shape[-2]
    keys = None if keys is None else F.pad(keys, (0, extra), value=True)
    valid, bias = pairs(queries, keys, q.shape[-2], k.shape[-2]), None
    attn_mask = masks.get("attn_mask")
    if attn_mask is not None:
        attn_mask = F.pad(attn_mask, (0, extra))
        attn_mask = attn_mask.unflatten(0, (-1, heads)) if attn_mask.dim() == 3 else attn_mask
        attn_mask = attn_mask if case.lead or attn_mask.dim() < 4 else attn_mask[0]
        if attn_mask.dtype == torch.bool:
            valid = valid & ~attn_mask
        else:
            bias = attn_mask.to(q.dtype)
            valid = valid & (bias > -torch.inf)
            bias = torch.where(bias == -torch.inf, 0.0, bias)
    seen, weights = attend(
        case, heads_of(q, heads), heads_of(k, heads), heads_of(v, heads), valid, (case.d // heads) ** -0.5, bias
    )
    out = F.linear(joined(seen), p["out_proj.weight"], p.get("out_proj.bias"))
    out = out if first else out.transpose(0, 1)
    if not module.get("weights"):
        return {"out": out}
    return {"out": out, "weights": weights.mean(-3) if module.get("average", True) else weights}


def solved(case: Case, p: Tensors, x: Tensors, masks: Tensors) -> Tensors:
    raise NotImplementedError("this layer is known by what it promises, not by its output")


def balance(case: Case, layer: Any, x: Tensor, z: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """`(x − z) + (1/(pull·eps)) Σ_j K^∞_ij A x_j` at the valid tokens, and the norm of z."""
    heads = case.module.get("heads", 1)
    x, z = clean(x, valid), clean(z, valid)
    weight, eps, pull = layer.project.weight.double(), float(layer.eps), float(layer.pull)
    tokens = heads_of(F.linear(x, weight), heads)
    scores = tokens @ tokens.mT / eps
    everyone = pairs(valid, valid, case.n, case.n).expand(scores.shape)
    f = torch.zeros_like(scores[..., 0])
    rows = everyone.any(-1)
    scores = torch.where(everyone, scores, -torch.inf)
    for _ in range(200):  # the averaged update halves the error at every step
        f = torch.where(rows, 0.5 * (f - oracle.masked_lse(scores + f[..., None, :], -1, rows)), 0.0)
    weights = oracle.masked_exp(scores + f[..., None] + f[..., None, :])
    attended = F.linear(joined(weights @ tokens), weight.T)
    return clean(x - z + attended / (eps * pull), valid), z.norm(dim=(-2, -1), keepdim=True)


ORACLES: dict[str, Callable[[Case, Tensors, Tensors, Tensors], Tensors]] = {
    "MultiheadAttention": multihead,
    "SelfAttention": self_attention,
    "MAB": mab_module,
    "SAB": sab,
    "ISAB": isab,
    "PMA": pma,
    "OffsetAttention": offset_attention,
    "InvertibleAttention": solved,
    "EquilibriumAttention": solved,
}
