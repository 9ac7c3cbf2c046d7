"""What each program sees to first: file names and messages in UTF-8, whatever the locale says; a quiet end where nobody reads."""

from __future__ import annotations

import atexit
import os
import select
import sys
from types import TracebackType


def insist_on_utf8() -> None:
    """Starts this program anew in Python's UTF-8 mode, if it would write file names in another encoding.

    Result files name recordings in UTF-8, and so must the file system. Python itself goes into that mode in the locales C and
    POSIX, but not in one of Latin-1, say, or where PYTHONUTF8 is 0. To be called first, by what is the program. It then also
    ends without a traceback where who read its output has enough (``--help | head``).
    """
    if sys.getfilesystemencoding() != "utf-8" and not sys.flags.utf8_mode:
        os.environ["PYTHONUTF8"] = "1"  # of the processes that it starts in turn
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    sys.excepthook = _without_a_reader
    atexit.register(_reader_is_gone)


def _reader_is_gone() -> bool:
    """Whether standard output cannot be written any more; what is left of it is then dropped."""
    output = sys.stdout.fileno()
    state = select.poll()
    state.register(output, 0)
    gone = any(event & (select.POLLERR | select.POLLHUP) for _, event in state.poll(0))
    if gone:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, output)
        os.close(nowhere)
    return gone


def _without_a_reader(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    # Another pipe's end, an engine's, say, leaves standard output as it is.
    if not (issubclass(kind, BrokenPipeError) and _reader_is_gone()):
        sys.__excepthook__(kind, error, traceback)
