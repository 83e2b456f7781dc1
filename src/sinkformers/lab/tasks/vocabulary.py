"""Vocabularies, learned from training texts only: texts to tokens and back.

Tokens below `FIRST` are special and never part of a text; the text `<pad>` is ordinary text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sinkformers.lab.artefacts.artefact import ExperimentError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, BEGIN, END, UNKNOWN = range(4)
FIRST = 4
WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
CONTINUED = "@@"  # end of a subword that the next one continues, as in subword-nmt


class Vocabulary:
    """A tokeniser of the library `tokenizers`, its tokens shifted by `FIRST`.

    Examples:
        >>> from sinkformers.lab.tasks.vocabulary import Vocabulary
        >>> vocabulary = Vocabulary.learned(["to be or not to be"] * 3, 270)
        >>> vocabulary.decode(vocabulary.encode(["Not to be… <pad>"])[0])
        'Not to be… <pad>'
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._pieces = json.loads(tokenizer.to_str())["model"]["type"] == "WordLevel"

    @classmethod
    def learned(cls, texts: Sequence[str], size: int) -> Vocabulary:
        """Learn a byte-level BPE with at most `size` tokens from `texts`. It encodes every text, and decodes it
        exactly."""
        library = _library()
        alphabet = library.pre_tokenizers.ByteLevel.alphabet()
        if size < FIRST + len(alphabet):
            raise ValueError(
                f"Vocabulary: size must be ≥ {FIRST + len(alphabet)}, for every byte and the {FIRST} special tokens; "
                f"got {size}."
            )
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=size - FIRST, initial_alphabet=alphabet, show_progress=False, min_frequency=2
        )
        tokenizer.train_from_iterator(texts, trainer, length=len(texts))
        return cls(tokenizer)

    @classmethod
    def given(cls, texts: Iterable[str]) -> Vocabulary:
        """Return a vocabulary of texts that consist of subwords separated by spaces, the most frequent first.

        Subwords that are not in it become `UNKNOWN`. Decoding joins subwords to words.
        """
        library = _library()
        counts = Counter(piece for text in texts for piece in text.split())
        pieces = sorted(counts, key=lambda piece: (-counts[piece], piece))
        known = {"": 0} | {piece: number for number, piece in enumerate(pieces, 1)}  # "" is the unknown token
        tokenizer = library.Tokenizer(library.models.WordLevel(known, unk_token=""))
        tokenizer.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
        return cls(tokenizer)

    @classmethod
    def of_json(cls, text: str) -> Vocabulary:
        return cls(_library().Tokenizer.from_str(text))

    def to_json(self) -> str:
        return self.tokenizer.to_str()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def size(self) -> int:
        """The number of tokens, special tokens included."""
        return self.tokenizer.get_vocab_size() + self._shift

    @property
    def _shift(self) -> int:
        return FIRST - 1 if self._pieces else FIRST  # the unknown token of the tokeniser becomes UNKNOWN

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, without special tokens."""
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [[number + self._shift for number in encoding.ids] for encoding in encodings]

    def words(self, text: str) -> tuple[int, list[str]]:
        """Return the number of words in a text, and those that are no token of their own.

        A learned vocabulary reads these in pieces; one of given subwords cannot read them.
        """
        if self._pieces:
            words = text.split()
            return len(words), [word for word in words if UNKNOWN in self.encode([word])[0]]
        words = WORD.findall(text)
        # A token of a word within a text begins with its space.
        whole = [min(map(len, self.encode([word, f" {word}"]))) == 1 for word in words]
        return len(words), [word for word, known in zip(words, whole, strict=True) if not known]

    def decode(self, numbers: Iterable[int]) -> str:
        """Return the text of tokens; special tokens are skipped."""
        inner = [number - self._shift for number in numbers if number >= FIRST]
        if not self._pieces:
            return self.tokenizer.decode(inner, skip_special_tokens=False)
        pieces = [self.tokenizer.id_to_token(number) for number in inner]
        return joined(" ".join(piece for piece in pieces if piece is not None))


def joined(pieces: str) -> str:
    """Join subwords to words: `the ja@@ gu@@ ar` becomes `the jaguar`."""
    return f"{pieces} ".replace(f"{CONTINUED} ", "").rstrip()


def _library() -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise ExperimentError(
            "experiments with texts need tokenizers; install it with pip install '.[experiments]' in your clone."
        ) from error
    return tokenizers
