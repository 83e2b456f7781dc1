"""Vocabularies: every text is decoded exactly, special tokens are never text, equal texts give equal vocabularies."""

import sys

import pytest

from sinkformers.lab.artefacts.artefact import ExperimentError
from sinkformers.lab.tasks.vocabulary import BEGIN, END, FIRST, PAD, UNKNOWN, Vocabulary

TEXTS = ["to be or not to be", "be not afeard", "nothing will come of nothing"] * 5
ODD = ["", " two  spaces ", "größe 😀\u2028\x00", "<pad></s>", "a@@ b", "To Be\n\tor"]


@pytest.fixture(scope="module")
def learned():
    return Vocabulary.learned(TEXTS, 280)


@pytest.mark.parametrize("text", [*TEXTS[:3], *ODD])
def test_every_text_is_decoded_exactly_and_has_no_special_tokens(learned, text):
    numbers = learned.encode([text])[0]
    assert learned.decode(numbers) == text
    assert all(FIRST <= number < learned.size for number in numbers)
    assert learned.decode([BEGIN, *numbers, END, PAD]) == text


def test_frequent_words_are_one_token(learned):
    assert learned.size == 280
    assert len(learned.encode([" not"])[0]) == 1
    assert len(learned.encode([" zebra"])[0]) > 1


def test_equal_texts_give_equal_vocabularies_and_json_keeps_them(learned):
    again = Vocabulary.learned(TEXTS, 280)
    assert again.sha256 == learned.sha256
    assert Vocabulary.learned(["other", "texts"] * 9, 280).sha256 != learned.sha256
    read = Vocabulary.of_json(learned.to_json())
    assert read.encode(TEXTS + ODD) == learned.encode(TEXTS + ODD)
    assert read.sha256 == learned.sha256


def test_given_subwords_are_kept():
    texts = ["the ja@@ gu@@ ar sleeps .", "the end ."]
    vocabulary = Vocabulary.given(texts)
    assert vocabulary.size == FIRST + 7
    numbers = vocabulary.encode(texts)
    # By frequency, then by alphabet: `.` and `the` come twice.
    assert numbers == [[5, 9, 8, 6, 10, 4], [5, 7, 4]]
    assert [vocabulary.decode(each) for each in numbers] == ["the jaguar sleeps .", "the end ."]
    assert vocabulary.encode(["the new ja@@ ."]) == [[5, UNKNOWN, 9, 4]]
    read = Vocabulary.of_json(vocabulary.to_json())
    assert (read.encode(texts), read.decode(numbers[0]), read.size) == (numbers, "the jaguar sleeps .", FIRST + 7)


def test_spaces_are_no_subwords_and_subwords_are_joined():
    vocabulary = Vocabulary.given([" the  ja@@ guar ", "end "])
    assert vocabulary.size == FIRST + 4
    numbers = vocabulary.encode(["the  ja@@  guar "])[0]
    assert all(FIRST <= number < vocabulary.size for number in numbers)
    assert vocabulary.decode(numbers) == "the jaguar"
    assert vocabulary.decode(numbers[:-1]) == "the ja"


def test_a_size_too_small_for_all_bytes_is_refused():
    with pytest.raises(ValueError, match=r"size must be ≥ 260, for every byte and the 4 special tokens; got 259"):
        Vocabulary.learned(TEXTS, 259)


def test_a_missing_library_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ExperimentError, match=r"texts need tokenizers; install it with .*\.\[experiments\]"):
        Vocabulary.learned(TEXTS, 280)
