"""`MultiheadAttention`: `nn.MultiheadAttention` with Sinkhorn in place of SoftMax."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinkformers.attention import attention_with_weights, sinkhorn_attention
from sinkformers.attention.arguments import check_prefix_mask, refuse_causal
from sinkformers.attention.one_way import refuse_one_way
from sinkformers.core import checks
from sinkformers.modules.heads import check_causal
from sinkformers.modules.multihead_masks import CALLER, as_batch, as_ignored, by_head, merge_masks, zero_masked_tokens
from sinkformers.modules.representation import describe

PACKED = "_qkv_same_embed_dim"  # torch's private attribute, see `check_fused_kernel_is_off`
_INITIALISING = "_sinkhorn_initialising"


def check_fused_kernel_is_off(module: nn.MultiheadAttention) -> None:
    """Raise if this version of torch does not have the attribute that keeps its fused SoftMax kernel off.

    `nn.TransformerEncoderLayer` runs the fused kernel on the weights, without calling the module, unless
    `_qkv_same_embed_dim` is false. Without that attribute the attention would silently be SoftMax.
    """
    if PACKED not in module.__dict__:
        raise RuntimeError(
            f"{CALLER}: nn.MultiheadAttention of torch {torch.__version__} has no attribute {PACKED}, so its fused "
            "SoftMax kernel cannot be kept off. Use a version of torch that has it; the tests pass with 2.13."
        )


class MultiheadAttention(nn.MultiheadAttention):
    """Multi-head attention with the constructor, the forward and the state_dict of `nn.MultiheadAttention`.

    Args:
        *args, **kwargs: those of `nn.MultiheadAttention`: embed_dim, num_heads, dropout, bias, add_bias_kv,
            add_zero_attn, kdim, vdim, batch_first, device, dtype.
        n_iters, tau: as in `sinkhorn`; `n_iters=1` is `nn.MultiheadAttention`, except at padded queries. A `tau` that
            is an `nn.Parameter` adds the key `tau` to the state_dict.
        allow_one_way_mask: accept an `attn_mask` that orders the tokens, as in `sinkhorn_attention`, and `is_causal`,
            torch's hint that it does.
        causal: `"streaming"` or `"prefix"`: rows are normalised in order, under whatever masks are given, so that no
            output depends on a later query, as in `sinkhorn_attention`. In self-attention pass a triangle as
            `attn_mask` too, as to torch's module; cross-attention of a decoder needs none.

    Boolean masks are True at what to *ignore*, as in torch's module and unlike in `sinkhorn_attention`. A
    `key_padding_mask` masks keys. If `query is key` it masks the same queries too, because their rows would otherwise
    count in the column sums. In cross-attention pass `query_padding_mask`. The attention of a padded query is zero, so
    its output is the bias of the output projection; torch's module lets it attend to the valid keys. The contents of
    masked tokens, NaN included, change no other output and no gradient. docs/attention.md lists all differences.

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
    causal: str | None = None
    _one_way_caller = CALLER
    _one_way_remedy = (
        'Build the module with causal="streaming", or with allow_one_way_mask=True if that is meant, or take n_iters=1 '
        "or tau=0, which is SoftMax."
    )

    def __init__(
        self,
        *args: Any,
        n_iters: int | float = 3,
        tau: float | Tensor = 1.0,
        allow_one_way_mask: bool = False,
        causal: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.__dict__[_INITIALISING] = True
        super().__init__(*args, **kwargs)
        self.__dict__.pop(_INITIALISING, None)
        check_fused_kernel_is_off(self)
        self.n_iters = checks.iterations(CALLER, n_iters)
        self.tau = checks.setting(CALLER, tau)
        self.allow_one_way_mask, self.causal = allow_one_way_mask, check_causal(CALLER, causal, n_iters)

    # Only torch's own initialisation gets the true value; false keeps the fused SoftMax kernel off.
    @property
    def _qkv_same_embed_dim(self) -> bool:
        return self.__dict__[PACKED] if self.__dict__.get(_INITIALISING) else False

    @_qkv_same_embed_dim.setter
    def _qkv_same_embed_dim(self, value: bool) -> None:
        self.__dict__[PACKED] = value

    def _reset_parameters(self) -> None:
        self.__dict__[_INITIALISING] = True
        super()._reset_parameters()
        del self.__dict__[_INITIALISING]

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
        """Return the output, and the weights or None.

        Shapes are those of `nn.MultiheadAttention.forward`; `query_padding_mask` is boolean (batch, n).
        """
        if is_causal and attn_mask is None:
            raise ValueError(f"{CALLER}: is_causal is a hint that attn_mask is causal; got no attn_mask. Pass both.")
        if self.causal == "prefix":  # a float key_padding_mask becomes a bias, which does not order tokens
            check_prefix_mask(given=attn_mask is not None)
        any_mask = self.allow_one_way_mask or self.causal is not None or self._is_softmax()
        if is_causal and not any_mask:
            refuse_causal(CALLER)
        ignored = as_ignored(key_padding_mask)
        if query_padding_mask is None and query is key:
            query_padding_mask = ignored
        batched = self._check(query, key, value, key_padding_mask, query_padding_mask)
        query, key, value = self._arrange(query, key, value, batched)
        extra = (self.bias_k is not None) + bool(self.add_zero_attn)
        n, m = query.shape[1], key.shape[1]
        attn_mask = by_head(attn_mask, query, self.num_heads, m)
        keys = None if ignored is None else ~as_batch(ignored, batched)
        queries = None if query_padding_mask is None else ~as_batch(query_padding_mask, batched)
        if not any_mask and attn_mask is not None and attn_mask.shape[-2:] == (n, m):
            # Check the user's own tensor: the result is cached for it, and not for the masks that are derived below.
            tokens = (side if side is None else side[:, None] for side in (queries, keys))
            refuse_one_way(self._one_way_caller, attn_mask, *tokens, remedy=self._one_way_remedy, hides=True)
        mask = merge_masks(attn_mask, key_padding_mask, extra, batched)
        keys = None if keys is None else F.pad(keys, (0, extra), value=True)
        query, key, value = zero_masked_tokens(query, key, value, mask, queries, keys)
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
        """Return the output, and the weights if `need_weights`, of heads (batch, heads, n, d); masks as in SDPA."""
        options: dict[str, Any] = {"n_iters": self.n_iters, "tau": self.tau, "query_mask": queries, "key_mask": keys}
        options |= {"causal": self.causal, "allow_one_way_mask": True}  # `forward` has checked the mask
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            return attention_with_weights(query, key, value, mask, dropout, **options)
        return sinkhorn_attention(query, key, value, mask, dropout, **options), None

    def _is_softmax(self) -> bool:
        return self.n_iters == 1 or (isinstance(self.tau, float) and self.tau == 0)

    def _check(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding: Tensor | None, query_padding: Tensor | None
    ) -> bool:
        """Raise if shapes do not match; return whether there is a batch axis."""
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
        """Move the batch axis to the front; tensors that are identical stay identical."""

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
        """Append the extra keys and values of `add_bias_kv` and `add_zero_attn`."""
        if self.bias_k is not None and self.bias_v is not None:
            more = (self._split_heads(b.expand(key.shape[0], 1, -1)) for b in (self.bias_k, self.bias_v))
            key, value = (torch.cat(pair, 2) for pair in zip((key, value), more, strict=True))
        if self.add_zero_attn:
            key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
        return key, value

    def _settings(self) -> dict[str, Any]:
        """`n_iters`, `tau` and `causal` as `extra_repr` shows them."""
        return {"n_iters": self.n_iters, "tau": self.tau, "causal": self.causal}

    def extra_repr(self) -> str:
        options = {"dropout": self.dropout, "batch_first": self.batch_first}
        options |= {name: width for name in ("kdim", "vdim") if (width := getattr(self, name)) != self.embed_dim}
        options["allow_one_way_mask"] = self.allow_one_way_mask
        return describe(embed_dim=self.embed_dim, num_heads=self.num_heads, **self._settings(), **options)
