"""`MultiheadAttention` and converted modules refuse masks that order the tokens."""

import copy

import pytest
import torch
from torch import nn

from sinkformers import MultiheadAttention, to_sinkformer
from tests.one_way_masks import ORDERED, REFUSED, UNORDERED, K, N, Q, as_bias


class TestModule:
    def layer(self, **options):
        return MultiheadAttention(12, 3, batch_first=True, **options)

    @pytest.mark.parametrize("need_weights", [True, False])
    @pytest.mark.parametrize("name", ORDERED)
    def test_refused(self, name, need_weights):
        x, hidden = torch.randn(2, N, 12), ~ORDERED[name]
        for mask in (hidden, as_bias(~hidden), hidden.expand(6, N, N), hidden.expand(6, N, N).contiguous()):
            with pytest.raises(
                NotImplementedError, match=r"^MultiheadAttention: attn_mask.*Build the module with causal=\"streaming\""
            ):
                self.layer()(x, x, x, attn_mask=mask, need_weights=need_weights)
            for options in ({"n_iters": 1}, {"tau": 0}, {"allow_one_way_mask": True}):
                self.layer(**options)(x, x, x, attn_mask=mask, need_weights=need_weights)

    @pytest.mark.parametrize("name", UNORDERED)
    def test_passes(self, name):
        x, hidden = torch.randn(2, N, 12), ~UNORDERED[name]
        for mask in (hidden, as_bias(~hidden), hidden.expand(6, N, N)):
            self.layer()(x, x, x, attn_mask=mask)
        self.layer()(x[0], x[0], x[0], attn_mask=hidden)

    @pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
    def test_with_padding_and_more_keys(self, options):
        """Added keys are not tokens of the mask; only the square mask that the user passed is checked."""
        layer, x = self.layer(**options), torch.randn(2, N, 12)
        padding = torch.stack([K >= 9, K < 4])
        for given in (padding, as_bias(~padding)):
            with REFUSED:
                layer(x, x, x, attn_mask=~ORDERED["lower triangle"], key_padding_mask=given)
            layer(x, x, x, attn_mask=~UNORDERED["window"], key_padding_mask=given)
        nearly = ~(UNORDERED["window"] | ((Q == 12) & (K == 2)))
        with REFUSED:
            layer(x, x, x, attn_mask=nearly)
        layer(x, x, x, attn_mask=nearly, key_padding_mask=(K == 12).expand(2, N))

    def test_torchs_own_causal_mask_in_torchs_own_encoder(self):
        block = nn.TransformerEncoderLayer(12, 3, 16, dropout=0.0, batch_first=True)
        mask, x = nn.Transformer.generate_square_subsequent_mask(N), torch.randn(2, N, 12)
        block.self_attn = self.layer(n_iters=3)
        encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        for causal in (False, None, True):  # no hint, detected by torch, given as a hint
            with pytest.raises(NotImplementedError, match=r"MultiheadAttention: (attn_mask must not|is_causal=True)"):
                encoder(x, mask, is_causal=causal)
        for layer in encoder.layers:
            layer.self_attn.allow_one_way_mask = True
        encoder(x, mask)

    def test_a_mask_of_a_wrong_shape_raises_that_error(self):
        x = torch.randn(2, N, 12)
        with pytest.raises(ValueError, match="attn_mask must broadcast"):
            self.layer()(x, x, x, attn_mask=torch.ones(5, 5).triu(1) > 0, key_padding_mask=(K > 7).expand(2, N))


class TestConverted:
    def test_refused(self):
        model = to_sinkformer(nn.MultiheadAttention(12, 3, batch_first=True))
        x, mask = torch.randn(2, N, 12), ~ORDERED["window (6, 2)"]
        with pytest.raises(
            NotImplementedError, match=r"^sinkformers: MultiheadAttention: attn_mask.*`select`.*convert"
        ):
            model(x, x, x, attn_mask=mask)
        to_sinkformer(model, allow_one_way_mask=True)
        assert model.allow_one_way_mask
        model(x, x, x, attn_mask=mask, is_causal=True)
        assert copy.deepcopy(model).allow_one_way_mask
        model = to_sinkformer(model, 1)
        model(x, x, x, attn_mask=mask)
        with pytest.raises(TypeError, match="allow_one_way_mask must be True or False; got 'yes'"):
            to_sinkformer(model, allow_one_way_mask="yes")
