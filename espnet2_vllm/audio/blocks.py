"""Sound files in blocks, through libsndfile: what is not wanted is never kept, and no header is believed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import soundfile

from ..errors import DataError
from .containers import Sound, View

_BLOCK = 2**19  # values that are decoded at a time
_KNOWN = 2**60  # libsndfile says more samples than this where it does not know
# An mp3 declares whole MPEG frames (1152 samples), of which decoders drop the delay and the padding at both ends.
_MP3_SLACK = 2 * 1152
# Encodings in which a sample is found without decoding those before it.
_SEEKABLE = ("PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW")

EARLY = "recordings seem to end in the middle; what is there was taken"


@dataclass(frozen=True)
class Wanted:
    """What of a recording is kept.

    Attributes:
        channel: from 0; None is all of them.
        span: of a sampling rate the first sample and the one behind the last (None: to the end).
        stop: samples behind the first one that are enough; None is all.
        most: values that may be kept.
    """

    channel: int | None = None
    span: Callable[[int], tuple[int, int | None]] = lambda _: (0, None)
    stop: int | None = None
    most: int = 2**27


@dataclass
class _Kept:
    """The samples so far. ``first`` to ``last`` of the recording are wanted."""

    name: str
    wanted: Wanted
    rate: int
    channels: int
    first: int = 0
    last: int | None = None
    read: int = 0
    blocks: list[np.ndarray] = field(default_factory=list)
    samples: int = 0
    bad: int = 0

    @property
    def width(self) -> int:
        return self.channels if self.wanted.channel is None else 1

    @property
    def complete(self) -> bool:
        return self.last is not None and self.read >= self.last

    def check_size(self, samples: int) -> None:
        if samples * self.width > self.wanted.most:
            channels = "" if self.width == 1 else f" of {self.width} channels"
            raise DataError(
                f"{self.name}: {samples} samples{channels} or more ({samples / self.rate:.0f} s at {self.rate} Hz), beyond the "
                f"{self.wanted.most} that max_audio_samples allows; cut it into segments, or raise max_audio_samples"
            )

    def add(self, block: np.ndarray) -> None:
        """[n, channels] float32, the next samples of the recording."""
        begin, end = self.first - self.read, len(block)
        if self.last is not None:
            end = min(end, self.last - self.read)
        self.read += len(block)
        part = block[max(0, begin) : max(0, end)]
        if not len(part):
            return
        part = part if self.wanted.channel is None else part[:, self.wanted.channel : self.wanted.channel + 1]
        self.samples += len(part)
        self.check_size(self.samples)
        self.bad += int((~np.isfinite(part)).sum())
        self.blocks.append(np.array(part, order="C"))

    def whole(self) -> np.ndarray:
        """[channels, n]; the blocks are given up on the way."""
        found = np.empty((self.width, self.samples), np.float32)
        place = 0
        for index, block in enumerate(self.blocks):
            found[:, place : place + len(block)] = block.T
            place += len(block)
            self.blocks[index] = None
        return found


class _InOrder(soundfile.SoundFile):
    """A file that is read from its beginning to its end. soundfile would seek behind each block, which breaks some formats."""

    def seekable(self) -> bool:
        return False


def decode(sound: Sound, name: str, wanted: Wanted, told: Callable[[str], None]) -> tuple[np.ndarray, int, int]:
    """The wanted samples ([channels, n] float32), the sampling rate, and how many channels there are.

    Args:
        told: hears of a recording that is not whole, where its format makes no promise that it is.

    Raises:
        DataError: for what libsndfile cannot decode, and a recording that its own header says is longer, if its end is reached.
    """
    kept: _Kept | None = None
    early = sound.ends_early
    for number, part in enumerate(sound.parts):
        try:
            kept, problem = _decode_part(part, name, wanted, kept, sound)
        except soundfile.LibsndfileError as error:
            if kept is not None and early and part is sound.parts[-1]:
                break  # not even the headers of what was cut are whole
            where = f"{name}, part {number + 1}" if len(sound.parts) > 1 else name
            raise DataError(
                f"{where}: no audio that libsndfile reads, or cut short: {error.error_string} What ffmpeg reads can be named as "
                "`ffmpeg -i ... -f wav - |`"
            ) from error
        early = early or problem
        if kept.complete:
            break
    assert kept is not None
    if not kept.complete:
        if sound.cut:
            raise DataError(f"{name}: {sound.cut}")
        if early:
            told(early)
    if kept.bad:
        raise DataError(f"{name}: {kept.bad} samples are NaN or infinite")
    return kept.whole(), kept.rate, kept.channels


def _decode_part(part: View, name: str, wanted: Wanted, kept: _Kept | None, sound: Sound) -> tuple[_Kept, str]:
    """Reads on into ``kept``; why the part seems to end early."""
    before = (0, 0, 0, 0) if kept is None else (kept.read, len(kept.blocks), kept.samples, kept.bad)
    unknown = False
    part.seek(0)
    try:
        with _InOrder(part) as audio:
            kept = _fitting(audio, name, wanted, kept)
            unknown = audio.format == "FLAC" and audio.frames >= _KNOWN
            _read(audio, kept, sound)
            return kept, ""
    except soundfile.LibsndfileError:
        if not unknown:
            raise
    # libFLAC finds fault with the last frame; not told where the file ends, it gives all that are whole.
    kept.read, blocks, kept.samples, kept.bad = before
    del kept.blocks[blocks:]
    with _InOrder(part.changed(endless=True)) as audio:
        _read(audio, kept, sound)
    return kept, f"damaged or cut short behind sample {kept.read}"


def _fitting(audio: soundfile.SoundFile, name: str, wanted: Wanted, kept: _Kept | None) -> _Kept:
    """``kept`` if the part goes on with the same rate, or a new one."""
    if kept is None:
        if wanted.channel is not None and wanted.channel >= audio.channels:
            raise DataError(f"{name}: has no channel {wanted.channel}: it has {audio.channels}, counted from 0")
        kept = _Kept(name, wanted, audio.samplerate, audio.channels, *wanted.span(audio.samplerate))
        if wanted.stop is not None:
            enough = kept.first + wanted.stop
            kept.last = enough if kept.last is None else min(kept.last, enough)
        if audio.frames < _KNOWN:
            end = audio.frames if kept.last is None else min(kept.last, audio.frames)
            kept.check_size(max(0, end - kept.first))
    elif (kept.rate, kept.width) != (audio.samplerate, audio.channels if wanted.channel is None else 1):
        raise DataError(
            f"{name}: its parts differ: {kept.rate} Hz with {kept.channels} channels, then {audio.samplerate} Hz with "
            f"{audio.channels}; make one recording of them, as by `ffmpeg -i ... -ar {kept.rate} -ac 1 -f wav - |`"
        )
    elif wanted.channel is not None and wanted.channel >= audio.channels:
        raise DataError(f"{name}: a part of it has no channel {wanted.channel}")
    return kept


def _read(audio: soundfile.SoundFile, kept: _Kept, sound: Sound) -> None:
    """All samples, or as many as are wanted. DataError if the file has fewer than it declares."""
    begun = kept.read
    if kept.first > kept.read and audio.subtype in _SEEKABLE and kept.first - kept.read <= audio.frames < _KNOWN:
        kept.read = begun + audio.seek(kept.first - kept.read)
    for block in _blocks(audio, audio.frames - (kept.read - begun)):
        kept.add(block)
        if kept.complete:
            return
    count = kept.read - begun
    declared = max(audio.frames if audio.frames < _KNOWN else 0, sound.declared)
    if count < declared - (_MP3_SLACK if audio.format == "MP3" else 0):
        raise DataError(f"{kept.name}: cut short, {count} of {declared} samples are there")


def _blocks(audio: soundfile.SoundFile, left: int) -> Iterator[np.ndarray]:
    """[n, channels] float32 each, of ``left`` samples: no more are asked for, since another entry may stand behind."""
    buffer = np.empty((max(1, _BLOCK // audio.channels), audio.channels), np.float32)
    while left > 0 and len(block := audio.read(out=buffer[:left])):
        left -= len(block)
        yield block
