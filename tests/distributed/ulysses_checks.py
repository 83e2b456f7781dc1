"""Checks of Ulysses around converted models: the tokens of all heads are exchanged for all tokens of some heads.

DeepSpeed does it for Hugging Face models, by another function under the name of an attention function. Here that is
done with torch alone; a converted model has to run under it as it does on one device.
"""

from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from torch.testing import assert_close
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sinkformers import to_sinkformer
from tests.rounding import rounding

TOKENS, HEADS = 12, 8
SIZES: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 24,
}


def encoder():
    return to_sinkformer(hf.BertModel(hf.BertConfig(**SIZES)).eval(), 5, tau=0.7)


def decoder():
    """With as many heads of keys as there are ranks, each for two heads of queries."""
    config = hf.LlamaConfig(**SIZES, num_key_value_heads=HEADS // 2, use_cache=False)
    return to_sinkformer(hf.LlamaModel(config), 3, causal="streaming")


class _Exchange(torch.autograd.Function):
    """(batch, heads, tokens of this rank, d) to (batch, heads of this rank, tokens, d), or back."""

    @staticmethod
    def forward(ctx: Any, x, to_heads):
        ctx.to_heads, ranks = to_heads, dist.get_world_size()
        axes = (1, 2) if to_heads else (2, 1)
        sent = torch.stack(x.chunk(ranks, axes[0]))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        return torch.cat(received.unbind(), axes[1])

    @staticmethod
    def backward(ctx: Any, grad) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Exchange.apply(grad, not ctx.to_heads), None


def exchanging(function):
    """An attention function of transformers that calls another one on whole sequences; masks are dropped."""

    def attend(module, query, key, value, _mask, **options):
        whole = (_Exchange.apply(x, True) for x in (query, key, value))
        out, weights = function(module, *whole, None, **options)
        return _Exchange.apply(out.transpose(1, 2), False).transpose(1, 2), weights

    return attend


def step(model, ids, positions):
    """The last hidden states, and the gradients of all parameters."""
    model.zero_grad()
    out = model(input_ids=ids, position_ids=positions).last_hidden_state
    out.sin().sum().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def like_one_device(build):
    def check(rank, size):
        torch.manual_seed(3)
        model = build().double()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
        ids = torch.randint(5, 53, (2, TOKENS), generator=torch.Generator().manual_seed(3))
        positions = torch.arange(TOKENS)[None].expand(2, -1)
        expected, whole = step(model, ids, positions)
        name, part = "sinkhorn", slice(rank * TOKENS // size, (rank + 1) * TOKENS // size)
        model.set_attn_implementation(name)
        ALL_ATTENTION_FUNCTIONS[name] = exchanging(ALL_ATTENTION_FUNCTIONS[name])
        try:
            out, grads = step(model, ids[:, part], positions[:, part])
        finally:
            del ALL_ATTENTION_FUNCTIONS[name]  # the one that is registered for all models is left
        _close(out, expected[:, part])
        assert grads.keys() == whole.keys()
        for name, grad in grads.items():
            dist.all_reduce(grad)
            _close(grad, whole[name])

    return check


def _close(mine, expected):
    assert_close(mine, expected, **rounding(20_000, mine.dtype, max(1.0, expected.abs().max().item())))


CHECKS = {
    "Ulysses, a converted encoder": like_one_device(encoder),
    "Ulysses, a streaming decoder": like_one_device(decoder),
}
