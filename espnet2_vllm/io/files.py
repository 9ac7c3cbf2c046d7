"""Result files that appear whole or not at all."""

from __future__ import annotations

import contextlib
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
