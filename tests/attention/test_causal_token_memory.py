"""The memory of a cache that grows: one more token copies no others, and no cache overwrites what another one holds."""

import contextlib
import copy

import pytest
import torch
from torch.testing import assert_close

from sinkformers import SinkhornCache, backend_for, sinkhorn_attention
from tests.causal_cases import MASKS, N, tokens

MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "grad": torch.enable_grad}


def given():
    return [x.detach() for x in tokens(MASKS["triangle"], 2, 3)]


def attend(layer, parts, start, stop):
    return sinkhorn_attention(*(x[..., start:stop, :] for x in parts), is_causal=True, n_iters=3, cache=layer)


@pytest.mark.parametrize("mode", MODES)
def test_tokens_one_by_one_are_one_pass_in_every_mode(mode):
    parts, layer = given(), SinkhornCache()[0]
    with MODES[mode]():
        found = torch.cat([attend(layer, parts, i, i + 1) for i in range(N)], -2)
    whole = sinkhorn_attention(*parts, is_causal=True, n_iters=3)
    assert_close(found, whole, atol=1e-13, rtol=0)
    assert_close(layer.key, parts[1], atol=0, rtol=0)


@torch.no_grad()
def test_a_token_does_not_copy_the_others():
    parts, layer = given(), SinkhornCache()[0]
    attend(layer, parts, 0, 5)
    attend(layer, parts, 5, 6)
    where = [layer.key.data_ptr(), layer.value.data_ptr()]
    for i in range(6, N):
        attend(layer, parts, i, i + 1)
    assert [layer.key.data_ptr(), layer.value.data_ptr()] == where


@torch.no_grad()
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_two_continuations_of_one_prompt_do_not_meet(duplicate):
    """A shallow copy shares the memory; the one that continues second must not overwrite the token of the first."""
    parts, other, layer = given(), given(), SinkhornCache()[0]
    attend(layer, parts, 0, 6)
    attend(layer, parts, 6, 7)
    branch = duplicate(layer)
    attend(layer, parts, 7, 8)
    attend(branch, other, 7, 8)
    kept = layer.key[..., 7, :].clone()
    attend(branch, other, 8, 9)
    assert_close(kept, parts[1][..., 7, :], atol=0, rtol=0)
    assert_close(layer.key[..., 7, :], kept, atol=0, rtol=0)
    assert_close(branch.key[..., 7:9, :], other[1][..., 7:9, :], atol=0, rtol=0)


@torch.no_grad()
def test_asking_for_a_backend_changes_nothing():
    parts, other, layer = given(), given(), SinkhornCache()[0]
    attend(layer, parts, 0, 6)
    attend(layer, parts, 6, 7)
    first = [x[..., 7:8, :] for x in parts]
    backend_for(*(x[..., 7:8, :] for x in other), is_causal=True, n_iters=3, cache=layer)
    assert_close(layer.key, parts[1][..., :7, :], atol=0, rtol=0)
    found = sinkhorn_attention(*first, is_causal=True, n_iters=3, cache=layer)
    assert_close(found, sinkhorn_attention(*parts, is_causal=True, n_iters=3)[..., 7:8, :], atol=1e-13, rtol=0)


@torch.no_grad()
def test_reordered_samples_continue_in_memory_of_their_own():
    parts, cache = given(), SinkhornCache()
    for i in range(6):
        attend(cache[0], parts, i, i + 1)
    index = torch.tensor([1, 1])
    cache.reorder(index)
    swapped = [x[index] for x in parts]
    found = torch.cat([attend(cache[0], swapped, i, i + 1) for i in range(6, N)], -2)
    assert_close(found, sinkhorn_attention(*swapped, is_causal=True, n_iters=3)[..., 6:, :], atol=1e-13, rtol=0)


def test_modes_may_change_in_between():
    """Tensors made in inference mode cannot be written to outside of it."""
    parts, layer = given(), SinkhornCache()[0]
    contexts = [torch.inference_mode, torch.no_grad, contextlib.nullcontext, torch.no_grad, torch.inference_mode]
    found, start = [], 0
    for context in contexts:
        with context():
            found += [attend(layer, parts, start, start + 1), attend(layer, parts, start + 1, start + 2)]
        start += 2
    whole = sinkhorn_attention(*parts, is_causal=True, n_iters=3)[..., :start, :]
    assert_close(torch.cat([x.clone() for x in found], -2), whole, atol=1e-13, rtol=0)


def test_a_gradient_is_not_disturbed_by_later_tokens():
    parts, layer = [x.requires_grad_() for x in given()], SinkhornCache()[0]
    with torch.no_grad():
        attend(layer, parts, 0, 6)
        attend(layer, parts, 6, 7)
    out = attend(layer, parts, 7, 8)
    with torch.no_grad():
        for i in range(8, N):
            attend(layer, parts, i, i + 1)
    for gradient in torch.autograd.grad(out.sum(), parts):
        assert gradient.isfinite().all()
        assert gradient[..., 8:, :].abs().max() == 0
