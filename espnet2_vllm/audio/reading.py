"""Reading recordings the way Kaldi names them: a file, a place in an ark, or a command that writes one.

Everything comes back as float32 in [-1, 1), whatever the file holds. (ESPnet's ``kaldi_audio`` reader hands on the
int16 values of wav arks as they are; continuous encoders normalise the difference away, codecs refuse integers.)
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from espnet2_vllm.audio.containers import UNKNOWN_LENGTH, Sound, View, examine, flac_samples
from espnet2_vllm.audio.resampling import resample
from espnet2_vllm.errors import ConfigError, DataError

log = logging.getLogger(__name__)

# Where names that end in | are run: in Kaldi files and manifests, in conversations too, or nowhere.
COMMANDS = ("scp", "allow", "refuse")
# kaldiio would also read matrices, numpy files and pickles (which run code) from an ark; recordings begin like this.
_ARK_AUDIO = (b"RIFF", b"fLaC", b"AUDIO")
_MOST_DIGITS = 19  # of a place in a file
_SHOWN = 300  # characters of a name
_CHANNELS = "recordings of {} channels, of which the first was taken"
FIRST = "first"
Span = Callable[[int], tuple[int, int | None]]


@dataclass(frozen=True)
class Reading:
    """How recordings are read, and what they may cost.

    Attributes:
        commands: whether a name that ends in ``|`` is run by the shell: in Kaldi files and manifests (``scp``), in conversations
            too (``allow``), or nowhere (``refuse``).
        command_seconds: that a command may take.
        command_megabytes: that it may write.
        max_audio_samples: of a recording that are kept, at most.
        channel: the one that is kept, from 0, or ``first``, which is noted where there are others; None is all of them.
        enough: samples of a recording behind which it is not read on; None is all.
        notes: counts recordings of which not everything was taken.
    """

    commands: str = "scp"
    command_seconds: float = 600.0
    command_megabytes: float = 2048.0
    max_audio_samples: int = 2**27
    channel: int | str | None = None
    enough: int | None = None
    notes: Counter[str] = field(default_factory=Counter, compare=False)

    def of_conversations(self) -> Reading:
        """How what a conversation names is read: messages may come from anybody."""
        return self if self.commands == "allow" else replace(self, commands="refuse")


def reading_of(commands: str, **settings: object) -> Reading:
    """A ``Reading`` of what somebody has chosen; None is the default. ConfigError for what cannot be meant."""
    if commands not in COMMANDS:
        raise ConfigError(f"commands {commands!r} is unknown; expected one of {', '.join(COMMANDS)}")
    chosen = {name: value for name, value in settings.items() if value is not None}
    for name, value in chosen.items():
        if name not in ("notes", "channel") and not (isinstance(value, int | float) and value > 0):
            raise ConfigError(f"{name} {value!r}: expected a number above 0")
    return Reading(commands, **chosen)


def read_audio(
    spec: str,
    *,
    base_dir: str | os.PathLike | None = None,
    reading: Reading | None = None,
    span: Span | None = None,
) -> tuple[np.ndarray, int]:
    """Read the recording ``spec`` names -> ([channels, n] float32, sample rate in Hz).

    spec: a path (wav, flac, mp3, ogg, sph: what libsndfile reads); ``file.ark:offset`` (wav, flac or AUDIO entry);
    ``command |`` (run by the shell, its standard output read as an audio file). A relative path is looked up under
    ``base_dir`` first, then under the working directory; a command runs in ``base_dir``.

    Args:
        reading: whether commands are run, limits, and what is kept in memory; None is ``Reading()``.
        span: of a sampling rate, the first sample that is wanted and the one behind the last (None: to the end). There may be none.

    Raises:
        DataError: naming the spec: missing, unreadable, cut short, without samples, NaN or infinite samples, beyond a limit, or a
            command that fails or is not allowed.
    """
    text, reading = spec.strip(), reading or Reading()
    if not text:
        raise DataError("a recording without a name; expected a path, file.ark:offset, or a command that ends in |")
    with _opened(text, base_dir, reading) as (file, name, look):
        return _decode(look(file, name), name, reading, span)


def read_audio_bytes(
    data: bytes,
    name: str,
    *,
    reading: Reading | None = None,
    span: Span | None = None,
) -> tuple[np.ndarray, int]:
    """An audio file in memory -> ([channels, n] float32, sample rate in Hz). ``name`` is for messages; else as ``read_audio``."""
    return _decode(examine(View(io.BytesIO(data)), name), name, reading or Reading(), span)


def _decode(sound: Sound, name: str, reading: Reading, span: Span | None) -> tuple[np.ndarray, int]:
    from espnet2_vllm.audio.blocks import EARLY, Wanted, decode

    def told(problem: str) -> None:
        log.warning("%s: seems to end in the middle (%s); what is there is taken", name, problem)
        reading.notes[EARLY] += 1

    first = reading.channel == FIRST
    wanted = Wanted(
        0 if first else reading.channel, span or (lambda _: (0, None)), reading.enough, reading.max_audio_samples
    )
    wav, rate, channels = decode(sound, name, wanted, told)
    if first and channels > 1:
        reading.notes[_CHANNELS.format(channels)] += 1
    if wav.shape[1] == 0 and span is None:
        raise DataError(f"{name}: the recording has no samples")
    return wav, rate


def first_channel(wav: np.ndarray) -> np.ndarray:
    """[channels, n] -> [n], the channel that ESPnet's encoders take."""
    assert wav.ndim == 2, f"expected [channels, n], got shape {wav.shape}"
    return wav[0]


