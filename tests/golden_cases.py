"""Recorded cases, replayed through the public interface and compared exactly.

A case is a pair of files ``<case>.json`` and ``<case>.npz`` as the READMEs of the recordings describe them. Replaying one
reads its input with the package's own readers, decodes it with ``backends.decode`` and compares what comes out, id by id.
"""

import functools
import json
import pathlib
from dataclasses import dataclass, field

import numpy as np
import torch

from espnet2_vllm.audio.tower import AudioTower
from espnet2_vllm.backends import decode, make_engine
from espnet2_vllm.checkpoint import ensure_converted
from espnet2_vllm.codec import load_codec
from espnet2_vllm.errors import SpeechLMError
from espnet2_vllm.plan import REFUSED, Result
from espnet2_vllm.text import TextTokenizer

LOGIT_TOLERANCE = 1e-3

EXACT, DIFFERS, GUIDANCE = "exact", "DIFFERS", "refused (guidance)"


class DiffersError(Exception):
    """What came out is not what was recorded. The message says where."""


class RefusedError(Exception):
    """The case cannot be replayed. The first argument is the verdict."""


@dataclass(frozen=True)
class Case:
    """``about`` is the json, ``arrays`` the npz."""

    name: str
    about: dict
    arrays: dict

    @classmethod
    def load(cls, path: pathlib.Path) -> "Case":
        with np.load(path.with_suffix(".npz")) as arrays:
            return cls(path.stem, json.loads(path.read_text(encoding="utf-8")), dict(arrays))


@dataclass
class Verdict:
    """Outcome of one case. ``logits`` is the worst difference of raw logits, None where none was compared."""

    case: str
    verdict: str
    note: str = ""
    logits: float | None = None

    def __str__(self) -> str:
        measured = "" if self.logits is None else f" logits {self.logits:.2g}"
        return f"{self.case}: {self.verdict}{measured}{f' ({self.note})' if self.note else ''}"


@dataclass
class Comparison:
    """What a replay found so far."""

    logits: float | None = None
    notes: list[str] = field(default_factory=list)

    def same(self, what: str, found, recorded) -> None:
        """Equal arrays, texts or plain values."""
        if isinstance(recorded, np.ndarray):
            _same_arrays(what, np.asarray(found), recorded)
        elif found != recorded:
            raise DiffersError(f"{what}: {found!r}, recorded {recorded!r}")

    def logits_close(self, what: str, found, recorded: np.ndarray) -> None:
        """Raw logits within the tolerance, where finite ones were recorded."""
        worst = self.close(f"{what}: logits", found, recorded, LOGIT_TOLERANCE)
        self.logits = max(worst, self.logits or 0.0)

    def close(self, what: str, found, recorded: np.ndarray, tolerance: float) -> float:
        """Values within the tolerance, where finite ones were recorded; the worst difference."""
        found = np.asarray(found)
        if found.shape != recorded.shape:
            raise DiffersError(f"{what} of shape {found.shape}, recorded {recorded.shape}")
        finite = np.isfinite(recorded)
        gaps = np.abs(found[finite] - recorded[finite])
        worst = float(gaps.max(initial=0.0))
        if not worst <= tolerance:  # also if it is NaN
            raise DiffersError(f"{what} differ by {worst:.3g}, more than {tolerance:g}")
        return worst


def _same_arrays(what: str, found: np.ndarray, recorded: np.ndarray) -> None:
    if found.shape != recorded.shape:
        common = min(len(found), len(recorded))
        first = _first_difference(found[:common], recorded[:common]) if found.shape[1:] == recorded.shape[1:] else None
        where = "" if first is None else f"; first difference at {first}"
        raise DiffersError(f"{what}: shape {found.shape}, recorded {recorded.shape}{where}")
    first = _first_difference(found, recorded)
    if first is not None:
        place = tuple(int(i) for i in first)
        raise DiffersError(f"{what}: {found[place]} at {list(place)}, recorded {recorded[place]}")


