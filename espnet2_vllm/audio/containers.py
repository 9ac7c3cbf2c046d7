"""What the bytes of a sound file say about it, where libsndfile does not look: its parts, its length, whether it was cut short."""

from __future__ import annotations

import io
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

from ..errors import DataError

# Programs that write wav into a pipe cannot know its length and put a huge one (sox 0x7ffff000, ffmpeg 0xffffffff).
UNKNOWN_LENGTH = 0x7FFF0000
_ENDLESS = 2**62
_OGG_BOS, _OGG_EOS = 2, 4
_SLACK = 4096  # bytes behind an mp3 that are tags or padding rather than another mp3
_FOREIGN = (
    (4, b"ftyp", "MPEG-4 (m4a, mp4, mov)"),
    (0, b"\x1a\x45\xdf\xa3", "Matroska or WebM"),
    (0, b"\x30\x26\xb2\x75", "Windows Media"),
    (0, b"#!AMR", "AMR"),
)


class View(io.RawIOBase):
    """A part of a file as a file.

    Args:
        patches: bytes by place within the part, which stand in for those of the file.
        endless: does not say how long it is; reading it ends where the part ends.
    """

    def __init__(
        self,
        file: BinaryIO,
        start: int = 0,
        stop: int | None = None,
        *,
        patches: Mapping[int, bytes] | None = None,
        endless: bool = False,
    ) -> None:
        size = file.seek(0, os.SEEK_END)
        self.file, self.start = file, start
        self.size = max(0, min(size, size if stop is None else stop) - start)
        self.patches, self.endless = dict(patches or {}), endless
        self._place, self._asked_for_end = 0, False

    def part(self, start: int, stop: int, **changes: object) -> View:
        """Bytes ``start`` to ``stop`` of this part."""
        return View(self.file, self.start + start, min(self.start + stop, self.start + self.size), **changes)

    def changed(self, **changes: object) -> View:
        """The same bytes, otherwise."""
        return self.part(0, self.size, **{"patches": self.patches, **changes})

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._asked_for_end = self.endless and whence == os.SEEK_END and offset == 0
        self._place = max(0, offset + (0, self._place, self.size)[whence])
        return self.tell()

    def tell(self) -> int:
        return _ENDLESS if self._asked_for_end else self._place

    def readinto(self, buffer: object) -> int:
        target = memoryview(buffer).cast("B")
        self._asked_for_end = False
        count = max(0, min(len(target), self.size - self._place))
        self.file.seek(self.start + self._place)
        count = self.file.readinto(target[:count]) or 0
        for place, data in self.patches.items():
            for at in range(max(place, self._place), min(place + len(data), self._place + count)):
                target[at - self._place] = data[at - place]
        self._place += count
        return count

    def at(self, place: int, count: int) -> bytes:
        """Up to ``count`` bytes from ``place``."""
        self.seek(place)
        return self.read(count) or b""


@dataclass(frozen=True)
class Sound:
    """What is to be decoded, one part after the other.

    Attributes:
        declared: samples a channel that a header names and libsndfile does not compare; 0 where there is none.
        cut: why it is known that the file is not whole, though its header promises that; such a file is refused when its end is
            reached.
        ends_early: why it seems that the file is not whole, where the format makes no promise.
    """

    parts: tuple[View, ...]
    declared: int = 0
    cut: str = ""
    ends_early: str = ""


def examine(file: View, name: str) -> Sound:
    """Looks at the headers. DataError, naming ``name``, for an empty file and for what libsndfile cannot read at all."""
    start = file.at(0, 64)
    if not start:
        raise DataError(f"{name}: the file is empty")
    for place, mark, kind in _FOREIGN:
        if start[place:].startswith(mark):
            raise foreign(name, kind)
    if start.startswith((b"RIFF", b"RF64", b"BW64")):
        return _riff(file)
    if start.startswith(b"OggS"):
        return _ogg(file)
    if start.startswith(b"NIST_1A"):
        count = re.search(rb"^sample_count -i (\d{1,18})\s", file.at(0, 1024), re.MULTILINE)
        return Sound((file,), declared=int(count[1]) if count else 0)
    mpeg = _behind_id3(file)
    header = file.at(mpeg, 4)
    if header[:2] in (b"\xff\xf1", b"\xff\xf9"):
        raise foreign(name, "AAC")
    if len(header) == 4 and header[0] == 0xFF and header[1] & 0xE0 == 0xE0:
        return Sound(tuple(_mpeg(file, mpeg)))
    return Sound((file,))