def mono_at(wav: np.ndarray, rate: int, target: int, notes: Counter[str] | None = None) -> np.ndarray:
    """[n] or [channels, n] samples at ``rate`` -> [m] float32 at ``target`` Hz: first channel, resampled.

    ``notes`` counts the recordings of several channels and of other rates.
    """
    if wav.ndim == 2:
        if notes is not None and wav.shape[0] > 1:
            notes[_CHANNELS.format(wav.shape[0])] += 1
        wav = first_channel(wav)
    if notes is not None and rate != target:
        notes[f"recordings resampled from {rate} to {target} Hz"] += 1
    return resample(wav.astype(np.float32, copy=False), rate, target)


# -- what a name means -------------------------------------------------------------------------------------------------
_Look = Callable[[BinaryIO, str], Sound]


@contextlib.contextmanager
def _opened(text: str, base_dir: str | os.PathLike | None, reading: Reading) -> Iterator[tuple[BinaryIO, str, _Look]]:
    """The file that is meant, its name for messages, and what finds the sound in it."""
    if text.endswith("|"):
        with output_of_command(text[:-1].strip(), base_dir, reading) as file:
            yield file, text, lambda file, name: examine(View(file), name)
        return
    path, offset = find_recording(text, base_dir)
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: cannot be opened: {error.strerror}") from error
    with file:
        if offset is None:
            yield file, text, lambda file, name: examine(View(file), name)
        else:
            yield file, text, lambda file, name: _examine_entry(file, offset, name)


def find_recording(text: str, base_dir: str | os.PathLike | None) -> tuple[Path, int | None]:
    """The file of a name that is no command, and the place of an ark's entry in it. DataError if there is none."""
    path = _existing(text, base_dir)
    if path is not None:
        return path, None
    name, offset = split_place(text)
    if offset is not None:
        path = _existing(name, base_dir)
        if path is not None:
            return path, offset
    if len(text) > _SHOWN:
        raise DataError(f"{text[:_SHOWN]}...: no such file; the name has {len(text)} characters")
    places = [Path(text)] if base_dir is None else [Path(base_dir) / text, Path(text)]
    raise DataError(f"{text}: no such file; looked at {' and '.join(dict.fromkeys(str(p.absolute()) for p in places))}")


def split_place(text: str) -> tuple[str, int | None]:
    """``file.ark:offset`` -> name and place; (text, None) for a name without a place in a file."""
    name, colon, digits = text.rpartition(":")
    if colon and digits.isdecimal() and digits.isascii() and len(digits) <= _MOST_DIGITS:
        return name, int(digits)
    return text, None


def _existing(name: str, base_dir: str | os.PathLike | None) -> Path | None:
    for path in [Path(name)] if base_dir is None else [Path(base_dir) / name, Path(name)]:
        if os.path.isfile(path):  # Path.is_file raises for a name that is too long
            return path
    return None


def output_of_command(command: str, base_dir: str | os.PathLike | None, reading: Reading) -> BinaryIO:
    """What a command writes, to be closed. DataError if it is not allowed, or as ``commands.output_of``."""
    from espnet2_vllm.audio.commands import output_of

    if not command:
        raise DataError("the name of a recording is '|' with no command before it")
    if reading.commands == "refuse":
        raise DataError(
            f"{command} |: is a command, which is not run here; name a file, or set commands to allow where the data are of "
            "somebody whom you trust"
        )
    return output_of(command, base_dir, seconds=reading.command_seconds, megabytes=reading.command_megabytes)


def _examine_entry(file: BinaryIO, offset: int, name: str) -> Sound:
    """The recording that begins at byte ``offset`` of an ark."""
    size = file.seek(0, os.SEEK_END)
    if offset >= size:
        raise DataError(f"{name}: offset {offset} lies behind the end of the ark ({size} bytes); is the ark cut short?")
    entry = View(file, offset)
    start = entry.at(0, 8)
    if not start.startswith(_ARK_AUDIO):
        raise DataError(
            f"{name}: no recording begins at this offset (found {start[:5]!r}, expected wav, flac or AUDIO)"
        )
    if start.startswith(b"AUDIO"):
        return examine(_audio_entry(entry, name), name)
    if start.startswith(b"RIFF"):
        length = int.from_bytes(start[4:], "little")
        if not 0 < length < UNKNOWN_LENGTH:
            raise DataError(
                f"{name}: the wav in the ark does not say how long it is, so its end cannot be told from the entry behind it; "
                "write the ark anew from files of known length"
            )
        return examine(entry.part(0, 8 + length), name)
    if not flac_samples(entry, 0):
        raise DataError(f"{name}: the flac in the ark does not say how long it is; write the ark anew")
    return examine(entry, name)


def _audio_entry(entry: View, name: str) -> View:
    """Behind the word AUDIO stand a byte w, then w bytes of length, then an audio file of that length."""
    width = entry.at(5, 1)
    length = int.from_bytes(entry.at(6, width[0]), "little") if width else 0
    begin = 6 + (width[0] if width else 0)
    left = entry.size - begin
    if left < length or length == 0:
        raise DataError(f"{name}: the ark is cut short, {max(0, left)} of {length} bytes of the recording are there")
    return entry.part(begin, begin + length)


def as_float(samples: np.ndarray, name: str) -> np.ndarray:
    """Samples as a file holds them -> float32 in [-1, 1), by the scale that libsndfile uses. DataError for other types."""
    if samples.dtype.kind == "f":
        return samples.astype(np.float32)
    if samples.dtype == np.uint8:
        return (samples.astype(np.float32) - 128.0) / 128.0
    if samples.dtype == np.int16:
        return samples.astype(np.float32) / 32768.0
    if samples.dtype == np.int32:
        return (samples / 2.0**31).astype(np.float32)
    raise DataError(f"{name}: samples of type {samples.dtype} cannot be read; expected 8, 16 or 32 bit, or floats")
