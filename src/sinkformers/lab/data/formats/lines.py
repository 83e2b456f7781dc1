"""Line-aligned text files: line k of one is the translation of line k of the other."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from sinkformers.lab.data.error import DataError
from sinkformers.lab.data.texts import Pairs


def read_pairs(source: Path, target: Path, fix: str) -> Pairs:
    """Read the sentences of both files, without surrounding white space; error messages end with `fix`."""
    pairs = Pairs(read_lines(source, fix), read_lines(target, fix))
    if len(pairs.source) != len(pairs.target):
        raise DataError(
            f"{source} has {len(pairs.source):,} lines and {target.name} {len(pairs.target):,}, "
            f"and they should be translations of each other; {fix}."
        )
    return pairs


def read_lines(file: Path, fix: str) -> list[str]:
    """Read the lines of a UTF-8 file, gzipped or plain. Only a line feed ends a line: sentences may contain other
    characters that Unicode treats as line breaks."""
    try:
        content = file.read_bytes()
        text = (gzip.decompress(content) if file.suffix == ".gz" else content).decode("utf-8")
    except (EOFError, gzip.BadGzipFile, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{file} is damaged ({error}); delete it and {fix}.") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror or error}); {fix}.") from error
    lines = [line.strip() for line in text.removesuffix("\n").split("\n")]
    if not all(lines):
        raise DataError(f"{file} is empty in line {lines.index('') + 1}; delete it and {fix}.")
    return lines
