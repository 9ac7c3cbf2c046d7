"""A part of a file that a web server holds, by one HTTP range request."""

from __future__ import annotations

import time
import urllib.request
from http.client import HTTPException, HTTPResponse

from ..errors import DataError

_SILENCE_SECONDS = 60.0  # without a byte
_SECONDS = 600.0  # for all of them
_PIECE = 1 << 20


def fetch_range(address: str, start: int, size: int) -> bytes:
    """``size`` bytes from byte ``start`` of what ``address`` names; redirections are followed to http and https only.

    Raises:
        DataError: naming the address, if they cannot be had, or the server answers with others.
    """
    if size == 0:
        return b""
    where = f"{address!r}, bytes {start} to {start + size - 1}"
    try:
        request = urllib.request.Request(address, headers={"Range": f"bytes={start}-{start + size - 1}"})
        with _opener().open(request, timeout=_SILENCE_SECONDS) as answer:
            told = answer.headers.get("Content-Range", "")
            if answer.status != 206 and start > 0:
                raise DataError(f"{where}: the server does not answer range requests (status {answer.status})")
            if answer.status == 206 and not told.startswith(f"bytes {start}-"):
                raise DataError(f"{where}: the server answers with others, Content-Range {told[:80]!r}")
            data = _read(answer, size, where)
    except (OSError, HTTPException, ValueError) as error:
        raise DataError(f"{where}: cannot be fetched: {str(error)[:200] or type(error).__name__}") from error
    if len(data) < size:
        raise DataError(f"{where}: the server sent {len(data)} of {size} bytes")
    return data


def _opener() -> urllib.request.OpenerDirector:
    """Of http and https alone: Python's own also opens files and FTP, to which a server may redirect."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.UnknownHandler,
    ):
        opener.add_handler(handler())
    return opener


def _read(answer: HTTPResponse, size: int, where: str) -> bytes:
    """Up to ``size`` bytes, piece by piece, so that what is declared and never comes takes no memory."""
    data, until = bytearray(), time.monotonic() + _SECONDS
    while len(data) < size and (piece := answer.read(min(_PIECE, size - len(data)))):
        data += piece
        if time.monotonic() > until:
            raise DataError(f"{where}: {len(data)} of {size} bytes came in {_SECONDS:.0f} s")
    return bytes(data)