def _first_difference(a: np.ndarray, b: np.ndarray) -> list[int] | None:
    places = np.argwhere(a != b)
    return [int(i) for i in places[0]] if len(places) else None


class Model:
    """A recorded model, opened once: its checkpoint, engine, tokenizer and codec.

    Args:
        directory: the model's folder in ESPnet's own layout (or a converted one beside its files).
        backend: ``pytorch`` or ``vllm``.
        compare_logits: keep raw logits and compare them.
        options: of the engine.
    """

    def __init__(
        self, directory: pathlib.Path, backend: str, *, compare_logits: bool = False, dtype: str = "float32", **options
    ) -> None:
        if backend == "pytorch":
            torch.set_num_threads(1)  # as when the cases were recorded; models so small are slower with more
        self.directory, self.backend, self.compare_logits, self.dtype = directory, backend, compare_logits, dtype
        self.checkpoint = ensure_converted(directory)
        self.layout = self.checkpoint.layout
        self.tokenizer = TextTokenizer(self.checkpoint.tokenizer_dir, clean_up=True)  # as transformers 4 did
        self.engine = make_engine(backend, self.checkpoint, dtype, keep_logits=compare_logits, **options)

    @functools.cached_property
    def codec(self):
        assert self.checkpoint.codec is not None, f"{self.directory}: the checkpoint names no codec"
        return load_codec(self.checkpoint.codec, base_dir=self.checkpoint.codec_base)

    @functools.cached_property
    def tower(self):
        return AudioTower(self.checkpoint, dtype=self.dtype)

    def decode(self, item, config, *, seed: int, nbest: int = 1) -> Result:
        """One utterance, or (key, error) of one that could not be read, through ``backends.decode``.

        Raises:
            RefusedError, DiffersError: if it was refused.
        """
        (result,) = decode(self.engine, [item], config, seed=seed, nbest=nbest)
        if result.outcome == REFUSED:
            guided = any(block is not None and block.guided for block in (config.text, config.audio))
            if guided and "guidance" in result.reason and self.backend != "pytorch":
                raise RefusedError(GUIDANCE)
            raise DiffersError(f"refused: {result.reason}")
        return result


def replay(model: Model, path: pathlib.Path) -> Verdict:
    """Replays one case (its json file)."""
    if model.layout.family == "bagpiper":
        from golden_bagpiper import check_bagpiper as check
    else:
        from golden_opuslm import check_opuslm as check
    case, comparison = Case.load(path), Comparison()
    try:
        check(model, case, comparison)
    except RefusedError as refusal:
        return Verdict(case.name, str(refusal), logits=comparison.logits)
    except DiffersError as difference:
        return Verdict(case.name, DIFFERS, str(difference), comparison.logits)
    except SpeechLMError as error:
        return Verdict(case.name, DIFFERS, f"{type(error).__name__}: {error}", comparison.logits)
    return Verdict(case.name, EXACT, ", ".join(comparison.notes), comparison.logits)


def case_files(directory: pathlib.Path, pattern: str = "*") -> list[pathlib.Path]:
    """Json files of the cases in ``directory`` whose name matches ``pattern`` (or holds it)."""
    return sorted(
        path
        for path in directory.glob("*.json")
        if (path.match(f"{pattern}.json") or pattern in path.stem) and path.with_suffix(".npz").is_file()
    )


def summary(verdicts: list[Verdict]) -> str:
    """The last line of a replay."""
    exact, refused = (sum(v.verdict == kind for v in verdicts) for kind in (EXACT, GUIDANCE))
    compared = sum(v.verdict in (EXACT, DIFFERS) for v in verdicts)
    logits = [v.logits for v in verdicts if v.logits is not None]
    worst = f"{max(logits):.2g}" if logits else "not compared"
    return f"{exact} of {compared} exact, {refused} refused (guidance), worst logit difference {worst}"
