"""Line-aligned text files: line k of one is the translation of line k of the other."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from sinkformers.lab.data.error import DataError
from sinkformers.lab.data.texts import Pairs


def read_pairs(source: Path, target: Path, remedy: str) -> Pairs:
    """The sentences of both files, without white space around them; an error ends on `remedy`."""
    pairs = Pairs(read_lines(source, remedy), read_lines(target, remedy))
    if len(pairs.source) != len(pairs.target):
        raise DataError(
            f"{source} has {len(pairs.source):,} lines and {target.name} {len(pairs.target):,}, "
            f"and they should be translations of each other; {remedy}."
        )
    return pairs


def read_lines(file: Path, remedy: str) -> list[str]:
    """The lines of a file of UTF-8, gzipped or plain. A line ends at a line feed only: sentences may hold other marks
    that Unicode lets break a line."""
    try:
        content = file.read_bytes()
        text = (gzip.decompress(content) if file.suffix == ".gz" else content).decode("utf-8")
    except (EOFError, gzip.BadGzipFile, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{file} is damaged ({error}); delete it and {remedy}.") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror or error}); {remedy}.") from error
    lines = [line.strip() for line in text.removesuffix("\n").split("\n")]
    if not all(lines):
        raise DataError(f"{file} is empty in line {lines.index('') + 1}; delete it and {remedy}.")
    return lines
