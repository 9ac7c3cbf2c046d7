"""Make plain wav files from a Kaldi data directory: any format, ark, pipe or segment in, mono PCM_16 at one rate out.

ESPnet's ``format_wav_scp.sh`` for what the decoders here read. Other files of the directory are copied.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from espnet2_vllm.bin.utf8 import insist_on_utf8
from espnet2_vllm.errors import ConfigError, DataError, SpeechLMError, complain
from espnet2_vllm.io.files import check_another_folder
from espnet2_vllm.io.keyed import read_keyed, write_keyed
from espnet2_vllm.io.names import safe_file_name

COPIED = ("text", "utt2spk", "answer")


Piece = tuple[str, float, float | None]  # a recording's specification, start and end in seconds; the end may be open


def pieces(data_dir: Path, name: str = "wav.scp") -> Iterator[tuple[str, Piece | DataError]]:
    """Every utterance of a file of recordings; a DataError stands for a line of ``segments`` that cannot be used.

    ``segments`` are of ``wav.scp`` alone.
    """
    recordings = read_keyed(data_dir / name)
    if not recordings:
        raise DataError(f"{data_dir / name}: 0 recordings; expected at least one line")
    segments = data_dir / "segments"
    if name != "wav.scp" or not segments.is_file():
        yield from ((key, (spec, 0.0, None)) for key, spec in recordings.items())
        return
    for key, line in read_keyed(segments).items():
        try:
            yield key, _segment(line, recordings)
        except DataError as error:
            yield key, DataError(f"{segments}: {error}")


def _segment(line: str, recordings: Mapping[str, str]) -> Piece:
    """What stands behind the utterance in a line of ``segments``. Raises DataError."""
    fields = line.split()
    try:
        recording, start, end = fields[0], float(fields[1]), float(fields[2])
    except (IndexError, ValueError) as error:
        raise DataError(f"expected 'utterance recording start end', got {line!r}") from error
    if recording not in recordings:
        raise DataError(f"recording {recording!r} is not in wav.scp")
    if not 0 <= start < end < math.inf:
        raise DataError(f"times {start} to {end} s are reversed, negative or endless")
    return recordings[recording], start, end


def format_piece(
    key: str, spec: str, start: float, end: float | None, rate: int, output: Path, notes: Counter[str]
) -> None:
    """Read, cut, resample and write one utterance; ``notes`` counts what was done to it. Raises DataError."""
    from espnet2_vllm.audio import mono_at, read_audio, write_wav

    wav, own_rate = read_audio(spec)
    wav = wav[:, round(start * own_rate) : None if end is None else round(end * own_rate)]
    if not wav.shape[1]:
        raise DataError(f"{key}: {start} to {end} s lies outside of the recording {spec}")
    if write_wav(output, mono_at(wav, own_rate, rate, notes), rate):
        notes["recordings louder than full scale, which were clipped"] += 1


def format_directory(
    data_dir: Path, output_dir: Path, rate: int, notes: Counter[str] | None = None, name: str = "wav.scp"
) -> tuple[int, list[str]]:
    """Format every utterance of a file; returns how many were written and a message for each that was not."""
    notes = Counter() if notes is None else notes
    written: dict[str, str] = {}
    failures = []
    for key, piece in pieces(data_dir, name):
        output = output_dir / Path(name).stem / safe_file_name(key, ".wav")
        try:
            if isinstance(piece, DataError):
                raise piece
            format_piece(key, *piece, rate, output, notes)
        except DataError as error:
            failures.append(f"{key}: {error}")
            continue
        written[key] = str(output)
    write_keyed(output_dir / name, written)
    for other in COPIED:
        if (data_dir / other).is_file():
            shutil.copyfile(data_dir / other, output_dir / other)
    return len(written), failures


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="format_audio", description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True, help="with wav.scp, and segments if it has them")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--name", nargs="+", default=["wav.scp"], help="files of recordings, such as mix.scp")
    parser.add_argument("--fs", type=int, default=16000, help="sample rate in Hz")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 if every utterance was written, 1 if not, 2 for options that cannot be used."""
    args = get_parser().parse_args(argv)
    try:
        check_another_folder(args.output_dir, args.data_dir)
        if args.fs < 1:
            raise ConfigError(f"--fs must be a sample rate in Hz, not {args.fs}")
        notes: Counter[str] = Counter()
        written, failures = 0, []
        for name in args.name:
            count, failed = format_directory(args.data_dir, args.output_dir, args.fs, notes, name)
            written += count
            failures += failed
    except (SpeechLMError, OSError) as error:
        return complain("format_audio", error)
    for note, count in sorted(notes.items()):
        print(f"format_audio: {count} {note}", file=sys.stderr)
    for message in failures:
        print(f"format_audio: {message}", file=sys.stderr)
    print(f"{args.output_dir}: {written} of {written + len(failures)} utterances written at {args.fs} Hz")
    return 1 if failures else 0


if __name__ == "__main__":
    insist_on_utf8()
    sys.exit(main())
