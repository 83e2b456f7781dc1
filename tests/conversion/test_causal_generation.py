"""Causal models of Hugging Face, converted on request: generation with a cache equals generation without one."""

import copy
import pickle
from itertools import product

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("transformers", reason="the hf extra is not installed")

import transformers as hf

from sinkformers import set_n_iters, set_tau, to_sinkformer, to_transformer, watch_attention
from tests.conversion.decoder_models import DECODERS, LAYER_PAST, PROMPT, VALID, build_decoder, generate

EXACT = 1e-10  # float64; some 10⁴ roundings on values up to 10²
SINGLE = 1e-5  # `generate` returns logits in float32: 2⁻²³ relative, values up to 50

WAYS = {"greedy": {}, "sampling": {"do_sample": True}, "beams": {"num_beams": 3}}


def converted(name="llama", n_iters=3, **options):
    return to_sinkformer(build_decoder(name), n_iters, causal="streaming", **options)


@torch.no_grad()
def logits(model, ids=PROMPT[1:], **options):
    return model(ids, **options).logits


@pytest.mark.parametrize("name", DECODERS)
def test_one_iteration_is_the_original_and_three_are_not(name):
    model = build_decoder(name)
    rows = slice(1, None) if name == "gemma2" else slice(None)  # its own eager attention gives NaN for padded float64
    ids, valid = PROMPT[rows], VALID[rows]
    before = logits(model, ids, attention_mask=valid.long())
    with pytest.raises(ValueError, match=r'(?s)no bidirectional self-attention.*causal: .*causal="streaming"'):
        to_sinkformer(model)
    to_sinkformer(model, 1, causal="streaming")
    assert len(model.sinkformer_report.converted) == 2
    exact = SINGLE if name == "gemma2" else EXACT  # eager attention computes SoftMax in float32
    assert_close(logits(model, ids, attention_mask=valid.long())[valid], before[valid], atol=exact, rtol=0)
    set_n_iters(model, 3)
    assert not torch.allclose(logits(model, ids)[valid], before[valid], atol=1e-2)
    assert model.config.sinkhorn == {"n_iters": 3, "tau": 1.0, "causal": "streaming"}
    to_transformer(model)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert logits(model, ids, attention_mask=valid.long())[valid].equal(before[valid])


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by the import of GPTBigCode
@pytest.mark.parametrize(("name", "way"), [*product(DECODERS, WAYS), *product(LAYER_PAST, ["greedy"])])
def test_generation_with_a_cache_equals_generation_without(name, way):
    model = converted(name)
    tokens, scores = generate(model, **WAYS[way])
    expected, without = generate(model, use_cache=False, **WAYS[way])
    assert tokens.equal(expected)
    assert_close(scores, without, atol=SINGLE, rtol=0)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3"])
def test_no_output_depends_on_a_later_token_and_padding_changes_nothing(name):
    model = converted(name)
    x = model.get_input_embeddings()(PROMPT[1:]).detach().requires_grad_()
    out = model(inputs_embeds=x, use_cache=False).logits
    for i in (0, 2, 4):
        (found,) = torch.autograd.grad(out[:, i].square().sum(), x, retain_graph=True)
        assert found[:, i + 1 :].count_nonzero() == 0
        assert found[:, i].abs().max() > 1e-9
    alone = logits(model, PROMPT[:1, 3:])[0]
    mask = VALID.long()
    padded = logits(model, PROMPT, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp_min(0))[0, 3:]
    assert_close(padded, alone, atol=EXACT, rtol=0)


