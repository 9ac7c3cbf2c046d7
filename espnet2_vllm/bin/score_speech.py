"""Generated speech: UTMOS of every wav of a directory or wav.scp, by the VERSA toolkit where it is installed, or, with --asr, its
word error rate, by a recogniser of transformers.

A file that cannot be read, and an id of ``--keys`` that has none, is counted and named.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


def load_recogniser(model: str) -> Callable[[np.ndarray], str]:
    """Words of [n] float32 samples at 16 kHz, by a model of transformers (Whisper, wav2vec 2.0): a folder, or a tag of the hub.

    Raises:
        ConfigError: if there is no such model, or it does not recognise speech.
    """
    try:
        from transformers import pipeline

        recognise = pipeline("automatic-speech-recognition", model=model, trust_remote_code=False)
    except (ImportError, OSError, KeyError, ValueError, RuntimeError) as error:
        raise ConfigError(f"--asr {model}: transformers has no recogniser there: {str(error)[:400]}") from error
    if recognise.feature_extractor.sampling_rate != RATE:
        raise ConfigError(f"--asr {model}: hears {recognise.feature_extractor.sampling_rate} Hz; expected {RATE} Hz")
    return lambda wav: str(recognise({"raw": wav, "sampling_rate": RATE})["text"])


def wavs_of(path: Path) -> dict[str, str]:
    """Recordings by id: of a ``wav.scp``, or the wav files below a directory. DataError if there are none."""
    found = {p.stem: str(p) for p in sorted(path.rglob("*.wav"))} if path.is_dir() else read_keyed(path)
    if not found:
        raise DataError(f"{path}: no recordings")
    return found


def score(
    wavs: Mapping[str, str], judge: Callable[[np.ndarray], Any], reading: Reading | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """What ``judge`` says of each recording, by id, and why others have nothing."""
    from espnet2_vllm.audio import mono_at, read_audio

    scores, failures = {}, {}
    for key, spec in wavs.items():
        try:
            with item():
                scores[key] = judge(mono_at(*read_audio(spec, reading=reading), RATE))
        except DataError as error:
            failures[key] = str(error)
    return scores, failures


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="score_speech", description=__doc__)
    parser.add_argument("--wavs", type=Path, required=True, help="directory of wav files, or wav.scp")
    parser.add_argument("--keys", type=Path, help="file whose lines begin with the ids that should be there")
    parser.add_argument("--output", type=Path, help="scores as json")
    asr_help = (
        "recogniser of transformers: folder, or tag of the hub. Word error rates against --ref, in place of UTMOS"
    )
    parser.add_argument("--asr", metavar="MODEL", help=asr_help)
    parser.add_argument("--ref", type=Path, help="with --asr: what was to be said, a line each: id words")
    add_reading_options(functools.partial(add, parser))
    return parser


def _error_rates(args: argparse.Namespace) -> int:
    """Recognises every recording and compares; the exit code."""
    from espnet2_vllm.bin import score_text

    if not (args.asr and args.ref):
        raise ConfigError("--asr and --ref belong together: a recogniser, and what was to be said")
    references = read_keyed(args.ref)
    texts, failures = score(wavs_of(args.wavs), load_recogniser(args.asr), reading_options(args))
    # Recordings are named <task>_<id>_sample<k> in trees of OpusLM, <id>_segment<k> in those of Bagpiper.
    names = {_utterance_of(key, references): text for key, text in texts.items()}
    scores = score_text.score(score_text.Set(args.ref.parent, references, names))
    if args.output:
        with whole_file(args.output) as file:
            json.dump(scores | {"texts": names, "failures": failures}, file, indent=4, ensure_ascii=False)
    for key in [*failures][:_NAMED]:
        print(f"score_speech: {key}: {failures[key]}", file=sys.stderr)
    lost = scores["without_result"]
    if lost:
        print(f"score_speech: {len(lost)} without a recording: {', '.join(lost[:_NAMED])}", file=sys.stderr)
    print(
        f"{args.wavs}: WER {100 * scores['wer']:.2f} %, CER {100 * scores['cer']:.2f} % over {scores['utterances']} references, "
        f"as {args.asr} hears {len(texts)} recordings"
    )
    return 1 if failures or lost else 0


def _utterance_of(key: str, references: Mapping[str, str]) -> str:
    """The id that a recording's name belongs to."""
    if key in references:
        return key
    bare = re.sub(r"_(sample|segment)\d+$", "", key)
    found = [uid for uid in references if bare == uid or bare.endswith(f"_{uid}")]
    return max(found, key=len, default=key)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 if everything was scored, 1 if not, 2 where VERSA is missing."""
    args = get_parser().parse_args(argv)
    try:
        if args.asr or args.ref:
            return _error_rates(args)
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
