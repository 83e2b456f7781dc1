"""What causal attention refuses, and what it says."""

import math

import pytest
import torch

from sinkformers import SinkhornCache, backend_for, causal_sinkhorn, sinkhorn_attention
from tests.causal_cases import MASKS, tokens

TRIANGLE = MASKS["triangle"]


def refused(kind, message, *args, **kwargs):
    with pytest.raises(kind, match=message):
        sinkhorn_attention(*args, **kwargs)


def test_a_triangle_needs_as_many_queries_as_keys():
    given = tokens(MASKS["more keys"], 2)
    message = r"is_causal=True .* as many queries as new keys; got 5 and 13.*pass the cache.*causal=\"streaming\""
    refused(ValueError, message, *given, is_causal=True, n_iters=3)
    refused(ValueError, message, *given, is_causal=True, n_iters=3, tau=torch.tensor(0.5))
    refused(ValueError, message, *given, is_causal=True, n_iters=1, cache=SinkhornCache()[0])
    refused(ValueError, "as many queries", *given, is_causal=True, n_iters=3, cache=SinkhornCache().cross(0))
    sinkhorn_attention(*given, is_causal=True, n_iters=1)  # SDPA's own


@pytest.mark.parametrize("n_iters", [2, 4, 100, math.inf])
@pytest.mark.parametrize("causal", ["streaming", "prefix", None])
def test_rows_come_last(n_iters, causal):
    given = tokens(TRIANGLE, 2)
    message = rf"sinkhorn_attention: causal attention needs an odd, finite n_iters.*got {n_iters}.*n_iters=3"
    refused(ValueError, message, *given, is_causal=True, causal=causal, n_iters=n_iters)
    with pytest.raises(ValueError, match=message.replace("sinkhorn_attention", "causal_sinkhorn")):
        causal_sinkhorn(torch.randn(3, 3), n_iters=n_iters, definition=causal or "streaming")


def test_counts_are_whole_numbers():
    given = tokens(TRIANGLE, 2)
    for n_iters, kind in ((0, ValueError), (-3, ValueError), (3.5, ValueError), ("3", TypeError), (None, TypeError)):
        refused(kind, "n_iters must be a whole number ≥ 1", *given, is_causal=True, n_iters=n_iters)


def test_definitions_have_names():
    given = tokens(TRIANGLE, 2)
    for wrong in ("prefixes", "", True, 3, ["streaming"]):
        refused(ValueError, "causal must be one of 'streaming', 'prefix'; got", *given, causal=wrong)
        with pytest.raises(ValueError, match="definition must be one of 'streaming', 'prefix'; got"):
            causal_sinkhorn(torch.randn(3, 3), definition=wrong)


def test_a_cache_is_a_layer():
    given = tokens(TRIANGLE, 2)
    for wrong in (SinkhornCache(), True, [], "cache"):
        message = rf"cache must be one layer of a SinkhornCache, cache\[0\] for instance; got {type(wrong).__name__}"
        refused(TypeError, message, *given, is_causal=True, cache=wrong)
    for wrong in (-1, 1.0, "0", True, None):
        with pytest.raises(TypeError, match="a layer is a whole number ≥ 0"):
            SinkhornCache()[wrong]
        with pytest.raises(TypeError, match="a layer is a whole number ≥ 0"):
            SinkhornCache().cross(wrong)


def filled(*lead, n=5, d=5, e=3, dtype=torch.float32, **options):
    cache = SinkhornCache()
    given = [torch.randn(*lead, n, size).to(dtype) for size in (d, d, e)]
    sinkhorn_attention(*given, **{"is_causal": True, **options}, cache=cache[0])
    return cache[0]


