"""File names and messages in UTF-8, whatever the locale says."""

from __future__ import annotations

import os
import sys


def insist_on_utf8() -> None:
    """Starts this program anew in Python's UTF-8 mode, if it would write file names in another encoding.

    Result files name recordings in UTF-8, and so must the file system. Python itself goes into that mode in the locales C and
    POSIX, but not in one of Latin-1, say, or where PYTHONUTF8 is 0. To be called first, by what is the program.
    """
    if sys.getfilesystemencoding() != "utf-8" and not sys.flags.utf8_mode:
        os.environ["PYTHONUTF8"] = "1"  # of the processes that it starts in turn
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
