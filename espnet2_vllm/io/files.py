"""Result files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ..errors import ConfigError


def check_another_folder(output_dir: Path, data_dir: Path) -> None:
    """ConfigError if what is read lies where is to be written under the same names."""
    if output_dir.resolve() == data_dir.resolve():
        raise ConfigError(f"--output-dir {output_dir}: is --data-dir, whose files would be replaced")


def user_cache() -> Path:
    """The folder of this package in the user's cache (XDG_CACHE_HOME); it may not be there yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "espnet2_vllm"


def open_own(path: str | os.PathLike, mode: str) -> IO:
    """Opens a file that this program keeps (a lock, a journal, an archive that grows), and never what a link points to.

    Whoever can write to a shared folder could otherwise have any file of the user's emptied or added to.

    Raises:
        ConfigError: if ``path`` is a symbolic link.
        OSError: where the file system refuses.
    """
    try:
        return open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise _is_link(path, "file") from error


def own_folder(path: Path) -> Path:
    """A folder that this program keeps, made if it is missing; as ``open_own``, never what a link points to.

    Raises:
        ConfigError: if ``path`` is a symbolic link.
        OSError: where the file system refuses.
    """
    if path.is_symlink():
        raise _is_link(path, "folder")
    path.mkdir(parents=True, exist_ok=True)
    return path


def _is_link(path: str | os.PathLike, kind: str) -> ConfigError:
    return ConfigError(
        f"{path}: is a symbolic link to {os.readlink(path)!r}, which is not written to; expected a {kind} of this "
        "package's own; remove the link"
    )


@contextlib.contextmanager
def whole_file(path: Path, *, binary: bool = False) -> Iterator[IO]:
    """A file opened for writing that takes its name when the block ends without an error; UTF-8 unless ``binary``.

    Newlines are written as given. Lone surrogates, which UTF-8 has no place for, become backslash escapes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / f".{uuid.uuid4().hex}.part"
    text = {} if binary else {"encoding": "utf-8", "newline": "", "errors": "backslashreplace"}
    try:
        with open(unfinished, "xb" if binary else "x", **text) as file:
            yield file
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
