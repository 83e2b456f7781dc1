"""Masks that order the tokens are refused, and no others: compared with a definition in loops."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from sinkformers import sinkhorn_attention
from sinkformers.attention import attention_with_weights, one_way
from sinkformers.attention.one_way import is_one_way
from tests.one_way_masks import ORDERED, REFUSED, UNORDERED, K, N, Q, as_bias, by_definition


def attend(mask, **options):
    tokens = torch.randn(2, 3, mask.shape[-2], 4)
    return sinkhorn_attention(tokens, tokens, tokens, mask, **options)


@pytest.mark.parametrize("name", ORDERED)
@pytest.mark.parametrize("kind", ["boolean", "infinite", "lowest", "half of the lowest"])
def test_masks_that_order_the_tokens_are_refused(name, kind):
    mask, lowest = ORDERED[name], torch.finfo(torch.float32).min
    assert by_definition(mask.tolist())
    given = {
        "boolean": lambda: mask,
        "infinite": lambda: as_bias(mask),
        "lowest": lambda: as_bias(mask, lowest),
        "half of the lowest": lambda: as_bias(mask, lowest / 2),
    }[kind]()
    with REFUSED:
        attend(given)
    assert attend(given, allow_one_way_mask=True).isfinite().all()


@pytest.mark.parametrize("name", UNORDERED)
def test_others_pass(name):
    mask = UNORDERED[name]
    assert not by_definition(mask.tolist())
    for given in (mask, as_bias(mask), as_bias(mask, torch.finfo(torch.float32).min)):
        attend(given)
    attend(as_bias(~ORDERED["lower triangle"], -1e4))  # a large number hides nothing


def test_every_mask_of_three_tokens():
    """All 512 of them, and each with queries and keys that are padding."""
    masks = torch.tensor(list(itertools.product([False, True], repeat=9))).view(-1, 3, 3)
    tokens = torch.tensor(list(itertools.product([False, True], repeat=3)))
    for number, mask in enumerate(masks):
        entries = mask.tolist()
        assert is_one_way(mask) == by_definition(entries)
        assert is_one_way(~mask, hides=True) == by_definition(entries)
        queries, keys = tokens[number % 8], tokens[number // 8 % 8]
        for sides in ((queries, None), (None, keys), (queries, keys)):
            expected = by_definition(entries, *(None if side is None else side.tolist() for side in sides))
            assert is_one_way(mask, *sides) == expected
            assert is_one_way(~mask, *sides, hides=True) == expected
            assert is_one_way(as_bias(mask), *sides) == expected


@pytest.mark.parametrize("n", [4, 5, 63, 64, 65, 150])
def test_random_masks_that_are_nearly_symmetric(n):
    """From symmetric ones by a few entries, so that the answer depends on the last of them, wherever it stands."""
    generator = torch.Generator().manual_seed(n)
    answers = set()
    for _ in range(400 if n < 10 else 25):
        mask = torch.rand(n, n, generator=generator) < 0.5
        mask = mask | mask.mT
        for _ in range(int(torch.randint(4, (), generator=generator))):
            i, j = torch.randint(n, (2,), generator=generator).tolist()
            mask[i, j] ^= True
        lost = torch.rand(2, n, generator=generator) < 1 / n
        mask[lost[0]] = False
        queries, keys = torch.rand(2, n, generator=generator) > 1 / n
        assert is_one_way(mask) == by_definition(mask.tolist())
        expected = by_definition(mask.tolist(), queries.tolist(), keys.tolist())
        assert is_one_way(mask, queries, keys) == expected
        assert is_one_way(as_bias(mask)[None, None].expand(2, 3, n, n), queries, keys) == expected
        answers.add(expected)
    assert answers == {False, True}


def test_a_bias_of_nan_hides_nothing():
    bias = as_bias(UNORDERED["window"])
    bias[11, 2] = torch.nan
    assert is_one_way(bias)
    bias[2, 11] = torch.nan
    assert not is_one_way(bias)


def test_one_matrix_is_enough():
    masks = torch.stack([UNORDERED["window"], UNORDERED["random"], ORDERED["prefix"], UNORDERED["everything"]])
    assert is_one_way(masks)
    assert not is_one_way(masks[[0, 1, 3]])
    # Neither kind of pair makes up for the other across matrices.
    assert is_one_way(torch.stack([ORDERED["lower triangle"], ORDERED["upper triangle"]]))
    x = torch.randn(2, 2, N, 4)
    for mask in (
        masks.view(2, 2, N, N),
        masks[1:3, None],
        masks[2:].transpose(0, 1).contiguous().transpose(0, 1)[:, None],
    ):
        with REFUSED:
            sinkhorn_attention(x, x, x, mask)


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("way", ["both masks", "keys only", "queries only"])
def test_a_triangle_beside_padding_is_refused(side, way):
    valid = {"left": K >= 4, "right": K < 9, "both": (K >= 3) & (K < 10)}[side].expand(2, N)
    masks = {"query_mask": None if way == "keys only" else valid, "key_mask": None if way == "queries only" else valid}
    for mask in (ORDERED["lower triangle"], as_bias(ORDERED["upper triangle"])):
        with REFUSED:
            attend(mask, **masks)
    attend(UNORDERED["window"], **masks)


def test_padding_takes_pairs_away():
    """Tokens that are removed may be those that had the pairs, or those that had the pairs of the other side."""
    mask = UNORDERED["window"] | ((Q == 12) & (K == 2))
    valid = (K < 12).expand(2, N)
    with REFUSED:
        attend(mask)
    attend(mask, query_mask=valid, key_mask=valid)
    both = mask | ((Q == 3) & (K == 11))
    attend(both)
    with REFUSED:
        attend(both, key_mask=(K != 11).expand(2, N))
    one_of_two = torch.stack([K < N, K != 11])
    with REFUSED:
        attend(both, query_mask=one_of_two)


def test_softmax_takes_any_mask():
    x = torch.randn(2, 3, N, 4, dtype=torch.float64)
    for mask in (ORDERED["lower triangle"], as_bias(ORDERED["lower triangle"]).double()):
        expected = F.scaled_dot_product_attention(x, x, x, mask)
        for options in ({"n_iters": 1}, {"tau": 0}, {"tau": 0.0, "n_iters": 7}, {"n_iters": 1, "tau": torch.ones(3)}):
            # float64, sums of 13 terms of order 1
            assert_close(sinkhorn_attention(x, x, x, mask, **options), expected, atol=1e-14, rtol=0)
            assert_close(attention_with_weights(x, x, x, mask, **options)[0], expected, atol=1e-14, rtol=0)
        with REFUSED:  # the values of a tensor are not read
            sinkhorn_attention(x, x, x, mask, tau=torch.zeros(3))


def test_the_leak():
    """What is refused: the last token moves the first output."""
    x, mask = torch.randn(1, 2, N, 4), ORDERED["lower triangle"]
    other = x.clone()
    other[..., -1, :] += 1

    def moved(**options):
        return (attend_to(x, **options) - attend_to(other, **options))[..., :-1, :].abs().max()

    def attend_to(tokens, **options):
        return sinkhorn_attention(tokens, tokens, tokens, mask, allow_one_way_mask=True, **options)

    assert moved(n_iters=3) > 1e-3
    assert moved(n_iters=1) == 0


def test_shapes_that_order_nothing_are_not_read(monkeypatch):
    monkeypatch.setattr(one_way, "can_be_read", lambda _: True)
    monkeypatch.setattr(one_way, "_never_orders", lambda *_: pytest.fail("read"))
    x, y = torch.randn(2, 3, N, 4), torch.randn(2, 3, N + 4, 4)
    sinkhorn_attention(x, y, y, torch.ones(N, N + 4, dtype=torch.bool).tril())
    sinkhorn_attention(y, x, x, torch.ones(N + 4, N, dtype=torch.bool).tril())
    for mask in (K < 9, (K < 9)[None], (Q < 9), as_bias(K < 9), (K < 9).expand(2, 3, N, N), (Q < 9).expand(2, 1, N, N)):
        sinkhorn_attention(x, x, x, mask)
    sinkhorn_attention(x, x, x, query_mask=(K < 9).expand(2, N), key_mask=(K >= 2).expand(2, N))
    sinkhorn_attention(x[..., :1, :], x[..., :1, :], x[..., :1, :], torch.ones(1, 1, dtype=torch.bool))
    sinkhorn_attention(x[..., :0, :], x[..., :0, :], x[..., :0, :], torch.ones(0, 0, dtype=torch.bool))
    sinkhorn_attention(x[:0], x[:0], x[:0], torch.ones(0, 1, N, N, dtype=torch.bool))
    sinkhorn_attention(x, x, x, ORDERED["prefix"], allow_one_way_mask=True)


@pytest.mark.parametrize("backend", ["auto", "native", "torch", "reference"])
def test_every_backend_and_function_refuses(backend):
    mask, x = ORDERED["lower triangle"], torch.randn(2, 3, N, 4)
    with REFUSED:
        attend(mask, backend=backend)
    with REFUSED:
        attend(mask, tau=0.5, n_iters=2, backend=backend)
    with REFUSED:
        attention_with_weights(x, x, x, mask, n_iters=2)
    attention_with_weights(x, x, x, mask, allow_one_way_mask=True)
