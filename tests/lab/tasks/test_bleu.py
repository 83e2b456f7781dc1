"""BLEU with its signature, and plain text from Moses' tokens."""

import math
import sys

import pytest

from sinkformers.lab.artefacts.artefact import ExperimentError
from sinkformers.lab.tasks.bleu import bleu, detokenised


def test_bleu_is_its_definition():
    """Common words, pairs, triples and fours, counted by hand; the brevity penalty of 8 words against 9."""
    written, reference = "the cat sat on the red mat today", "the cat sat on the mat today once more"
    precisions = (7 / 8, 5 / 7, 3 / 6, 2 / 5)
    expected = 100 * math.exp(1 - 9 / 8) * math.prod(precisions) ** (1 / 4)
    for tokenised in (False, True):
        assert bleu([written], [reference], tokenised=tokenised).score == pytest.approx(expected)
    assert bleu([reference], [reference]).score == pytest.approx(100)


def test_the_signature_holds_the_settings():
    plain, words = (bleu(["a"], ["a"], tokenised=tokenised).signature for tokenised in (False, True))
    assert "case:mixed" in plain
    assert "tok:13a" in plain
    assert "tok:none" in words
    assert "version:" in plain


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("so there you go . that &apos;s the truth .", "so there you go. that's the truth."),
        ("i do n&apos;t know , really !", "i don't know, really!"),
        ("he said , &quot; come here &quot; , and left .", 'he said, "come here", and left.'),
        ("&quot; yes &quot; and &quot; no &quot;", '"yes" and "no"'),
        ("( well ) , 50 % of them", "(well), 50% of them"),
        ("a state @-@ of @-@ the @-@ art thing", "a state-of-the-art thing"),
        ("r &amp; d", "r & d"),
    ],
)
def test_words_become_plain_text(words, text):
    assert detokenised(words) == text


def test_a_missing_library_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(ExperimentError, match=r"need sacrebleu; install it with .*\.\[experiments\]"):
        bleu(["a"], ["a"])
