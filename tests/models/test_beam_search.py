"""Beam search: greedy at width one, exhaustive at full width, and independent of the rest of the batch."""

import itertools

import pytest
import torch
from torch import nn

from sinkformers.models import TranslationTransformer, beam_search
from tests.rounding import rounding

BEGIN, END = 1, 2
SCORE = rounding(4096, size=100)["atol"]  # sums of some ten log-probabilities of up to 10


def translator(vocabulary=11, seed=0, causal=None):
    torch.manual_seed(seed)
    sizes = {"length": 40, "dim": 12, "depth": 2, "heads": 3, "hidden": 17, "n_iters": 3, "causal": causal}
    model = TranslationTransformer(source_vocabulary=23, target_vocabulary=vocabulary, **sizes).double().eval()
    with torch.no_grad():
        for module in model.decoder.modules():  # otherwise the model would repeat the previous token
            if isinstance(module, nn.Linear):
                module.weight.mul_(4.0)
    return model


def batch(lengths):
    source = torch.randint(23, (len(lengths), max(lengths)))
    return source, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def search(model, source, mask, **changes):
    options = {"begin": BEGIN, "end": END, "limits": mask.sum(1) + 3, "never": (0, BEGIN), **changes}
    return beam_search(model, source, mask, **options)


def log_probability(model, source, mask, tokens):
    """Return the log-probability of a translation with its end, computed for all tokens at once."""
    written = torch.tensor([[BEGIN, *tokens]])
    likely = model(source, mask, written)[0].log_softmax(-1)
    return sum(likely[place, token].item() for place, token in enumerate([*tokens, END]))


def greedy(model, source, mask, limit):
    tokens = []
    while len(tokens) < limit - 1:
        logits = model(source, mask, torch.tensor([[BEGIN, *tokens]]))[0, -1]
        logits[[0, BEGIN] if tokens else [0, BEGIN, END]] = -torch.inf
        token = int(logits.argmax())
        if token == END:
            break
        tokens.append(token)
    return tokens


@pytest.mark.parametrize("causal", [None, "streaming"])
@pytest.mark.parametrize("seed", range(2))
def test_one_beam_is_greedy(seed, causal):
    model, (source, mask) = translator(seed=seed, causal=causal), batch((9, 4, 1, 7))
    for row, found in enumerate(search(model, source, mask, beam=1)):
        one = slice(row, row + 1)
        assert found.tokens == greedy(model, source[one], mask[one], int(mask[row].sum()) + 3)


@pytest.mark.parametrize("beam", [1, 3, 5])
@pytest.mark.parametrize("seed", range(3))
def test_other_sentences_of_the_batch_change_nothing(beam, seed):
    model, (source, mask) = translator(seed=seed), batch((9, 4, 1, 7, 12))
    together = search(model, source, mask, beam=beam)
    for row, found in enumerate(together):
        length = int(mask[row].sum())
        (alone,) = search(model, source[row : row + 1, :length], mask[row : row + 1, :length], beam=beam)
        assert alone.tokens == found.tokens
        assert alone.score == pytest.approx(found.score, abs=SCORE)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("causal", [None, "streaming"])
@pytest.mark.parametrize("seed", range(2))
def test_scores_are_log_probabilities_by_length(penalty, seed, causal):
    """Of the whole translation at once: the sums of streaming attention have followed every reordering of the beams."""
    model, (source, mask) = translator(seed=seed, causal=causal), batch((9, 4, 12, 3, 8, 10))
    for row, found in enumerate(search(model, source, mask, beam=4, penalty=penalty)):
        one = slice(row, row + 1)
        expected = log_probability(model, source[one], mask[one], found.tokens) / (len(found.tokens) + 1) ** penalty
        assert found.score == pytest.approx(expected, abs=SCORE)


def test_a_beam_of_all_translations_finds_the_best_one():
    """Of all translations into up to three of three words."""
    model, (source, mask) = translator(vocabulary=6), batch((5,))
    words = (3, 4, 5)
    every = [tokens for n in range(1, 4) for tokens in itertools.product(words, repeat=n)]
    best = max(every, key=lambda tokens: log_probability(model, source, mask, tokens))
    (found,) = search(model, source, mask, beam=len(every), penalty=0.0, limits=torch.tensor([4]))
    assert found.tokens == list(best)


def test_limits_are_kept_and_special_tokens_are_not_generated():
    model, (source, mask) = translator(), batch((9, 4, 6))
    model.target.weight.data[END] = -model.target.weight.data[3]
    for found, limit in zip(search(model, source, mask, limits=torch.tensor([2, 7, 1])), (2, 7, 1), strict=True):
        assert len(found.tokens) <= limit - 1
        assert not {0, BEGIN, END} & set(found.tokens)


@pytest.mark.parametrize("beam", [1, 3])
def test_a_translation_has_a_word_unless_its_limit_is_one(beam):
    model, (source, mask) = translator(), batch((9, 4))
    follow = model.follow

    def ending(tokens, state):
        logits, state = follow(tokens, state)
        return logits.index_fill(-1, torch.tensor(END), 99.0), state

    model.follow = ending
    found = search(model, source, mask, limits=torch.tensor([5, 1]), beam=beam)
    assert [len(each.tokens) for each in found] == [1, 0]


def test_a_model_of_nans_translates_to_nothing():
    model, (source, mask) = translator(), batch((9, 4))
    model.target.weight.data.fill_(torch.nan)
    assert [each.tokens for each in search(model, source, mask)] == [[], []]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beam": 0}, r"beam must be a whole number ≥ 1 \(1 is greedy\); got 0"),
        ({"limits": 9}, r"limits must be a tensor of shape \(1,\); got 9"),
        ({"limits": torch.tensor([3, 3])}, r"limits must be a tensor of shape \(1,\); got \(2,\)"),
        ({"limits": torch.tensor([41])}, r"limits must be from 1 to 40, the longest target of the model; got \[41\]"),
        ({"limits": torch.tensor([0])}, "limits must be from 1 to 40"),
        ({"end": 11}, r"end must be a token below 11 that is not in never; got 11"),
        ({"end": BEGIN}, "end must be a token below 11 that is not in never; got 1"),
    ],
)
def test_wrong_arguments_are_refused(changes, message):
    model, (source, mask) = translator(), batch((3,))
    with pytest.raises(ValueError, match=message):
        search(model, source, mask, **changes)
