"""Where a codec's files lie: below the checkpoint, in the working directory, or in a local hub cache."""

from collections.abc import Sequence
from pathlib import Path

from espnet2_vllm.errors import CheckpointError


def locate_file(name: str, *, base_dir: Path | None, what: str) -> Path:
    """The file ``name``, under ``base_dir`` first, then as it stands. ``what`` names its part in the error message."""
    places = _places(name, base_dir)
    for place in places:
        if place.is_file():
            return place
    raise CheckpointError(f"{what} {name!r} not found: looked for a file at {_listed(places)}")


def locate_directory(
    name: str,
    *,
    base_dir: Path | None,
    what: str,
    other_caches: Sequence[Path] = (),
    revision: str | None = None,
    include: Sequence[str] = (),
) -> Path:
    """The directory ``name``: under ``base_dir``, as it stands, or a hub tag in the local caches.

    ``other_caches``: cache directories in hub layout beside the standard one. ``revision``: of the hub tag.
    ``include``: patterns of the files that are needed of it; none given means all. Nothing is downloaded: a decoding job
    that fetches gigabytes, or hangs on a node without network, is worse than one that says what it lacks.
    Raises CheckpointError with every place looked at.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    places = _places(name, base_dir)
    for place in places:
        if place.is_dir():
            return place
    caches = [Path(constants.HF_HUB_CACHE), *other_caches]
    for cache in caches:
        try:
            return Path(
                snapshot_download(
                    name,
                    local_files_only=True,
                    cache_dir=cache,
                    revision=revision,
                    allow_patterns=list(include) or None,
                )
            )
        except HFValidationError:
            caches = []
            break
        except LocalEntryNotFoundError:
            continue
    if not caches:
        raise CheckpointError(f"{what} {name!r} not found: looked for a directory at {_listed(places)}")
    raise CheckpointError(
        f"{what} {name!r} not found: looked for a directory at {_listed(places)}, and for the hub tag {name!r} in the "
        f"local cache at {_listed(caches)}. Nothing is downloaded while decoding: run `{_download(name, revision, include)}` "
        "on a machine with network (HF_HOME names the cache), or name the directory of a copy"
    )


def _download(name: str, revision: str | None, include: Sequence[str]) -> str:
    words = ["hf download", name, *([f"--revision {revision}"] if revision else [])]
    return " ".join([*words, *(f"--include '{pattern}'" for pattern in include)])


def _places(name: str, base_dir: Path | None) -> list[Path]:
    places = [Path(name)] if base_dir is None else [base_dir / name, Path(name)]
    return list(dict.fromkeys(place.absolute() for place in places))


def _listed(places: Sequence[Path]) -> str:
    return " and ".join(str(place) for place in places)
