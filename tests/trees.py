"""Comparison of a written result tree with ESPnet's."""

import json
import pathlib

import numpy as np
import soundfile

WAV_TOLERANCE = 2  # least significant bits


def result_files(root: pathlib.Path) -> set[pathlib.Path]:
    """Everything but the journals."""
    found = {p.relative_to(root) for p in root.rglob("*") if p.is_file()}
    return {path for path in found if ".journal" not in path.parts}


def same_wav(mine: pathlib.Path, theirs: pathlib.Path) -> None:
    (a, rate), (b, expected) = (soundfile.read(path, dtype="int16") for path in (mine, theirs))
    assert (rate, a.shape) == (expected, b.shape), mine
    assert soundfile.info(mine).subtype == "PCM_16"
    assert np.abs(a.astype(int) - b).max(initial=0) <= WAV_TOLERANCE, mine


def assert_same_tree(mine: pathlib.Path, theirs: pathlib.Path, prefix: str, *, merged_by_rank: bool = False) -> None:
    """Names, bytes, and wavs within 2 LSB.

    Args:
        prefix: how paths inside ESPnet's files begin, where ours begin with ``mine``.
        merged_by_rank: several ranks: ESPnet merges in the order of the file system, and dialogues to invalid JSON.
    """
    assert result_files(mine) == result_files(theirs)
    for name in sorted(result_files(theirs)):
        if name.suffix == ".wav":
            same_wav(mine / name, theirs / name)
            continue
        a = (mine / name).read_bytes().replace(str(mine).encode(), prefix.encode())
        b = (theirs / name).read_bytes()
        if not merged_by_rank or name.name.startswith("rank"):
            assert a == b, name
        elif name.suffix == ".json":
            ranks = sorted((theirs / name).parent.glob(f"rank*_{name.name}"))
            assert json.loads(a) == [one for rank in ranks for one in json.loads(rank.read_bytes())], name
        else:
            assert sorted(a.splitlines()) == sorted(b.splitlines()), name
