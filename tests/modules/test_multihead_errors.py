"""Arguments that `MultiheadAttention` refuses."""

import pytest
import torch

from sinkformers import MultiheadAttention

ERRORS = [
    (lambda m, x: m(x, x, x, is_causal=True), ValueError, "is_causal is a hint that attn_mask is causal"),
    (
        lambda m, x: m(x, x, x, is_causal=True, attn_mask=torch.ones(5, 5).triu(1) > 0),
        NotImplementedError,
        "leaks and degenerates",
    ),
    (lambda m, x: m(x[0, 0], x, x), ValueError, "must all have 3 axes, or 2 without a batch"),
    (lambda m, x: m(x[..., :7], x, x), ValueError, r"must be \(8, 8, 8\) wide"),
    (lambda m, x: m(x, x, x[:, :4]), ValueError, "key and value must be equally long"),
    (lambda m, x: m(x[:1], x, x), ValueError, "all batches equal"),
    (
        lambda m, x: m(x, x, x, key_padding_mask=torch.ones(3, 4) > 0),
        ValueError,
        r"key_padding_mask must be .* \(3, 5\)",
    ),
    (lambda m, x: m(x, x, x, key_padding_mask=torch.ones(3, 5).long()), TypeError, "key_padding_mask must be boolean"),
    (lambda m, x: m(x, x, x, query_padding_mask=torch.ones(3, 5)), TypeError, "query_padding_mask must be boolean"),
    (lambda m, x: m(x, x, x, attn_mask=torch.ones(5, 5).long()), TypeError, "attn_mask must be boolean"),
    (lambda m, x: m(x, x, x, attn_mask=torch.ones(4, 5, 5) > 0), ValueError, "with batch·heads = 6"),
    (lambda m, x: m(x, x, x, attn_mask=torch.ones(5) > 0), ValueError, r"attn_mask must be \(n, m\)"),
    (
        lambda m, x: m(*[torch.nested.nested_tensor([x[0], x[1, :3]])] * 3),
        TypeError,
        "query must be a dense tensor; got a nested one",
    ),
    (lambda m, x: m(x, x.to_sparse(), x), TypeError, "key must be a dense tensor; got one of layout torch.sparse_coo"),
    (lambda m, x: m(x, x, x.to("meta")), ValueError, "value must be on the device of query, cpu; got meta"),
    (
        lambda m, x: m(x, x, x, attn_mask=(torch.ones(5, 5) > 0).to("meta")),
        ValueError,
        "attn_mask must be on the device of query",
    ),
    (
        lambda m, x: m(x, x, x, key_padding_mask=(torch.ones(3, 5) > 0).to("meta")),
        ValueError,
        "key_padding_mask must be on the device of query",
    ),
    (lambda m, x: m(x, x, x, attn_mask=torch.ones(6, 5, 7) > 0), ValueError, r"= \(6, 5, 5\); got shape \(6, 5, 7\)"),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("call", "kind", "message"), ERRORS)
def test_errors(call, kind, message):
    with pytest.raises(kind, match=f"MultiheadAttention: .*{message}"):
        call(MultiheadAttention(8, 2, batch_first=True), torch.randn(3, 5, 8))
