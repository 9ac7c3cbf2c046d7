"""Commands that write a recording: run with a limit of time and of output, and with all that they started ended with them."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import tempfile
import time
from typing import BinaryIO

from ..errors import DataError

_STDERR_TAIL = 2000
_CHUNK = 2**16
_IN_MEMORY = 2**24  # bytes of output; more lie in a temporary file
_SHOWN = 200  # characters of a command that messages show, where it is no use to show all of it


def output_of(command: str, cwd: str | os.PathLike | None, *, seconds: float, megabytes: float) -> BinaryIO:
    """What the shell command writes to its standard output, as a file to be read from its beginning.

    It has no standard input: a command that reads it would eat the input of the program that decodes.

    Raises:
        DataError: if it cannot be started, fails, writes nothing, takes more than ``seconds``, or writes more than ``megabytes``.
            Its process group is killed.
    """
    try:
        process = subprocess.Popen(
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:  # too long for the system, or with a NUL in it
        raise DataError(f"command cannot be started: {command[:_SHOWN]}: {error}") from error
    output = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY)  # noqa: SIM115
    try:
        with process.stdout, process.stderr:
            stderr = _gather(process, command, output, time.monotonic() + seconds, seconds, megabytes)
    except BaseException:
        output.close()
        raise
    finally:
        # Also what it left in the background: nobody reads what that writes.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    said = stderr.decode("utf-8", errors="replace").strip() or "(nothing)"
    if process.returncode == 0 and output.tell():
        output.seek(0)
        return output
    output.close()
    if process.returncode:
        raise DataError(f"command failed with exit status {process.returncode}: {command}\nits last words: {said}")
    raise DataError(f"command gave no output: {command}\nits last words: {said}")


def _gather(
    process: subprocess.Popen, command: str, output: BinaryIO, deadline: float, seconds: float, megabytes: float
) -> bytes:
    """Fills ``output`` until the command has ended; the end of what it wrote to its standard error."""
    stderr, written = b"", 0
    with selectors.DefaultSelector() as selector:
        for pipe in (process.stdout, process.stderr):
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready and time.monotonic() >= deadline:
                raise _too_long(command, seconds)
            for key, _ in ready:
                data = os.read(key.fd, _CHUNK)
                if not data:
                    selector.unregister(key.fileobj)
                elif key.fileobj is process.stderr:
                    stderr = (stderr + data)[-_STDERR_TAIL:]
                else:
                    written += len(data)
                    if written > megabytes * 2**20:
                        raise DataError(
                            f"command wrote more than {megabytes:g} MiB, the most that command_megabytes allows: "
                            f"{command[:_SHOWN]}"
                        )
                    output.write(data)
            if time.monotonic() >= deadline:
                raise _too_long(command, seconds)
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise _too_long(command, seconds) from None
    return stderr


def _too_long(command: str, seconds: float) -> DataError:
    return DataError(
        f"command did not end within {seconds:g} s, the most that command_seconds allows, and was killed: {command[:_SHOWN]}"
    )
