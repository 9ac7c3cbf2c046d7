"""Writing a converted directory: shards one after the other, into a folder that appears under its name when complete."""

import contextlib
import errno
import fcntl
import glob
import json
import logging
import math
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .names import EMBEDDING, HEAD, MODEL
from .plan import Entry
from .sources import DESCRIPTION_FILE
from .tensors import TensorSource

FORMAT = "espnet2_vllm checkpoint"
INDEX = "model.safetensors.index.json"
_MOMENT = 60.0  # seconds in which a new folder may not be held yet
_METADATA = {"format": "pt"}  # what transformers asks of a safetensors file

log = logging.getLogger(__name__)


def split_into_shards(entries: Sequence[Entry], shard_size: int) -> list[list[Entry]]:
    """In order, each shard at most ``shard_size`` bytes unless a single tensor is larger."""
    shards: list[list[Entry]] = []
    room = -1
    for entry in entries:
        size = entry.spec.nbytes
        if size > room:
            shards.append([])
            room = shard_size
        shards[-1].append(entry)
        room -= size
    return shards


def write_shards(entries: Sequence[Entry], source: TensorSource, folder: Path, shard_size: int) -> None:
    """Write the language model: ``model-0000k-of-0000n.safetensors`` and their index.

    At most one shard and one tensor are in memory at a time.
    """
    shards = split_into_shards(entries, shard_size)
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(shard, source, folder / name)
        weight_map |= {entry.name: name for entry in shard}
        log.info("shard %d of %d: %d tensors", number, len(shards), len(shard))
    total = sum(entry.spec.nbytes for entry in entries)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def write_tensors(entries: Sequence[Entry], source: TensorSource, path: Path) -> None:
    """One file: safetensors, or torch's format for a ``.pth`` (which is what ESPnet's codecs are read from)."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {}
    for entry in entries:
        tensor = entry.load(source)
        assert tuple(tensor.shape) == entry.spec.shape, f"{entry.source}: {tuple(tensor.shape)}, planned {entry.spec}"
        _check_finite(entry, tensor, source)
        tensors[entry.name] = tensor
    path.parent.mkdir(exist_ok=True)
    try:
        if path.suffix == ".pth":
            torch.save(tensors, path)
        else:
            save_file(tensors, path, metadata=_METADATA)
            path.chmod(_file_mode())
    except (SafetensorError, RuntimeError) as error:  # what both libraries make of an OSError
        raise CheckpointError(f"{path} cannot be written ({error}); is the disk full?") from error


def _check_finite(entry: Entry, tensor: Any, source: TensorSource) -> None:
    """CheckpointError for NaN or infinite weights of the language model, with which nothing that is generated means anything.

    Rows of the vocabulary are ids by themselves: those that are never used do no harm, so that it is a warning there.
    """
    if entry.part != MODEL or tensor.element_size() < 2:  # torch cannot compare 8 bits
        return
    if all(math.isfinite(bound) for bound in map(float, tensor.aminmax())):
        return
    what = f"{source.path}: {entry.source} holds NaN or infinite values as {entry.spec.dtype} ({entry.stored.dtype} in the file)"
    rows = (~tensor.isfinite()).any(dim=-1).nonzero().flatten().tolist()
    if entry.name in (EMBEDDING, HEAD) and len(rows) < len(tensor):
        shown = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
        log.warning("%s for %d of %d ids (%s), which must not be used", what, len(rows), len(tensor), shown)
        return
    raise CheckpointError(
        f"{what}; has the training diverged, is the file damaged, or the dtype too small for the weights?"
    )


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def copy_files(copies: Mapping[str, Path], folder: Path) -> None:
    """``copies``: path below ``folder`` -> file. Contents only: sources are often read-only, their copies must not be."""
    for name, path in copies.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


@contextlib.contextmanager
def appearing(target: Path, nbytes: int) -> Iterator[Path]:
    """A new folder beside ``target`` that takes its name when the block ends, and vanishes if the block fails.

    Another process sees ``target`` complete or not at all. A ``target`` that is a converted directory itself is replaced.
    Raises CheckpointError: ``target`` is something else, or ``nbytes`` do not fit on its disk.
    """
    check_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if nbytes > free:
        raise CheckpointError(
            f"{target} needs {nbytes / 1e9:.2f} GB, but {free / 1e9:.2f} GB are free in {target.parent}"
        )
    prefix = f".{target.name}.{socket.gethostname()}."
    _clear_abandoned(target.parent, prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix, suffix=".part", dir=target.parent))
    held = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(held, fcntl.LOCK_EX)
        folder.chmod(0o777 & ~_umask())
        yield folder
        _take_place(folder, target)
    finally:
        os.close(held)
        shutil.rmtree(folder, ignore_errors=True)


def _clear_abandoned(parent: Path, prefix: str) -> None:
    """Removes what processes of this machine began and, killed, could not remove: nobody holds it, and it is not just made."""
    for folder in parent.glob(f"{glob.escape(prefix)}*.part"):
        with contextlib.suppress(OSError):  # held by a process that is writing there, or gone meanwhile
            held = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(held).st_mtime > _MOMENT:
                    log.info("removing %s, which a conversion left that was killed", folder)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(held)


def check_replaceable(target: Path) -> None:
    """Raise CheckpointError if ``target`` exists and is neither empty nor a converted directory."""
    while True:
        try:
            before = target.stat().st_ino
            names = os.listdir(target)
            after = target.stat().st_ino
        except FileNotFoundError:
            return
        except NotADirectoryError:  # it is a file, or lies below one
            raise CheckpointError(
                f"{target} is a file, or lies below one, and not a converted directory; it is left alone: choose another name"
            ) from None
        if not names or DESCRIPTION_FILE in names:
            return
        if before == after:  # else another process has just put its own there, and the list may be of both
            raise CheckpointError(
                f"{target} exists and is not a converted directory; it is left alone: choose another name"
            )


def _take_place(folder: Path, target: Path) -> None:
    """Rename; also over an empty folder. A conversion in the way goes, also one that appears meanwhile."""
    while True:
        try:
            os.rename(folder, target)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        check_replaceable(target)
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
        try:
            with contextlib.suppress(FileNotFoundError):  # another process was quicker
                os.rename(target, aside / target.name)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _file_mode() -> int:
    return 0o666 & ~_umask()
