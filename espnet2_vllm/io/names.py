"""Names and lines that no id and no text can break: file names inside the output directory, one record a line."""

from __future__ import annotations

import hashlib
import re

MOST_NAME_BYTES = 255  # of one file name on every common file system

# What ends a line for a reader of Kaldi files: universal newlines (\n, \r) and the Unicode separators that many tools split at.
# Other control characters stay, as in ESPnet's own files (recorded trees hold NUL, vertical tab and group separator).
_LINE_BREAKS = re.compile("[\n\r\x85\u2028\u2029]")
_CUT = re.compile("~[0-9a-f]{16}$")
_MOST_CHARACTER_BYTES = 4  # a cut in the middle of a character leaves a shorter name
_UNSAFE = re.compile("[/\\x00-\\x1f\\x7f\ud800-\udfff]|%(?=[0-9A-Fa-f]{2})")


def safe_file_name(name: str, suffix: str = "") -> str:
    """``name`` + ``suffix`` as one file name that stays in its directory.

    Ordinary ids come back as they are. ``/``, control characters, lone surrogates, and a ``%`` that looks like an escape are
    percent-encoded (UTF-8), so that ``urllib.parse.unquote`` gives the id back and two ids never share a file; so are all dots
    of ``.`` and ``..``. What is longer than 255 bytes is cut and ends in ``~`` and 16 hex digits of its BLAKE2b digest; so does an
    id that looks like a cut one itself.
    """
    safe = _UNSAFE.sub(_percent, name)
    if safe + suffix in ("", ".", ".."):
        safe = safe.replace(".", "%2E") or "%"
    room = MOST_NAME_BYTES - len(suffix.encode())
    size = len(safe.encode())
    looks_cut = size > room - _MOST_CHARACTER_BYTES and _CUT.search(safe)
    if size <= room and not looks_cut:
        return safe + suffix
    mark = "~" + hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return safe.encode()[: room - len(mark)].decode("utf-8", "ignore") + mark + suffix


def _percent(match: re.Match) -> str:
    return "".join(f"%{byte:02X}" for byte in match.group().encode("utf-8", "surrogatepass"))


_ESCAPES = {"\n": "\\n", "\r": "\\r", "\x85": "\\x85", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def one_line(text: str) -> tuple[str, int]:
    """``text`` with every line break written as Python writes it (``\\n``), and how many were; the rest stays as it is.

    JSON files and the journal hold the text itself.
    """
    return _LINE_BREAKS.subn(lambda match: _ESCAPES[match.group()], text)
