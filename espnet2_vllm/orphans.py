"""Processes that this package has started end with the one that started them, however that ended."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time

log = logging.getLogger(__name__)

_GRACE = 10.0  # seconds between SIGTERM, upon which a process tidies up, and SIGKILL
_watched: set[int] = set()


def end_with(parent: int) -> None:
    """This process ends when ``parent`` is gone; may be called again. A process that was killed cannot tell its children to.

    Not by PR_SET_PDEATHSIG, which also counts the end of the thread that started the process.
    """
    if parent in _watched or parent == os.getpid():
        return
    _watched.add(parent)
    threading.Thread(target=_watch, args=(parent, _descriptor(parent)), name="parent watch", daemon=True).start()


def _descriptor(pid: int) -> int | None:
    """What becomes readable when the process ends; None on a kernel without such, or if it has ended."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _watch(parent: int, descriptor: int | None) -> None:
    if descriptor is not None:
        select.select([descriptor], [], [])
    else:
        while os.getppid() == parent:
            time.sleep(1)
    log.warning("process %d, which started this one, is gone: ending", parent)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    os.kill(os.getpid(), signal.SIGKILL)
