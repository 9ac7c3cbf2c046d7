"""One process at a time writes to an output directory, also where the file system has no locks."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import IO, Any

from ..errors import ConfigError
from .files import open_own, whole_file

log = logging.getLogger(__name__)

HOLDER = "holder.json"  # beside the lock while it is held: by whom


class Lock:
    """The lock in ``folder``, taken for this process until it is closed.

    Args:
        folder: where it lies; it must exist.
        directory: what it is of, for messages.

    Raises:
        ConfigError: if another process has it.
    """

    def __init__(self, folder: Path, directory: Path) -> None:
        self._holder = folder / HOLDER
        self._file: IO | None = open_own(folder / "lock", "ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise _taken(directory, _read(self._holder)) from None
        except OSError as error:
            holder = _read(self._holder)
            if _lives(holder):
                self._file.close()
                raise _taken(directory, holder) from None
            log.warning(
                "%s: this file system has no locks (%s); see to it that no other job writes there%s",
                directory,
                error,
                f". {_named(holder)} may do so" if holder and _lives(holder) is None else "",
            )
        with whole_file(self._holder) as file:
            json.dump(_myself(), file)

    def close(self) -> None:
        """Gives it back; may be called again."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # the directory may be gone
                self._holder.unlink(missing_ok=True)
            self._file.close()
            self._file = None


def is_held(folder: Path) -> bool:
    """Whether a process holds the lock in ``folder`` at this moment."""
    path = folder / "lock"
    if not path.is_file():
        return False
    with open_own(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # no locks here: who writes leaves its name; of another machine nothing is known, so it counts
            return _lives(_read(folder / HOLDER)) is not False
    return False


def _taken(directory: Path, holder: dict[str, Any] | None) -> ConfigError:
    return ConfigError(
        f"{directory}: another process is writing results there{f' ({_named(holder)})' if holder else ''}, perhaps of a run whose "
        "script was killed; wait for it, end it, or give another output directory"
    )


def _named(holder: dict[str, Any]) -> str:
    return f"process {holder['pid']} on {holder['host']}, since {holder['since']}"


def _myself() -> dict[str, Any]:
    pid = os.getpid()
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"pid": pid, "host": socket.gethostname(), "begun": _begun(pid), "since": since}


def _begun(pid: int) -> str | None:
    """When a process of this machine was started, in the kernel's own count; None if there is none (any more)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    kinds = {"pid": int, "host": str, "since": str}
    whole = isinstance(found, dict) and all(isinstance(found.get(name), kind) for name, kind in kinds.items())
    return found if whole else None


def _lives(holder: dict[str, Any] | None) -> bool | None:
    """Whether the holder is still at work; None if it is of another machine. Nobody does not live."""
    if holder is None:
        return False
    if holder["host"] != socket.gethostname():
        return None
    return holder["pid"] != os.getpid() and _begun(holder["pid"]) == holder.get("begun") is not None
