"""`MultiheadAttention`: `nn.MultiheadAttention` with Sinkhorn where it has SoftMax."""

from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinkformers.attention import attention_with_weights, sinkhorn_attention
from sinkformers.attention.arguments import refuse_causal
from sinkformers.attention.masks import Masks, combine, zero_masked
from sinkformers.attention.one_way import refuse_one_way
from sinkformers.core import checks

CALLER = "MultiheadAttention"


class MultiheadAttention(nn.MultiheadAttention):
    """Multi-head attention with the constructor, the forward and the state_dict of `nn.MultiheadAttention`.

    Args:
        *args, **kwargs: those of `nn.MultiheadAttention`: embed_dim, num_heads, dropout, bias, add_bias_kv,
            add_zero_attn, kdim, vdim, batch_first, device, dtype.
        n_iters, tau: as in `sinkhorn`; `n_iters=1` is `nn.MultiheadAttention`, except at padded queries. A `tau` that
            is an `nn.Parameter` is one more entry of the state_dict, and `tau` is its key.
        allow_one_way_mask: accept an `attn_mask` that orders the tokens, as in `sinkhorn_attention`; then `is_causal`,
            torch's hint that it does, is accepted too.

    Boolean masks mean *ignore*, as in torch's module and unlike in `sinkhorn_attention`. A `key_padding_mask` takes the
    padded keys out; where `query is key` it takes the padded queries out as well, since their rows would otherwise stay
    in the column sums. In cross-attention pass `query_padding_mask`. The attention of a padded query is zero, so that
    its output is the bias of the output projection; torch's module lets it attend to the valid keys. What stands in a
    masked token, NaN included, changes no other output and no gradient. docs/attention.md lists all differences.

    Examples:
        >>> import torch, sinkformers
        >>> layer = sinkformers.MultiheadAttention(16, 4, batch_first=True, n_iters=5)
        >>> x, padding = torch.randn(2, 7, 16), torch.arange(7) >= torch.tensor([[7], [4]])
        >>> out, weights = layer(x, x, x, key_padding_mask=padding)
        >>> out.shape, weights.shape
        (torch.Size([2, 7, 16]), torch.Size([2, 7, 7]))
    """

    tau: float | Tensor
    allow_one_way_mask: bool = False
    _one_way_caller = CALLER
    _one_way_remedy = "Take n_iters=1 or tau=0, which is SoftMax, or build the module with allow_one_way_mask=True."

    def __init__(
        self,
        *args: Any,
        n_iters: int = 3,
        tau: float | Tensor = 1.0,
        allow_one_way_mask: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.n_iters = checks.iterations(CALLER, n_iters)
        self.tau = checks.setting(CALLER, tau)
        self.allow_one_way_mask = allow_one_way_mask

    # nn.TransformerEncoderLayer reads this attribute to decide whether its fused SoftMax kernel may take the weights
    # and run without calling the module; the answer is no. Only torch's own initialisation needs the truth.
    @property
    def _qkv_same_embed_dim(self) -> bool:
        return self.__dict__.get("_initialising_packed", False)

    @_qkv_same_embed_dim.setter
    def _qkv_same_embed_dim(self, value: bool) -> None:
        self.__dict__["_initialising_packed"] = value

    def _reset_parameters(self) -> None:
        self.__dict__["_initialising_packed"] = self.in_proj_weight is not None
        super()._reset_parameters()
        del self.__dict__["_initialising_packed"]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        query_padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; see `nn.MultiheadAttention.forward` for shapes. `query_padding_mask` is boolean (batch, n)."""
        if is_causal and attn_mask is None:
            raise ValueError(f"{CALLER}: is_causal is a hint that attn_mask is causal; got no attn_mask. Pass both.")
        any_mask = self.allow_one_way_mask or self.n_iters == 1 or (isinstance(self.tau, float) and self.tau == 0)
        if is_causal and not any_mask:
            refuse_causal(CALLER)
        ignored = _ignored(key_padding_mask)
        if query_padding_mask is None and query is key:
            query_padding_mask = ignored
        batched = self._check(query, key, value, key_padding_mask, query_padding_mask)
        query, key, value = self._arrange(query, key, value, batched)
        extra = (self.bias_k is not None) + bool(self.add_zero_attn)
        n, m = query.shape[1], key.shape[1]
        attn_mask = _by_head(attn_mask, query, self.num_heads, m)
        keys = None if ignored is None else ~_as_batch(ignored, batched)
        queries = None if query_padding_mask is None else ~_as_batch(query_padding_mask, batched)
        if not any_mask and attn_mask is not None and attn_mask.shape[-2:] == (n, m):
            # The user's own mask, which is known when it comes again; what is made of it below is not.
            tokens = (side if side is None else side[:, None] for side in (queries, keys))
            refuse_one_way(self._one_way_caller, attn_mask, *tokens, remedy=self._one_way_remedy, hides=True)
        mask = _merge_masks(attn_mask, key_padding_mask, extra, batched)
        keys = None if keys is None else F.pad(keys, (0, extra), value=True)
        query, key, value = _zero_masked(query, key, value, mask, queries, keys)
        q, k, v = (self._split_heads(x) for x in self._project(query, key, value))
        k, v = self._extend(k, v)
        out, weights = self._attend(q, k, v, mask, queries, keys, need_weights)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        queries: Tensor | None,
        keys: Tensor | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Output and, where asked for, weights, of heads (batch, heads, n, d), in SDPA's conventions."""
        options: dict[str, Any] = {"n_iters": self.n_iters, "tau": self.tau, "query_mask": queries, "key_mask": keys}
        options["allow_one_way_mask"] = True  # `forward` has refused what is not allowed
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            return attention_with_weights(query, key, value, mask, dropout, **options)
        return sinkhorn_attention(query, key, value, mask, dropout, **options), None

    def _check(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding: Tensor | None, query_padding: Tensor | None
    ) -> bool:
        """Refuse shapes that do not fit; tell whether there is a batch axis."""
        for name, tokens in (("query", query), ("key", key), ("value", value)):
            checks.dense(CALLER, name, tokens)
        masks = {"key_padding_mask": key_padding, "query_padding_mask": query_padding}
        checks.one_device(CALLER, "query", query, key=key, value=value, **masks)
        shapes = f"got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}."
        if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim():
            raise ValueError(f"{CALLER}: query, key and value must all have 3 axes, or 2 without a batch; {shapes}")
        widths = (self.embed_dim, self.kdim, self.vdim)
        if (query.shape[-1], key.shape[-1], value.shape[-1]) != widths:
            raise ValueError(f"{CALLER}: query, key and value must be {widths} wide (embed_dim, kdim, vdim); {shapes}")
        batched = query.dim() == 3
        axis = 0 if self.batch_first or not batched else 1
        if key.shape[:-1] != value.shape[:-1] or (batched and query.shape[axis] != key.shape[axis]):
            raise ValueError(f"{CALLER}: key and value must be equally long, and all batches equal; {shapes}")
        for name, padding, tokens in (("key", key_padding, key), ("query", query_padding, query)):
            if padding is None:
                continue
            if name == "query" and padding.dtype != torch.bool:
                raise TypeError(f"{CALLER}: query_padding_mask must be boolean, True to ignore; got {padding.dtype}.")
            lead = tokens.shape[:-1] if axis == 0 else tokens.shape[1::-1]
            if padding.shape != lead:
                raise ValueError(
                    f"{CALLER}: {name}_padding_mask must be (batch, length) = {tuple(lead)}; "
                    f"got {tuple(padding.shape)}."
                )
        return batched

    def _arrange(self, query: Tensor, key: Tensor, value: Tensor, batched: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Batch axis first; what was one tensor stays one."""

        def first(x: Tensor) -> Tensor:
            return x[None] if not batched else x if self.batch_first else x.transpose(0, 1)

        new_query = first(query)
        new_key = new_query if key is query else first(key)
        return new_query, new_key, new_query if value is query else new_key if value is key else first(value)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if self.in_proj_weight is None:
            matrices = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        elif query is key and key is value:
            return F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            matrices = self.in_proj_weight.chunk(3)
        return tuple(F.linear(*each) for each in zip((query, key, value), matrices, biases, strict=True))

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values with the extra ones of `add_bias_kv` and `add_zero_attn`."""
        if self.bias_k is not None and self.bias_v is not None:
            more = (self._split_heads(b.expand(key.shape[0], 1, -1)) for b in (self.bias_k, self.bias_v))
            key, value = (torch.cat(pair, 2) for pair in zip((key, value), more, strict=True))
        if self.add_zero_attn:
            key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
        return key, value


@overload
def _ignored(padding: Tensor) -> Tensor: ...


@overload
def _ignored(padding: None) -> None: ...


def _ignored(padding: Tensor | None) -> Tensor | None:
    """A padding mask as booleans, True to ignore; a float one ignores where it is minus infinity, or nearly."""
    if padding is None or padding.dtype == torch.bool:
        return padding
    if not padding.is_floating_point():
        raise TypeError(f"{CALLER}: key_padding_mask must be boolean (True to ignore) or float; got {padding.dtype}.")
    return padding <= torch.finfo(padding.dtype).min / 2


def _as_batch(padding: Tensor, batched: bool) -> Tensor:
    return padding if batched else padding[None]


def _by_head(attn_mask: Tensor | None, query: Tensor, heads: int, m: int) -> Tensor | None:
    """A mask (n, m), or (batch, heads, n, m) where there is one per head, for queries (batch, n, embed_dim)."""
    if attn_mask is None:
        return None
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise TypeError(f"{CALLER}: attn_mask must be boolean (True to ignore) or float; got {attn_mask.dtype}.")
    checks.dense(CALLER, "attn_mask", attn_mask)
    checks.one_device(CALLER, "query", query, attn_mask=attn_mask)
    batch, n = query.shape[:2]
    if attn_mask.dim() not in (2, 3):
        raise ValueError(f"{CALLER}: attn_mask must be (n, m) or (batch·heads, n, m); got {tuple(attn_mask.shape)}.")
    if attn_mask.dim() == 3 and attn_mask.shape[0] != batch * heads:
        raise ValueError(
            f"{CALLER}: a 3-axis attn_mask must be (batch·heads, n, m), with batch·heads = {batch * heads}; "
            f"got {tuple(attn_mask.shape)}."
        )
    shape = torch.Size((batch * heads, n, m)[-attn_mask.dim() :])
    checks.broadcasts(CALLER, "attn_mask", attn_mask, shape, "(n, m) or (batch·heads, n, m)")
    attn_mask = attn_mask if attn_mask.shape[-1] == m else attn_mask.expand(*attn_mask.shape[:-1], m)
    return attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, (batch, heads))


def _merge_masks(attn_mask: Tensor | None, key_padding: Tensor | None, extra: int, batched: bool) -> Tensor | None:
    """What torch's module adds to the scores, in SDPA's conventions: boolean with True to attend, or a float bias."""
    merged = None
    if attn_mask is not None:
        allowed = attn_mask.dtype == torch.bool
        merged = F.pad(~attn_mask if allowed else attn_mask, (0, extra), value=True if allowed else 0.0)
    if key_padding is None or key_padding.dtype == torch.bool:
        return merged
    bias = F.pad(_as_batch(key_padding, batched), (0, extra))[:, None, None, :]
    if merged is None:
        return bias
    return bias.masked_fill(~merged, -torch.inf) if merged.dtype == torch.bool else merged + bias


def _zero_masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    queries: Tensor | None,
    keys: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (batch, n, dim) that are masked in every head set to zero, so that NaN there does not reach the
    gradients of the projections. A tensor that serves as query and key is masked where it is so as both."""
    if mask is not None:
        allowed = mask if mask.dtype == torch.bool else ~_ignored(mask)
        combined = combine(Masks(None, allowed, *(side if side is None else side[:, None] for side in (queries, keys))))
        # (…, n) and (…, m), to which a mask per head gave a head axis
        queries, keys = (side if side is None or side.dim() < 3 else side.any(1) for side in combined[2:])
    keys = None if keys is None else keys[..., : key.shape[1]]
    if query is key or query is value:
        queries = None if queries is None or keys is None else queries | keys
    new_query = zero_masked(query, queries)
    new_key = new_query if key is query else zero_masked(key, keys)
    return new_query, new_key, new_query if value is query else new_key if value is key else zero_masked(value, keys)
