"""Naturalness of generated speech: UTMOS of every wav of a directory or wav.scp, by the VERSA toolkit where it is installed.

A file that cannot be read, and an id of ``--keys`` that has none, is counted and named.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from espnet2_vllm.bin.options import add, add_reading_options, reading_options
from espnet2_vllm.bin.utf8 import insist_on_utf8
from espnet2_vllm.errors import ConfigError, DataError, SpeechLMError, complain
from espnet2_vllm.io.files import whole_file
from espnet2_vllm.io.items import item
from espnet2_vllm.io.keyed import read_keyed

if TYPE_CHECKING:
    from espnet2_vllm.audio import Reading

RATE = 16000
_NAMED = 20


def load_utmos() -> Callable[[np.ndarray], float]:
    """UTMOS of [n] float32 samples at 16 kHz. ConfigError if VERSA is not installed."""
    try:
        from versa.utterance_metrics.pseudo_mos import pseudo_mos_metric, pseudo_mos_setup
    except ImportError as error:
        raise ConfigError(
            f"UTMOS needs the VERSA toolkit, which is not installed here ({error}); see https://github.com/wavlab-speech/versa"
        ) from error
    predictors, rates = pseudo_mos_setup(["utmos"], {"utmos": {"fs": RATE}})
    return lambda wav: float(pseudo_mos_metric(wav, RATE, predictors, rates)["utmos"])


def wavs_of(path: Path) -> dict[str, str]:
    """Recordings by id: of a ``wav.scp``, or the wav files below a directory. DataError if there are none."""
    found = {p.stem: str(p) for p in sorted(path.rglob("*.wav"))} if path.is_dir() else read_keyed(path)
    if not found:
        raise DataError(f"{path}: no recordings")
    return found


def score(
    wavs: Mapping[str, str], utmos: Callable[[np.ndarray], float], reading: Reading | None = None
) -> tuple[dict[str, float], dict[str, str]]:
    """UTMOS by id, and why others have none."""
    from espnet2_vllm.audio import mono_at, read_audio

    scores, failures = {}, {}
    for key, spec in wavs.items():
        try:
            with item():
                scores[key] = utmos(mono_at(*read_audio(spec, reading=reading), RATE))
        except DataError as error:
            failures[key] = str(error)
    return scores, failures


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="score_speech", description=__doc__)
    parser.add_argument("--wavs", type=Path, required=True, help="directory of wav files, or wav.scp")
    parser.add_argument("--keys", type=Path, help="file whose lines begin with the ids that should be there")
    parser.add_argument("--output", type=Path, help="scores as json")
    add_reading_options(functools.partial(add, parser))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 if everything was scored, 1 if not, 2 where VERSA is missing."""
    args = get_parser().parse_args(argv)
    try:
        wavs = wavs_of(args.wavs)
        scores, failures = score(wavs, load_utmos(), reading_options(args))
        failures |= {key: "no recording" for key in (read_keyed(args.keys) if args.keys else ()) if key not in wavs}
        if args.output:
            with whole_file(args.output) as file:
                json.dump({"utmos": scores, "failures": failures}, file, indent=4, ensure_ascii=False)
    except (SpeechLMError, OSError) as error:
        return complain("score_speech", error)
    for key in [*failures][:_NAMED]:
        print(f"score_speech: {key}: {failures[key]}", file=sys.stderr)
    mean = f"{np.mean(list(scores.values())):.3f}" if scores else "none"
    print(f"{args.wavs}: UTMOS {mean} over {len(scores)} recordings, {len(failures)} without a score")
    return 1 if failures else 0


if __name__ == "__main__":
    insist_on_utf8()
    sys.exit(main())