@pytest.mark.parametrize("use_cache", [True, False])
def test_padding_between_tokens_equals_deletion(use_cache):
    model, valid = converted(), torch.tensor([[1, 1, 0, 0, 1, 1, 1, 1, 0]])
    ids = torch.randint(3, 53, valid.shape, generator=torch.Generator().manual_seed(3))
    expected = logits(model, ids[valid > 0][None], use_cache=False)
    positions, found, cache = valid.cumsum(-1) - 1, [], hf.DynamicCache(config=model.config)
    for start, stop in ((0, 4), (4, 5), (5, 9)) if use_cache else ((0, 9),):
        part = {"position_ids": positions[:, start:stop], "attention_mask": valid[:, :stop]}
        part["past_key_values"] = cache if use_cache else None
        found.append(logits(model, ids[:, start:stop], use_cache=use_cache, **part))
    assert_close(torch.cat(found, 1)[:, valid[0] > 0], expected, atol=EXACT, rtol=0)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_a_cache_continues_in_chunks_of_any_size(name):
    model, ids = converted(name), torch.randint(3, 53, (2, 14), generator=torch.Generator().manual_seed(3))
    whole = logits(model, ids, use_cache=False)
    cache = hf.DynamicCache(config=model.config)
    parts, copies = [], []
    for start, stop in ((0, 5), (5, 6), (6, 9), (9, 14)):
        parts.append(logits(model, ids[:, start:stop], past_key_values=cache))
        copies.append(copy.deepcopy(cache))
    assert_close(torch.cat(parts, 1), whole, atol=EXACT, rtol=0)
    for cache, start in zip(copies, (5, 6, 9), strict=False):
        again = pickle.loads(pickle.dumps(cache))
        for restored in (cache, again):
            assert_close(logits(model, ids[:, start:], past_key_values=restored), whole[:, start:], atol=EXACT, rtol=0)


def test_a_conversation_continues_with_its_cache():
    model, more = converted(), torch.tensor([[4, 8], [15, 16]])
    cache = hf.DynamicCache(config=model.config)
    first, _ = generate(model, past_key_values=cache)
    ids, mask = torch.cat([first, more], 1), torch.nn.functional.pad(VALID, (0, 10), value=True)
    found, scores = generate(model, ids, mask, past_key_values=cache)
    expected, without = generate(model, ids, mask, use_cache=False)
    assert found.equal(expected)
    assert_close(scores, without, atol=SINGLE, rtol=0)


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_gradients_do_not_depend_on_the_cache_nor_on_checkpoints(name):
    model, found = converted(name), []
    for options in ({"use_cache": False}, {"use_cache": True}, {}):
        if not options:
            model.gradient_checkpointing_enable()
            model.train()
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
        model.zero_grad()
        model(PROMPT[1:], labels=PROMPT[1:], **options).loss.backward()
        found.append({key: parameter.grad.clone() for key, parameter in model.named_parameters()})
    for grads in found[1:]:
        assert_close(grads, found[0], atol=EXACT, rtol=0)


def test_gradients_are_not_cut_at_a_cache():
    model = converted()
    cache = hf.DynamicCache(config=model.config)
    model(PROMPT[1:, :4], past_key_values=cache)
    with pytest.raises(RuntimeError, match=r"through a cache.*torch\.no_grad\(\).*whole sequences"):
        model(PROMPT[1:, 4:], past_key_values=cache)
    found = []
    for detached in (False, True):  # a prompt that gradients do not reach
        cache = hf.DynamicCache(config=model.config)
        logits(model, PROMPT[1:, :4], past_key_values=cache)
        with torch.set_grad_enabled(not detached):
            found.append(model(PROMPT[1:, 4:], past_key_values=cache).logits)
    assert found[0].requires_grad
    assert_close(found[0].detach(), found[1], atol=0, rtol=0)


def test_a_learned_tau_takes_the_number_of_heads_from_the_configuration():
    model = converted(tau="learned")
    attention = model.model.layers[0].self_attn
    assert attention.get_parameter("sinkhorn_tau").shape == (4,)
    assert_close(logits(model, use_cache=False), logits(converted(tau=0.5), use_cache=False), atol=EXACT, rtol=0)