def foreign(name: str, kind: str) -> DataError:
    """What to do about a file that libsndfile cannot read."""
    if name.rstrip().endswith("|"):
        advice = "have the command write wav (ffmpeg: `-f wav - |`)"
    else:
        advice = f"name it as `ffmpeg -i {name} -f wav - |` in the scp, or convert it to wav"
    return DataError(f"{name}: {kind}, which libsndfile cannot read; {advice}")


def flac_samples(file: View, start: int) -> int:
    """Samples a channel that the FLAC at byte ``start`` declares; 0 where it does not know."""
    header = file.at(start, 26)
    return int.from_bytes(header[18:26], "big") & (2**36 - 1) if len(header) == 26 else 0


def _riff(file: View) -> Sound:
    """Wav files, also those whose length was never filled in, or does not fit 32 bits."""
    riff_length = struct.unpack("<I", file.at(4, 4).ljust(4, b"\0"))[0]
    place, long = 12, None
    while len(header := file.at(place, 8)) == 8:
        chunk, length = struct.unpack("<4sI", header)
        left = file.size - place - 8
        if chunk == b"ds64":
            long = place + 16  # of the length of the samples, in 64 bits
        if chunk == b"data":
            if long is not None and length == 0xFFFFFFFF:
                length = int.from_bytes(file.at(long, 8), "little")
                if length in (0, 2**64 - 1) and left:
                    return Sound((file.changed(patches={long: left.to_bytes(8, "little")}),))
            elif length == 0 and left and riff_length != file.size - 8:
                patches = {4: struct.pack("<I", 0xFFFFFFFF), place + 4: struct.pack("<I", min(left, 0xFFFFFFFE))}
                return Sound((file.changed(patches=patches),))
            elif length >= UNKNOWN_LENGTH:
                return Sound((file,))
            cut = f"cut short, {left} of {length} bytes of samples are there" if left < length else ""
            return Sound((file,), cut=cut)
        place += 8 + length + length % 2  # chunks are padded to an even length
    return Sound((file,))


def _ogg(file: View) -> Sound:
    """The streams of a chained file, each as if it stood alone; libsndfile hears the first of them."""
    starts, place, was_first, flags = [0], 0, True, 0
    early = ""
    while place < file.size:
        header = file.at(place, 27)
        if not header.startswith(b"OggS"):
            early = f"what stands behind byte {place} is no page of it"
            break
        table = file.at(place + 27, header[26]) if len(header) == 27 else b""
        end = place + 27 + len(table) + sum(table)
        if len(header) < 27 or len(table) < header[26] or end > file.size:
            early = "its last page is cut short"
            break
        flags = header[5]
        first = bool(flags & _OGG_BOS)
        if first and not was_first:
            starts.append(place)
        was_first, place = first, end
    if not early and not flags & _OGG_EOS:
        early = "its last page is missing"
    bounds = [*starts, place]
    parts = tuple(file.part(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False) if stop > start)
    return Sound(parts or (file,), ends_early=early)


def _behind_id3(file: View) -> int:
    """Where the first byte behind tags in front lies."""
    place = 0
    while (tag := file.at(place, 10)).startswith(b"ID3") and len(tag) == 10:
        size = 0
        for byte in tag[6:]:
            size = size << 7 | byte & 127
        place += 10 + size + (10 if tag[5] & 16 else 0)
    return place


def _mpeg(file: View, start: int) -> list[View]:
    """Files that were put one behind the other are parts. Where no header counts its frames, libsndfile would guess.

    The guess is the size of the file divided by the rate of the first frame: wrong where rates vary, or tags hold pictures.
    """
    counted = _xing(file.at(start, 400))
    if counted is None:
        return [file.changed(endless=True)]
    end = start + counted
    behind = file.at(end, 10)
    if counted and file.size - end > _SLACK and (behind.startswith(b"ID3") or behind[:1] == b"\xff"):
        rest = file.part(end, file.size)
        return [file.part(0, end), *_mpeg(rest, _behind_id3(rest))]
    return [file]


def _xing(frame: bytes) -> int | None:
    """Bytes of an mp3 whose first frame counts its frames (0: does not say); None for one that does not count them."""
    if len(frame) < 64:
        return None
    first = frame[1] >> 3 & 3 == 3  # MPEG 1
    mono = frame[3] >> 6 == 3
    side = (17 if mono else 32) if first else (9 if mono else 17)
    place = 4 + side
    if frame[place : place + 4] in (b"Xing", b"Info"):
        flags = int.from_bytes(frame[place + 4 : place + 8], "big")
        if not flags & 1:
            return None
        return int.from_bytes(frame[place + 12 : place + 16], "big") if flags & 2 else 0
    if frame[36:40] == b"VBRI":
        return int.from_bytes(frame[46:50], "big")
    return None