@pytest.mark.parametrize(
    "other",
    [
        {"lead": (3, 4)},
        {"lead": (2, 8)},
        {"lead": (2,)},
        {"lead": (2, 4), "d": 7},
        {"lead": (2, 4), "e": 7},
        {"lead": (2, 4), "dtype": torch.float64},
    ],
    ids=str,
)
@pytest.mark.parametrize("n_iters", [1, 3])
def test_a_cache_of_another_batch_or_model(other, n_iters):
    lead, *_ = other.values()
    layer = filled(*lead, **{name: value for name, value in other.items() if name != "lead"}, n_iters=n_iters)
    given = [torch.randn(2, 4, 1, size) for size in (5, 5, 3)]
    message = r"the cache holds \w+s .* do not continue\. Take a new cache for another batch or model"
    refused(ValueError, message, *given, is_causal=True, n_iters=n_iters, cache=layer)


def test_a_cache_of_other_query_heads():
    cache, key = SinkhornCache(), torch.randn(2, 2, 1, 5)
    options = {"is_causal": True, "enable_gqa": True, "cache": cache[0]}
    sinkhorn_attention(torch.randn(2, 4, 1, 5), key, key, **options)
    refused(ValueError, "column sums of heads.*Take a new cache", torch.randn(2, 6, 1, 5), key, key, **options)


def test_a_cache_of_other_steps():
    given = [torch.randn(2, 1, size) for size in (5, 5, 3)]
    refused(
        ValueError, "filled with n_iters=5, and cannot be continued with n_iters=3", *given, is_causal=True,
        cache=filled(2, n_iters=5),
    )  # fmt: skip
    for options in ({"n_iters": 1}, {"tau": 0.0}):
        message = "filled with n_iters=1 or tau=0, which keeps no column sums, and cannot be continued with n_iters=3"
        refused(ValueError, message, *given, is_causal=True, cache=filled(2, **options))


@pytest.mark.parametrize(
    ("tau", "other"), [(0.5, 0.6), (torch.tensor([0.5]), torch.tensor([0.6])), (0.5, torch.tensor([0.6]))], ids=str
)
def test_a_cache_of_another_tau(tau, other):
    given = [torch.randn(2, 1, size) for size in (5, 5, 3)]
    message = "the cache was filled with tau=.*, and cannot be continued with tau=.*Take a new cache"
    refused(ValueError, message, *given, is_causal=True, tau=other, cache=filled(2, tau=tau))
    same = tau.clone() if isinstance(tau, torch.Tensor) else tau
    sinkhorn_attention(*given, is_causal=True, tau=same, cache=filled(2, tau=tau))


def test_a_growing_cache_in_cross_attention():
    """Its keys would be added again at every call."""
    given = tokens(MASKS["cross-attention"], 2)
    message = r"as many queries as new keys; got 13 and 7.*cache\.cross\(0\)"
    refused(ValueError, message, *given, causal="streaming", cache=SinkhornCache()[0])


def test_cross_attention_with_other_keys():
    query, key, value = tokens(MASKS["cross-attention"], 2)
    layer = SinkhornCache().cross(0)
    sinkhorn_attention(query, key, value, causal="streaming", cache=layer)
    message = r"the cache holds keys \(2, 7, 5\).*keys \(2, 6, 5\)"
    refused(ValueError, message, query, key[:, :6], value[:, :6], causal="streaming", cache=layer)


def test_one_triangle():
    given = tokens(TRIANGLE, 2)
    refused(ValueError, "pass attn_mask or is_causal=True, not both", *given, TRIANGLE, is_causal=True)
    refused(ValueError, "pass attn_mask or is_causal=True, not both", *given, TRIANGLE, is_causal=True, causal="prefix")


def test_a_mask_that_orders_tokens_says_how_to_ask():
    refused(NotImplementedError, 'must not order the tokens.*causal="streaming"', *tokens(TRIANGLE, 2), TRIANGLE)


