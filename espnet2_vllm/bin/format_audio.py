"""Make plain wav files from a Kaldi data directory: any format, ark, pipe or segment in, mono PCM_16 at one rate out.

ESPnet's ``format_wav_scp.sh`` for what the decoders here read. Other files of the directory are copied.
"""

from __future__ import annotations

import argparse
import functools
import math
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from espnet2_vllm.bin.options import add, add_reading_options, reading_options
from espnet2_vllm.bin.utf8 import insist_on_utf8
from espnet2_vllm.errors import ConfigError, DataError, SpeechLMError, complain
from espnet2_vllm.io.files import check_another_folder
from espnet2_vllm.io.items import item
from espnet2_vllm.io.keyed import read_keyed, write_keyed
from espnet2_vllm.io.names import safe_file_name

if TYPE_CHECKING:
    from espnet2_vllm.audio import Reading

COPIED = ("text", "utt2spk", "answer")


class Piece(NamedTuple):
    """A recording's specification, start and end in seconds (None: its end), and channel (None: the first, which is noted)."""

    spec: str
    start: float = 0.0
    end: float | None = None
    channel: int | None = None


def pieces(data_dir: Path, name: str = "wav.scp") -> Iterator[tuple[str, Piece | DataError]]:
    """Every utterance of a file of recordings; a DataError stands for a line of ``segments`` that cannot be used.

    ``segments`` are of ``wav.scp`` alone.
    """
    faults: dict[str, DataError] = {}
    recordings = read_keyed(data_dir / name, faults)
    if not recordings:
        raise DataError(f"{data_dir / name}: 0 recordings; expected at least one line")
    segments = data_dir / "segments"
    if name != "wav.scp" or not segments.is_file():
        yield from ((key, Piece(spec)) for key, spec in recordings.items())
        yield from faults.items()
        return
    faults.clear()
    for key, line in read_keyed(segments, faults).items():
        try:
            yield key, _segment(line, recordings)
        except DataError as error:
            yield key, DataError(f"{segments}: {error}")
    yield from faults.items()


def _segment(line: str, recordings: Mapping[str, str]) -> Piece:
    """What stands behind the utterance in a line of ``segments``, as Kaldi's extract-segments reads it. Raises DataError."""
    fields = line.split()
    try:
        recording, start, end = fields[0], float(fields[1]), float(fields[2])
        channel = int(fields[3]) if len(fields) > 3 else None
    except (IndexError, ValueError) as error:
        raise DataError(f"expected 'utterance recording start end [channel]', got {line!r}") from error
    if len(fields) > 4 or (channel is not None and channel < 0):
        raise DataError(f"expected 'utterance recording start end [channel]', the channel from 0, got {line!r}")
    if recording not in recordings:
        raise DataError(f"recording {recording!r} is not in wav.scp")
    if end == -1 and 0 <= start < math.inf:
        return Piece(recordings[recording], start, None, channel)
    if not 0 <= start < end < math.inf:
        raise DataError(
            f"times {start} to {end} s are reversed, negative or endless; an end of -1 is that of the recording"
        )
    return Piece(recordings[recording], start, end, channel)


def format_piece(piece: Piece, rate: int, output: Path, reading: Reading) -> None:
    """Read, cut, resample and write one utterance; the reading's notes count what was done to it. Raises DataError."""
    from espnet2_vllm.audio import mono_at, read_audio, write_wav

    spec, start, end, channel = piece

    def span(rate: int) -> tuple[int, int | None]:
        return round(start * rate), None if end is None else round(end * rate)

    own = reading if channel is None else replace(reading, channel=channel)
    wav, own_rate = read_audio(spec, reading=own, span=span if start or end is not None else None)
    if not wav.shape[1]:
        raise DataError(f"{start} to {'its end' if end is None else end} s lies outside of the recording {spec}")
    if write_wav(output, mono_at(wav, own_rate, rate, reading.notes), rate):
        reading.notes["recordings louder than full scale, which were clipped"] += 1


def format_directory(
    data_dir: Path, output_dir: Path, rate: int, reading: Reading | None = None, name: str = "wav.scp"
) -> tuple[int, list[str]]:
    """Format every utterance of a file; returns how many were written and a message for each that was not."""
    from espnet2_vllm.audio.reading import FIRST, Reading

    reading = reading or Reading(channel=FIRST)
    written: dict[str, str] = {}
    failures = []
    for key, piece in pieces(data_dir, name):
        output = output_dir / Path(name).stem / safe_file_name(key, ".wav")
        try:
            if isinstance(piece, DataError):
                raise piece
            with item():
                format_piece(piece, rate, output, reading)
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
    add_reading_options(functools.partial(add, parser))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 if every utterance was written, 1 if not, 2 for options that cannot be used."""
    args = get_parser().parse_args(argv)
    try:
        check_another_folder(args.output_dir, args.data_dir)
        if args.fs < 1:
            raise ConfigError(f"--fs must be a sample rate in Hz, not {args.fs}")
        notes: Counter[str] = Counter()
        reading = reading_options(args, notes)
        written, failures = 0, []
        for name in args.name:
            count, failed = format_directory(args.data_dir, args.output_dir, args.fs, reading, name)
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
