"""IWSLT'14, German to English, as fairseq's `prepare-iwslt14.sh` writes it.

The text is tokenised by the Moses script, in lower case, and split into subwords; `@@ ` marks a subword that the next
one continues.
"""

from __future__ import annotations

from pathlib import Path

from sinkformers.lab.data.error import DataError
from sinkformers.lab.data.formats.lines import read_pairs
from sinkformers.lab.data.store.data_set import DataSet, list_files
from sinkformers.lab.data.store.folder import AnyPath, path_of
from sinkformers.lab.data.texts import Pairs, PairSet

TRAIN = 160_239
PARTS = {"valid": 7_283, "test": 6_750}
CHECKSUMS = """
3dd02684b6693abce3ba59520425901b0b910abeec2ae6b15cc62e458441d503    99579 code
0bca28e500495a4a9694ae134b0ae35526a280cb0966abbcf3c9af3edc3dfe10   806780 test.de
c2951533a0b03557599978ea1726c440bdbb8210454d1e9ef3b87c2b6228ac43   714609 test.en
804c9c61542fc69556ebcaf13fb755f3fae0be829c65ddfbd5b0493bff24430c  1094412 train.de
a13818b986e187f499470c53214c930dfed23ffb7982fb7934a177b3cf07258c   977158 train.en
27660c689b99b54f0f858775527ff351c520f7581be90aac84b6d16f14624c9e   910989 valid.de
1b1f2246625cc907fbd9c8195776434b24687c3fc4e068c6f3d3ec542846823f   813577 valid.en
"""

DATA_SET = DataSet(
    "iwslt14",
    title="IWSLT'14 German–English, as fairseq prepares it",
    licence="TED talks, WIT3; CC BY-NC-ND 4.0",
    by_hand="run fairseq's examples/translation/prepare-iwslt14.sh and put the folder iwslt14.tokenized.de-en "
    "that it makes into iwslt14/",
    files=list_files("iwslt14/iwslt14.tokenized.de-en", CHECKSUMS, varies=("train.de", "train.en")),
)


def load_iwslt14(folder: AnyPath) -> PairSet:
    """Load the sentences below the data folder `folder`, split into subwords as in the files.

    Validation and test parts must be complete. A training part of another size than fairseq's is accepted; `note` says
    so.
    """
    folder = path_of("load_iwslt14", "folder", folder)
    train, valid, test = (_part(folder, part) for part in ("train", *PARTS))
    partial = f"{len(train.source):,} of {TRAIN:,} training pairs" if len(train.source) != TRAIN else ""
    return PairSet(train, valid, {"test": test}, "de", "en", "iwslt14", partial)


def _part(folder: Path, part: str) -> Pairs:
    source, target = (folder / DATA_SET.file(f"{part}.{language}").path for language in ("de", "en"))
    for file in (source, target):
        if not file.exists():
            raise DataError(f"iwslt14: there is no {file}; {DATA_SET.fix}.")
    pairs = read_pairs(source, target, DATA_SET.fix)
    expected = PARTS.get(part, len(pairs.source))
    if len(pairs.source) != expected:
        raise DataError(
            f"{source} has {len(pairs.source):,} lines instead of the {expected:,} of fairseq's script; {DATA_SET.fix}."
        )
    return pairs
