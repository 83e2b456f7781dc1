"""Generated texts: number words, opinions, and their fixed splits."""

import pytest
import torch

from sinkformers.lab.data import load_number_words, load_opinions
from sinkformers.lab.data.sets.number_words import english, german


@pytest.mark.parametrize(
    ("number", "de", "en"),
    [
        (0, "null", "zero"),
        (1, "eins", "one"),
        (11, "elf", "eleven"),
        (16, "sechzehn", "sixteen"),
        (17, "siebzehn", "seventeen"),
        (21, "einundzwanzig", "twenty-one"),
        (30, "dreißig", "thirty"),
        (76, "sechsundsiebzig", "seventy-six"),
        (100, "einhundert", "one hundred"),
        (101, "einhunderteins", "one hundred one"),
        (111, "einhundertelf", "one hundred eleven"),
        (240, "zweihundertvierzig", "two hundred forty"),
        (1000, "eintausend", "one thousand"),
        (9871, "neuntausendachthunderteinundsiebzig", "nine thousand eight hundred seventy-one"),
    ],
)
def test_numbers_in_words(number, de, en):
    assert (german(number), english(number)) == (de, en)


def test_every_number_occurs_once_in_one_part():
    found = load_number_words()
    parts = [found.train, found.valid, found.tests["test"]]
    assert [len(part.source) for part in parts] == [9000, 500, 500]
    together = [pair for part in parts for pair in zip(*part, strict=True)]
    assert sorted(together) == sorted((german(n), english(n)) for n in range(10_000))
    assert load_number_words() == found


def test_labels_agree_with_the_words():
    found = load_opinions()
    assert (len(found.train.texts), len(found.test.texts), found.classes) == (1638, 410, ("neg", "pos"))
    verdict = dict(
        zip(
            [*found.train.texts, *found.test.texts],
            torch.cat([found.train.labels, found.test.labels]).tolist(),
            strict=True,
        )
    )
    assert len(verdict) == 2048
    assert verdict["the plot was truly brilliant."] == 1
    assert verdict["the plot was not brilliant."] == 0
    assert verdict["I saw it with my sister last week, and her role seemed never dull."] == 1
    assert verdict["this film was rather weak."] == 0
    assert sum(verdict.values()) == 1024


def test_the_global_generator_is_not_used():
    before = torch.get_rng_state()
    load_number_words(), load_opinions()
    assert torch.equal(torch.get_rng_state(), before)
