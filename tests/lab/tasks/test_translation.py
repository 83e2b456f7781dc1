"""The task of translation: losses per token, schedules that continue, and BLEU of the whole test set."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState

import sinkformers
from sinkformers.lab.artefacts import figure2_translation, table2
from sinkformers.lab.data import Pairs, PairSet, load_number_words
from sinkformers.lab.tasks.bleu import bleu
from sinkformers.lab.tasks.translation import TranslationTask
from sinkformers.lab.tasks.vocabulary import BEGIN, END, PAD, Vocabulary
from sinkformers.lab.workbench.task import WarmRecipe

SIZES = {"dim": 16, "hidden": 32, "depth": 1}
PIECES = PairSet(
    Pairs(["ein ja@@ gu@@ ar .", "zwei .", "ein zwei ja@@ ."], ["a ja@@ gu@@ ar .", "two .", "a two ja@@ ."]),
    Pairs(["zwei ."], ["two ."]),
    {"test": Pairs(["ein zwei .", "zwei gu@@ ar ."], ["a two .", "two &apos;s gu@@ ar ."])},
    "de",
    "en",
    "pieces",
    "3 of 9 training pairs",
)


def few(n_train=60, n_test=13):
    """Numbers from the whole range, so that lengths differ."""
    whole = load_number_words()
    train = Pairs(*(side[:: 9000 // n_train][:n_train] for side in whole.train))
    test = Pairs(*(side[:: 500 // n_test][:n_test] for side in whole.tests["test"]))
    return whole._replace(train=train, tests={"test": test})


def task(pairs=None, begun=0, seed=0, **changes):
    config = replace(table2.NUMBERS, **SIZES, recipe=WarmRecipe(epochs=2, batch=200, rate=0.01, warmup=4))
    config = replace(config, **changes)
    return TranslationTask(config, seed, pairs or few(), begun=begun)


@pytest.fixture(autouse=True)
def fresh_accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_every_pair_is_seen_once_per_epoch_in_a_new_order():
    made = task()
    first, second = (torch.cat(list(made.batches(epoch))) for epoch in (1, 2))
    assert first.sort().values.tolist() == second.sort().values.tolist() == list(range(60))
    assert not torch.equal(first, second)
    assert torch.equal(first, torch.cat(list(made.batches(1))))
    for batch in made.batches(1):
        assert len(batch) * int(made.longer[batch].max()) <= 200


def test_orders_and_rates_continue_from_the_earlier_training():
    made, further = task(), task(begun=2)
    assert torch.equal(torch.cat(list(further.batches(1))), torch.cat(list(made.batches(3))))
    steps = len(made.batches(1))
    assert further.recipe.rate_at(1, 5) == made.recipe.rate_at(1, 2 * steps + 5)
    assert further.facts == made.facts


def test_a_loss_is_smoothed_and_summed_over_valid_tokens():
    made = task(n_iters=3)
    model, examples = made.model().double(), torch.tensor([40, 3, 59])
    expected, nll, count = 0.0, 0.0, 0
    for k in examples.tolist():
        source = torch.tensor([[*made.translator.source.encode([made.pairs.train.source[k]])[0], END]])
        target = [BEGIN, *made.translator.target.encode([made.pairs.train.target[k]])[0], END]
        likely = model(source, torch.ones_like(source, dtype=torch.bool), torch.tensor([target[:-1]])).log_softmax(-1)[
            0
        ]
        right = likely[torch.arange(len(target) - 1), torch.tensor(target[1:])]
        expected -= (0.9 * right + 0.1 * likely.mean(-1)).sum().item()
        nll -= right.sum().item()
        count += len(target) - 1
    loss, sums = made.losses(model, examples)
    assert loss.item() == pytest.approx(expected, rel=1e-10)
    assert sums["nll"].item() == pytest.approx(nll, rel=1e-10)
    assert made.weight(examples) == count


def test_the_test_set_is_translated_in_full_and_in_order():
    made = task(n_iters=1)
    model = made.model().eval()
    found = made.evaluate(model, Accelerator(cpu=True))
    alone = [made._translated(model, torch.tensor([k]))[0] for k in range(13)]
    assert found["bleu"] == pytest.approx(bleu(alone, made.pairs.tests["test"].target).score)
    logits, expected = made._predict(model, made.test, torch.arange(13))
    assert found["loss"] == pytest.approx(
        F.cross_entropy(logits.flatten(0, 1), expected.flatten(), ignore_index=PAD).item(), rel=1e-5
    )


def test_conversion_at_one_iteration_leaves_every_digit():
    made = task(n_iters=1)
    torch.manual_seed(2)
    model, accelerator = made.model().eval(), Accelerator(cpu=True)
    before = made.evaluate(model, accelerator), made._translated(model, torch.arange(13))
    sinkformers.to_sinkformer(model, n_iters=1)
    assert (made.evaluate(model, accelerator), made._translated(model, torch.arange(13))) == before
    sinkformers.set_n_iters(model, 3)
    assert made.evaluate(model, accelerator)["loss"] != before[0]["loss"]


def test_perfect_translations_score_a_hundred(monkeypatch):
    made = task()
    monkeypatch.setattr(made, "_translated", lambda _model, examples: [made.references[k] for k in examples.tolist()])
    assert made.evaluate(made.model(), Accelerator(cpu=True))["bleu"] == pytest.approx(100)


def test_subwords_are_scored_as_words_in_both_metrics(monkeypatch):
    made = task(PIECES, vocabulary=None)
    assert (made.translator.source.size, made.translator.target.size) == (4 + 6, 4 + 6)
    truth = ["a two .", "two &apos;s guar ."]
    monkeypatch.setattr(made, "_translated", lambda _model, examples: [truth[k] for k in examples.tolist()])
    scores = made.evaluate(made.model(), Accelerator(cpu=True))
    # Two sentences without a word of four: sacrebleu smooths what is missing, and nothing else is.
    assert scores["bleu_tokenised"] == pytest.approx(bleu(truth, truth, tokenised=True).score)
    assert scores["bleu"] == pytest.approx(bleu(["a two.", "two's guar."], ["a two.", "two's guar."]).score)
    data = made.facts["data"]
    assert data["note"] == "3 of 9 training pairs"
    assert "tok:none" in data["signatures"]["bleu_tokenised"]
    assert "tok:13a" in data["signatures"]["bleu"]


def test_pairs_that_are_too_long_are_excluded_from_training_only():
    made = task(length=7)
    assert 0 < len(made.train.source) < 60
    assert int(made.train.source.lengths.max()) <= 7
    assert int(made.train.target.lengths.max()) <= 8
    assert len(made.test.source) == 13
    made.evaluate(made.model(), Accelerator(cpu=True))


def test_vocabularies_come_from_the_training_pairs_and_are_saved():
    made = task()
    both = [*made.pairs.train.source, *made.pairs.train.target]
    assert made.translator.source.sha256 == made.translator.target.sha256 == Vocabulary.learned(both, 512).sha256
    assert Vocabulary.of_json(made.files()["target.json"].decode()).sha256 == made.translator.target.sha256


def test_only_the_encoder_is_observed():
    made = task(n_iters=21)
    seen = made.observe(made.model())
    assert [layer["name"] for layer in seen["layers"]] == ["encoder.layers.0.attention"]
    assert seen["columns"]["gap"] < 1e-3


def test_the_metric_beside_the_papers_bleu_is_computed_like_it():
    for artefact in (table2.TABLE2, figure2_translation.FIGURE2_TRANSLATION):
        metrics = [artefact.metric_of(preset) for preset in ("paper", "small", "smoke", "other")]
        assert metrics == ["bleu_tokenised", "bleu", "bleu", "bleu"]


def test_the_arms_of_table_2_are_its_protocol():
    preset = table2.TABLE2.presets["smoke"]
    *_, sinkformer, streaming = preset.arms
    assert [arm.after for arm in preset.arms] == [None, *["pretrain-n-1"] * 3]
    configs = [preset.config.with_settings(arm.settings) for arm in preset.arms]
    assert [config.recipe.rate for config in configs] == pytest.approx([4e-3, 4e-4, 4e-4, 4e-4])
    assert [config.n_iters for config in configs] == [1, 1, 3, 3]
    assert replace(configs[1], n_iters=3) == configs[2]
    assert replace(configs[2], causal="streaming") == configs[3]
    attentions = [
        module.n_iters for module in table2.task(preset, streaming, 0, None).model().modules() if hasattr(module, "tau")
    ]
    assert attentions == [3] * 6  # two layers of the encoder, and two with two attentions of the decoder
    made = table2.task(preset, sinkformer, 0, None)
    assert made.begun == preset.config.recipe.epochs


def test_the_continued_sinkformer_is_the_converted_transformer():
    made = task(n_iters=1)
    model, built = made.model().eval(), task(n_iters=3).model().eval()
    built.load_state_dict(model.state_dict())
    sinkformers.to_sinkformer(model, n_iters=3)
    source, mask = made.test.source.padded(torch.arange(5))
    target = made.test.target.padded(torch.arange(5))[0]
    assert torch.equal(model(source, mask, target), built(source, mask, target))
