"""Converting once: ESPnet's own files in, an opened converted directory out."""

import atexit
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..errors import CheckpointError
from ..io.files import open_own, user_cache
from .conversion import FORMAT_VERSION, check_family, convert_source
from .describe import describe
from .opening import Checkpoint, is_converted, open_checkpoint
from .sources import Source, find_source

CACHE_FOLDER = ".espnet2_vllm_cache"
CACHE_VARIABLE = "ESPNET2_VLLM_CACHE"  # a folder to use in place of the one beside the checkpoint

log = logging.getLogger(__name__)


def ensure_converted(
    train_config: str | Path,
    model_file: str | Path | None = None,
    *,
    cache: bool = True,
    vocab_order: str = "yaml",
    family: str | None = None,
) -> Checkpoint:
    """The checkpoint that ESPnet would decode with these two files, converted on first use.

    A converted directory (or a file in it) is opened as it is. Otherwise the conversion is kept in ``.espnet2_vllm_cache``
    beside the model file, or in the user's cache folder (XDG_CACHE_HOME) where that cannot be written, or in the folder
    that ESPNET2_VLLM_CACHE names. It is made anew when a source file has changed. Processes that come at the same time
    wait for the first.

    Args:
        train_config: training yaml, experiment or release folder, or converted directory.
        model_file: the model, where the folder of ``train_config`` holds several or none.
        cache: False converts into a temporary folder that goes when the process ends.
        vocab_order: see ``convert``.
        family: refuse a checkpoint of another family.

    Raises:
        CheckpointError, ConfigError: see ``convert``.
    """
    for path in (model_file, train_config):
        directory = _converted_directory(path)
        if directory is not None:
            return open_checkpoint(directory, family=family)
    source = find_source(train_config, model_file=model_file)
    check_family(source.family, family, source.train_config)
    name = f"{source.model_file.stem or source.model_file.name}-{fingerprint(source, vocab_order)}"
    if not cache:
        folder = Path(tempfile.mkdtemp(prefix="espnet2_vllm."))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return _convert(source, folder / name, vocab_order)
    folder = cache_folder(source)
    with _locked(folder / f".{name}.lock"):
        if is_converted(folder / name):
            log.info("using the converted checkpoint %s", folder / name)
            return open_checkpoint(folder / name)
        _say_older(folder, source.model_file, name)
        return _convert(source, folder / name, vocab_order)


def fingerprint(source: Source, vocab_order: str) -> str:
    """Changes when a file that the conversion reads changes (size or time), or the converter does."""
    model = source.model_file
    weights = sorted(path for path in model.rglob("*") if path.is_file()) if model.is_dir() else [model]
    files = [source.train_config, *weights, *describe(source, vocab_order=vocab_order).files]
    states = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    content = json.dumps([FORMAT_VERSION, vocab_order, states])
    return hashlib.sha256(content.encode("utf-8")).hexdigest()[:12]


def cache_folder(source: Source) -> Path:
    """Where conversions of ``source`` are kept; it is made. A folder without write permission is left alone, also by root."""
    beside = source.model_file.parent
    chosen = os.environ.get(CACHE_VARIABLE)
    if not chosen and beside.stat().st_mode & 0o222:
        with contextlib.suppress(OSError):
            (beside / CACHE_FOLDER).mkdir(exist_ok=True)
            if os.access(beside / CACHE_FOLDER, os.W_OK):
                return beside / CACHE_FOLDER
    folder = cache_root() / hashlib.sha256(str(beside.resolve()).encode("utf-8")).hexdigest()[:12]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"no place to keep the converted checkpoint: {beside} and {folder} cannot be written ({error}); name a folder in "
            f"{CACHE_VARIABLE}, or run espnet2-vllm convert"
        ) from error
    if not chosen:
        log.warning("%s cannot be written: the converted checkpoint is kept in %s", beside, folder)
    return folder


def cache_root() -> Path:
    """Where conversions are kept that cannot lie beside their checkpoints, or are not wanted there."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen) if chosen else user_cache()


def _convert(source: Source, target: Path, vocab_order: str) -> Checkpoint:
    log.info("converting %s once, to %s", source.model_file, target)
    for line in convert_source(source, target, vocab_order=vocab_order).lines:
        log.info("%s", line)
    return open_checkpoint(target)


def _converted_directory(path: str | Path | None) -> Path | None:
    if path is None:
        return None
    path = Path(path)
    directory = path.parent if path.is_file() and path.suffix in (".json", ".safetensors") else path
    return directory if is_converted(directory) else None


def _say_older(folder: Path, model_file: Path, name: str) -> None:
    """Deleting them is the user's: another job may be reading one."""
    older = [path.name for path in folder.glob(f"{model_file.stem}-*") if is_converted(path) and path.name != name]
    if older:
        log.warning(
            "%s is converted anew, because a file or --vocab_order changed; earlier conversions in %s, if not in use, can be "
            "deleted: %s",
            model_file,
            folder,
            older,
        )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait for other processes that convert the same. Without locks on the file system the last one wins, whole."""
    with open_own(path, "ab") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another process is converting this checkpoint; waiting for it")
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError as error:
            log.warning("%s cannot be locked (%s); other processes may convert the same at the same time", path, error)
        yield