@pytest.mark.parametrize("weights", [False, True])
def test_a_learned_tau_that_changes_in_the_middle_of_a_text_is_refused(weights):
    model, cache, token = converted(tau="learned"), hf.DynamicCache(), torch.tensor([[5]])
    logits(model, past_key_values=cache, output_attentions=weights)
    logits(model, token, past_key_values=copy.deepcopy(cache))
    with torch.no_grad():
        model.model.layers[1].self_attn.get_parameter("sinkhorn_tau").data[2] += 0.1
    with pytest.raises(ValueError, match=r"filled with tau=a tensor of shape \(4,\).*Take a new cache"):
        logits(model, token, past_key_values=cache)


def test_layers_without_a_place_in_the_cache_are_refused():
    model, cache = converted(), hf.DynamicCache()
    attention = model.model.layers[1].self_attn
    attention.layer_idx = 7  # as in a model whose last layers take keys and values of earlier ones
    update = cache.update
    cache.update = lambda key, value, number, *rest: (key, value) if number == 7 else update(key, value, number, *rest)
    with pytest.raises(
        NotImplementedError, match=r"has no layer of its own in the cache \(layer_idx=7.*use_cache=False"
    ):
        logits(model, past_key_values=cache)


def test_selections_of_samples_carry_the_sums():
    model, ids = converted(), PROMPT[1:].repeat(3, 1) + torch.arange(3)[:, None]
    whole = logits(model, ids, use_cache=False)[:, -1]
    for change, rows in (
        (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
        (lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])), [1, 1, 0]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ):
        cache = hf.DynamicCache(config=model.config)
        logits(model, ids[:, :-1], past_key_values=cache)
        change(cache)
        assert_close(logits(model, ids[rows, -1:], past_key_values=cache)[:, -1], whole[rows], atol=EXACT, rtol=0)
        cache.reset()
        assert_close(logits(model, ids, past_key_values=cache)[:, -1], whole, atol=EXACT, rtol=0)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_one_iteration_generates_what_the_original_does_with_any_cache(cache, padded):
    model, rows = build_decoder("llama"), slice(0 if padded else 1, None)
    given = (PROMPT[rows], VALID[rows])
    expected, scores = generate(model, *given, cache_implementation=cache)
    found, after = generate(to_sinkformer(model, 1, causal="streaming"), *given, cache_implementation=cache)
    assert found.equal(expected)
    assert_close(after, scores, atol=SINGLE, rtol=0)


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (lambda config: hf.StaticCache(config, max_cache_len=32), "a StaticCache, which cannot carry"),
        (lambda config: hf.DynamicCache(config=config, offloading=True), "a DynamicCache that is offloaded, which"),
    ],
)
def test_caches_that_cannot_carry_the_sums_are_refused(cache, message, monkeypatch):
    monkeypatch.setattr(hf.DynamicCache, "update", lambda _self, key, value, *_: (key, value))  # offloading needs CUDA
    model = converted()
    with pytest.raises(NotImplementedError, match=f"sinkformers: LlamaAttention was given {message}.*use_cache=False"):
        logits(model, past_key_values=cache(model.config))


def test_quantised_layers_are_refused():
    model, cache = converted(), hf.DynamicCache()

    class Quantised(type(hf.DynamicCache().layer_class_to_replicate())):
        pass

    cache.layer_class_to_replicate = Quantised
    with pytest.raises(NotImplementedError, match="a cache with a Quantised, which cannot carry the column sums"):
        logits(model, past_key_values=cache)


