"""When a mask is read to see whether it orders the tokens: once, after every change, and only where it can be."""

import gc
import threading
import types
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from sinkformers import MultiheadAttention, sinkhorn_attention, to_sinkformer
from sinkformers.attention import mask_values, one_way
from sinkformers.attention.one_way import is_one_way
from tests.one_way_masks import ORDERED, REFUSED, UNORDERED, N, as_bias


def attend(mask, **options):
    tokens = torch.randn(2, 3, mask.shape[-2], 4)
    return sinkhorn_attention(tokens, tokens, tokens, mask, **options)


class TestMemory:
    @pytest.fixture(autouse=True)
    def reads(self, monkeypatch):
        """How often masks were read."""
        self.count = 0
        for name in ("_never_orders", "_orders"):
            monkeypatch.setattr(one_way, name, self.counted(getattr(one_way, name)))

    def counted(self, function):
        def read(*args):
            self.count += 1
            return function(*args)

        return read

    def test_a_mask_is_read_once(self):
        window, random = UNORDERED["window"].clone(), UNORDERED["random"].clone()
        for mask, reads in ((window, 1), (random, 2), (as_bias(window), 1)):
            self.count = 0
            for _ in range(3):
                attend(mask)
                attend(mask[None, None])
            assert self.count == reads * 2  # by itself and as the view

    def test_symmetric_ones_once_for_all_padding(self):
        mask = UNORDERED["window"].clone()
        for length in range(2, 9):
            valid = torch.arange(N).expand(2, N) < length
            attend(mask, key_mask=valid, query_mask=valid)
        assert self.count == 1

    def test_the_modules_mask_is_known_although_a_copy_is_used(self):
        converted = to_sinkformer(nn.MultiheadAttention(12, 3, batch_first=True))
        for layer in (MultiheadAttention(12, 3, batch_first=True), converted):
            x, mask, self.count = torch.randn(2, N, 12), ~UNORDERED["window"], 0
            for _ in range(3):
                layer(x, x, x, attn_mask=mask)
            assert self.count == 1

    def test_changed_in_place_it_is_read_again(self):
        mask = UNORDERED["window"].clone()
        attend(mask)
        mask &= ORDERED["lower triangle"]
        with REFUSED:
            attend(mask)
        mask.copy_(UNORDERED["window"])
        attend(mask)
        mask[2:5, 6:] = False  # through a view
        with REFUSED:
            attend(mask)
        whole = torch.ones(20, 20, dtype=torch.bool)
        part = whole[:N, :N]
        attend(part)
        whole.tril_()
        with REFUSED:
            attend(part)
        mask.data = UNORDERED["window"].clone()
        attend(mask)

    def test_views_of_one_tensor_are_told_apart(self):
        both = torch.stack([UNORDERED["window"], ORDERED["prefix"]])
        attend(both[0])
        with REFUSED:
            attend(both[1])
        attend(both[0])
        skewed = torch.zeros(N, 2 * N, dtype=torch.bool)
        skewed[:, :N], skewed[:, N:] = UNORDERED["window"], ORDERED["prefix"]
        attend(skewed[:, :N])
        with REFUSED:
            attend(skewed[:, N:])
        with REFUSED:
            attend(both[1, :9, :9])
        attend(both[1, :5, :5])  # the prefix alone
        with REFUSED:
            attend(both[1, :9, :9])

    def test_not_all_views_are_kept(self):
        buffer = torch.ones(60, 60, dtype=torch.bool)
        for size in range(2, 60):
            attend(buffer[:size, :size])
        assert len(mask_values._ANSWERS[buffer][1]) <= mask_values._ANSWERS_EACH

    def test_no_mask_is_kept_alive(self):
        gc.collect()
        mask, before = UNORDERED["window"].clone(), len(mask_values._ANSWERS)
        attend(mask[None])
        gone = weakref.ref(mask)
        assert len(mask_values._ANSWERS) == before + 1
        del mask
        assert gone() is None
        assert len(mask_values._ANSWERS) == before

    def test_a_new_mask_at_an_old_address_is_read(self):
        for turn in range(50):
            mask = (UNORDERED["window"] if turn % 2 == 0 else ORDERED["prefix"]).clone()
            assert is_one_way(mask) == (turn % 2 == 1)
            del mask

    def test_inference_tensors_have_no_versions(self):
        with torch.inference_mode():
            mask = UNORDERED["window"].clone()
            attend(mask)
            mask &= ORDERED["lower triangle"]
            with REFUSED:
                attend(mask)
        with REFUSED:
            attend(mask)

    def test_inference_mode_remembers_other_tensors(self):
        mask = UNORDERED["window"].clone()
        with torch.inference_mode():
            for _ in range(3):
                attend(mask)
            assert self.count == 1
            mask &= ORDERED["lower triangle"]
            with REFUSED:
                attend(mask)

    def test_threads(self):
        masks = [(UNORDERED["window"] if number % 2 else ORDERED["prefix"]).clone() for number in range(8)]
        wrong = []

        def look():
            for _ in range(30):
                for number, mask in enumerate(masks):
                    if is_one_way(mask[None]) != (number % 2 == 0):
                        wrong.append(number)

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


