"""Numbers in German and English words: generated translation pairs, for runs without a download.

The word order differs between the languages (`vierunddreißig`, thirty-four).
"""

from __future__ import annotations

from sinkformers.lab.data.texts import Pairs, PairSet

NUMBERS = 10_000
VALID = TEST = 500
SPLIT_SEED = 0

_GERMAN = (
    *("null", "ein", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf"),
    *("dreizehn", "vierzehn", "fünfzehn", "sechzehn", "siebzehn", "achtzehn", "neunzehn"),
)
_GERMAN_TENS = ("zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig")
_ENGLISH = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_ENGLISH_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def load_number_words() -> PairSet:
    """Load the numbers 0 to 9,999: 9,000 pairs for training, 500 for validation and 500 for testing, by a fixed split.

    Examples:
        >>> from sinkformers.lab.data.sets.number_words import english, german
        >>> german(1234), english(1234)
        ('eintausendzweihundertvierunddreißig', 'one thousand two hundred thirty-four')
    """
    import torch

    order = torch.randperm(NUMBERS, generator=torch.Generator().manual_seed(SPLIT_SEED)).tolist()
    valid, test, train = (sorted(part) for part in (order[:VALID], order[VALID : VALID + TEST], order[VALID + TEST :]))
    return PairSet(_pairs(train), _pairs(valid), {"test": _pairs(test)}, "de", "en", "number-words")


def _pairs(numbers: list[int]) -> Pairs:
    return Pairs([german(number) for number in numbers], [english(number) for number in numbers])


def german(number: int) -> str:
    """Return a number below a million in German words, as one word: 21 is `einundzwanzig`, 1 on its own `eins`."""
    return _german(number) + ("s" if number % 100 == 1 else "")


def _german(number: int) -> str:
    thousands, below = divmod(number, 1000)
    hundreds, rest = divmod(below, 100)
    words = f"{_german(thousands)}tausend" if thousands else ""
    words += f"{_GERMAN[hundreds]}hundert" if hundreds else ""
    if rest >= 20:
        tens, ones = divmod(rest, 10)
        return words + (f"{_GERMAN[ones]}und" if ones else "") + _GERMAN_TENS[tens - 2]
    return words + (_GERMAN[rest] if rest or not number else "")


def english(number: int) -> str:
    """Return a number below a million in English words: 234 is `two hundred thirty-four`."""
    thousands, below = divmod(number, 1000)
    hundreds, rest = divmod(below, 100)
    words = [english(thousands), "thousand"] if thousands else []
    words += [_ENGLISH[hundreds], "hundred"] if hundreds else []
    if rest >= 20:
        tens, ones = divmod(rest, 10)
        words.append(_ENGLISH_TENS[tens - 2] + (f"-{_ENGLISH[ones]}" if ones else ""))
    elif rest or not number:
        words.append(_ENGLISH[rest])
    return " ".join(words)