def test_prefix():
    given = tokens(TRIANGLE, 2)
    refused(ValueError, "as many queries as keys.*got 5 and 13", *tokens(MASKS["more keys"], 2), causal="prefix")
    refused(NotImplementedError, "has no cache", *given, causal="prefix", is_causal=True, cache=SinkhornCache()[0])
    message = 'causal="prefix" is served by backend="torch" or "auto" only'
    refused(NotImplementedError, message, *given, causal="prefix", is_causal=True, backend="native")
    refused(ValueError, "backend must be one of", *given, causal="prefix", is_causal=True, backend="numpy")
    refused(ValueError, 'causal="prefix" needs is_causal=True or an attn_mask', *given, causal="prefix")


def test_backends():
    given = tokens(TRIANGLE, 2)
    refused(NotImplementedError, 'backend="triton" cannot serve this call', *given, is_causal=True, backend="triton")
    refused(ValueError, "backend must be one of", *given, is_causal=True, backend="numpy")
    refused(
        NotImplementedError, "without a cache", *given, is_causal=True, backend="reference", cache=SinkhornCache()[0]
    )
    assert backend_for(*given, is_causal=True, causal="prefix") == "torch"


def test_gradients_and_limits():
    given = tokens(TRIANGLE, 2)
    refused(ValueError, "gradient of the steps taken", *given, is_causal=True, gradient="implicit")
    refused(ValueError, "gradient must be one of", *given, is_causal=True, gradient="exact")
    refused(ValueError, "max_iters goes with n_iters=math.inf", *given, is_causal=True, max_iters=3)
    refused(ValueError, "tol", *given, is_causal=True, tol=1e-3)
    refused(ValueError, r"tau must lie in \[0, 1\]", *given, is_causal=True, tau=1.5)
    refused(ValueError, r"tau must lie in \[0, 1\]", *given, is_causal=True, tau=torch.tensor(1.5))
    refused(TypeError, "tau must be a number", *given, is_causal=True, tau="0.5")


def test_masks_have_all_keys():
    given, cache = tokens(TRIANGLE, 2), SinkhornCache()
    sinkhorn_attention(*given, is_causal=True, cache=cache[0])
    wrong = torch.ones(2, 13, dtype=torch.bool)
    refused(ValueError, r"key_mask must broadcast.*\(2, 26\)", *given, is_causal=True, cache=cache[0], key_mask=wrong)


def test_causal_sinkhorn():
    for scores, kind, message in (
        (torch.randn(3, 5), ValueError, "without a mask the scores must be square.*Pass a mask"),
        (torch.randn(3), ValueError, "scores must have at least 2 axes"),
        (torch.ones(3, 3, dtype=torch.long), TypeError, "scores must be float16"),
        ([[1.0]], TypeError, "scores must be a torch.Tensor"),
    ):
        with pytest.raises(kind, match=message):
            causal_sinkhorn(scores)
    with pytest.raises(ValueError, match='definition="prefix" is for square scores'):
        causal_sinkhorn(torch.randn(3, 5), mask=torch.ones(3, 5, dtype=torch.bool), definition="prefix")
    for mask, kind in ((torch.ones(3, 3), TypeError), ([[True]], TypeError), (torch.ones(4, 3).bool(), ValueError)):
        with pytest.raises(kind, match="causal_sinkhorn: mask must"):
            causal_sinkhorn(torch.randn(3, 3), mask=mask)
    with pytest.raises(ValueError, match="tau must lie"):
        causal_sinkhorn(torch.randn(3, 3), tau=-0.1)
    with pytest.raises(ValueError, match="tau must broadcast to the leading axes"):
        causal_sinkhorn(torch.randn(3, 3), tau=torch.ones(3))


def test_reordering_needs_samples():
    cache = SinkhornCache()
    sinkhorn_attention(*(torch.randn(5, 4) for _ in range(3)), is_causal=True, cache=cache[0])
    with pytest.raises(ValueError, match="no batch axis"):
        cache.reorder(torch.tensor([0]))
    with pytest.raises(TypeError, match="index must be a tensor of whole numbers"):
        cache.reorder([0, 1])