def test_a_stale_or_foreign_cache_is_refused():
    model, plain = converted(), build_decoder("llama")
    token, new = torch.tensor([[5]]), lambda: hf.DynamicCache(config=model.config)

    def filled(by, ids=PROMPT[1:]):
        cache = new()
        logits(by, ids, past_key_values=cache)
        return cache

    with pytest.raises(ValueError, match=r"holds 6 tokens before this call, and the column sums of 0 .*SoftMax"):
        logits(model, token, past_key_values=filled(plain))
    for change, back in (
        (lambda: set_n_iters(model, 1), lambda: set_n_iters(model, 3)),
        (lambda: set_tau(model, 0), lambda: set_tau(model, 1)),
    ):
        cache = filled(model)
        change()
        with pytest.raises(ValueError, match=r"filled with Settings\(n_iters=3, tau=1.0.*Begin with a new cache"):
            logits(model, token, past_key_values=cache)
        back()
    for cache in (filled(model), copy.deepcopy(filled(model))):
        with pytest.raises(ValueError, match="is continued by a module that is not converted"):
            logits(plain, token, past_key_values=cache)
    cache = filled(model)
    set_tau(model, 0.5)
    with pytest.raises(ValueError, match=r"filled with Settings\(n_iters=3, tau=1.0.*tau=0.5, causal=streaming\) now"):
        logits(model, token, past_key_values=cache)
    cache = filled(model)
    cache.layers[0].keys, cache.layers[0].values = (x.repeat(2, 1, 1, 1) for x in next(iter(cache))[:2])
    with pytest.raises(ValueError, match=r"column sums of heads \(1, 4\), which a query \(2, 4, 1, 8\) does not"):
        logits(model, token.repeat(2, 1), past_key_values=cache)
    for ids, more in ((PROMPT[1:], token.repeat(3, 1)), (PROMPT, token)):
        with pytest.raises(ValueError, match=r"holds keys .* do not continue.*cache\.batch_repeat_interleave"):
            logits(model, more, past_key_values=filled(model, ids))
    with pytest.raises(NotImplementedError, match="tokens cannot be removed from the cache"):
        filled(model).crop(-1)
    with pytest.raises(NotImplementedError, match="tokens cannot be removed"):
        generate(model, PROMPT[1:], VALID[1:], prompt_lookup_num_tokens=3)
    rebuilt = hf.DynamicCache(list(filled(model)))  # keys and values alone
    with pytest.raises(ValueError, match="the column sums of 0 of them"):
        logits(model, token, past_key_values=rebuilt)


def test_saved_copied_and_compiled(tmp_path):
    model = converted(tau=0.5)
    expected = logits(model, use_cache=False)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_close(logits(again, use_cache=False), expected, atol=0, rtol=0)
        tokens, _ = generate(again)
        assert tokens.equal(generate(model)[0])
    model.save_pretrained(tmp_path)
    loaded = hf.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    to_sinkformer(loaded, **loaded.config.sinkhorn)
    assert_close(logits(loaded, use_cache=False), expected, atol=EXACT, rtol=0)
    named = hf.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="sinkhorn", dtype=torch.float64)
    with pytest.raises(ValueError, match=r'causal="streaming".*not given the cache.*\*\*model\.config\.sinkhorn'):
        logits(named)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(logits(compiled, use_cache=False), expected, atol=EXACT, rtol=0)


def test_weights_and_watching_with_a_cache():
    model, ids = converted("llama"), PROMPT[1:]
    out = model(ids, output_attentions=True, use_cache=False)
    with watch_attention(model, keep_weights=True) as watch:
        cache = hf.DynamicCache(config=model.config)
        logits(model, ids[:, :4], past_key_values=cache)
        last = logits(model, ids[:, 4:], past_key_values=cache)
    assert_close(last, out.logits[:, 4:].detach(), atol=EXACT, rtol=0)
    name = "model.layers.1.self_attn"
    first, second = watch[name].calls
    whole = out.attentions[1].detach()
    assert_close(second.weights, whole[..., 4:, :], atol=EXACT, rtol=0)
    assert_close(first.weights, whole[..., :4, :4], atol=EXACT, rtol=0)
    uniform = torch.ones(6, 6, dtype=torch.float64).tril() / torch.arange(1, 7)[:, None]
    share = uniform[4:].sum(0)
    assert_close(second.column_sums, whole[..., 4:, :].sum(-2) / share, atol=EXACT, rtol=0)
