"""Codecs in an archive, as ESPnet's ``pack`` makes one and its model zoo takes one from a disk."""

import functools
import lzma
import os
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from pathlib import Path

from espnet2_vllm.errors import CheckpointError

_SUFFIXES = (".zip", ".tar", ".tgz", ".tar.gz", ".tbz2", ".tar.bz2", ".txz", ".tar.xz")


def find_archive(name: str, base_dir: Path | None) -> Path | None:
    """The archive ``name``, from ``base_dir`` first, then from the working directory; None if there is none of that name."""
    if not name.endswith(_SUFFIXES):
        return None
    places = [Path(name)] if base_dir is None else [base_dir / name, Path(name)]
    return next((place for place in places if place.is_file()), None)


def unpacked(name: str, base_dir: Path | None) -> Path | None:
    """A folder with what ``find_archive`` finds, which goes with the process; None if it finds nothing.

    Raises:
        CheckpointError: for an archive that cannot be read.
    """
    archive = find_archive(name, base_dir)
    if archive is None:
        return None
    state = archive.stat()
    return Path(_unpack(archive.resolve(), state.st_mtime_ns, state.st_size).name)


@functools.cache
def _unpack(archive: Path, time: int, size: int) -> tempfile.TemporaryDirectory:
    """Files are as old as the archive: a conversion is known by the times of the files that it was made of."""
    folder = tempfile.TemporaryDirectory(prefix="espnet2_vllm.codec.")
    only_data = {} if archive.suffix == ".zip" else {"filter": "data"}
    try:
        shutil.unpack_archive(archive, folder.name, **only_data)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError) as error:
        raise CheckpointError(f"cannot unpack the codec {archive}: {error}") from error
    for path in Path(folder.name).rglob("*"):
        os.utime(path, ns=(time, time))
    return folder
