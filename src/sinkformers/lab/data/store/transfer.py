"""One file from one server: appended to what is there already, where the server can go on from the middle."""

from __future__ import annotations

import http.client
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import BinaryIO

CHUNK = 2**18
PATIENCE = 30.0  # seconds without a byte


class UnreachableError(Exception):
    """A server did not deliver; the message says why, in a few words."""


def transfer(url: str, out: BinaryIO, size: int, report: Callable[[int], None]) -> None:
    """Complete `out`, a file open for appending, to `size` bytes from `url`; `report` learns how many it holds.

    What has arrived when a server breaks off stays in `out`. Bytes that cannot be part of the file do not.
    """
    done = out.seek(0, os.SEEK_END)
    if done > size:
        done = out.truncate(0)
    if done == size:
        return
    with _open(url, done) as response:
        begins = _begins(response)
        if begins > done:
            raise UnreachableError("it sent another range than the one asked for")
        if begins < done:  # the server knows no ranges and starts from the beginning
            done = out.truncate(begins)
        while chunk := _read(response):
            done += len(chunk)
            if done > size:
                out.truncate(0)
                raise UnreachableError(f"it sent more than {size:,} bytes")
            out.write(chunk)
            report(done)
    out.flush()
    if done < size:
        raise UnreachableError(f"it broke off after {done:,} of {size:,} bytes")


def _open(url: str, offset: int) -> http.client.HTTPResponse:
    headers = {"User-Agent": "sinkformers", **({"Range": f"bytes={offset}-"} if offset else {})}
    try:
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=PATIENCE)
    except urllib.error.HTTPError as error:
        error.close()
        if offset and error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return _open(url, 0)
        raise UnreachableError(f"HTTP {error.code}") from error
    except urllib.error.URLError as error:
        raise UnreachableError(str(error.reason)) from error
    except (OSError, http.client.HTTPException) as error:
        raise UnreachableError(str(error) or type(error).__name__) from error


def _begins(response: http.client.HTTPResponse) -> int:
    """The position, in the whole file, of the first byte that the server is about to send."""
    if response.status != http.HTTPStatus.PARTIAL_CONTENT:
        return 0
    found = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    if found is None:
        raise UnreachableError("it sent a range without saying which")
    return int(found[1])


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise UnreachableError(str(error) or type(error).__name__) from error