class TestWhereValuesCannotBeRead:
    """No refusal there, as the documentation says; and no error, no graph break, no wait."""

    def test_compiled(self):
        mask, x = ORDERED["lower triangle"], torch.randn(2, 3, N, 4)
        compiled = torch.compile(sinkhorn_attention, fullgraph=True, backend="aot_eager")
        expected = sinkhorn_attention(x, x, x, mask, allow_one_way_mask=True)
        assert_close(compiled(x, x, x, mask), expected, atol=1e-5, rtol=0)  # float32, values of order 1
        assert_close(compiled(x, x, x, mask, allow_one_way_mask=True), expected, atol=1e-5, rtol=0)
        layer, y = MultiheadAttention(12, 3, batch_first=True), torch.randn(2, N, 12)
        module = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert_close(
            module(y, y, y, attn_mask=~UNORDERED["window"])[0], layer(y, y, y, attn_mask=~UNORDERED["window"])[0]
        )

    def test_compiled_for_any_length(self):
        compiled = torch.compile(sinkhorn_attention, fullgraph=True, backend="aot_eager", dynamic=True)
        for n in (5, 7, 9):
            x = torch.randn(2, n, 4)
            compiled(x, x, x, torch.ones(n, n, dtype=torch.bool).tril())

    @pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
    def test_traced(self):
        x = torch.randn(2, N, 4)
        torch.jit.trace(
            lambda x: sinkhorn_attention(x, x, x, ORDERED["lower triangle"], backend="reference"), x, check_trace=False
        )

    def test_transformed(self):
        x, masks = torch.randn(2, N, 4), torch.stack([ORDERED["prefix"], UNORDERED["window"]])
        torch.vmap(lambda x, mask: sinkhorn_attention(x, x, x, mask))(x, masks)
        torch.func.grad(lambda x: sinkhorn_attention(x, x, x, masks).sum())(x)

    def test_without_values(self):
        x = torch.empty(2, 3, N, 4, device="meta")
        assert sinkhorn_attention(x, x, x, torch.empty(N, N, dtype=torch.bool, device="meta")).shape == x.shape
        with FakeTensorMode():
            x = torch.empty(2, 3, N, 4)
            assert sinkhorn_attention(x, x, x, torch.ones(N, N, dtype=torch.bool).tril()).shape == x.shape

    def test_inside_a_mode(self):
        """A mode would see the reading, and see it the first time only."""

        class Nothing(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                return func(*args, **(kwargs or {}))

        with Nothing():
            assert not is_one_way(ORDERED["prefix"])
        assert is_one_way(ORDERED["prefix"])

    def test_while_a_cuda_graph_is_captured(self, monkeypatch):
        mask = types.SimpleNamespace(is_meta=False, is_cuda=True)
        plain = types.new_class(
            "Plain",
            exec_body=lambda body: body.update(
                is_meta=False, is_cuda=True, __torch_dispatch__=torch._C._disabled_torch_dispatch_impl
            ),
        )()
        assert not mask_values.can_be_read(mask)  # no tensor of torch's own
        for capturing in (True, False):
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda answer=capturing: answer)
            assert mask_values.can_be_read(plain) is not capturing

    def test_subclasses_with_values_are_read(self):
        class Named(torch.Tensor):
            pass

        with REFUSED:
            attend(ORDERED["prefix"].as_subclass(Named))
        with REFUSED:
            attend(nn.Parameter(as_bias(ORDERED["prefix"])))
