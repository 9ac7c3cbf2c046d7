"""Reading recordings the way Kaldi names them: a file, a place in an ark, or a command that writes one.

Everything comes back as float32 in [-1, 1), whatever the file holds. (ESPnet's ``kaldi_audio`` reader hands on the
int16 values of wav arks as they are; continuous encoders normalise the difference away, codecs refuse integers.)
"""

import io
import math
import os
import re
import struct
import subprocess
from collections import Counter
from pathlib import Path
from typing import BinaryIO

import numpy as np

from espnet2_vllm.errors import DataError

# kaldiio would also read matrices, numpy files and pickles (which run code) from an ark; recordings begin like this.
_ARK_AUDIO = (b"RIFF", b"fLaC", b"AUDIO")
# Programs that write wav into a pipe cannot know its length and put a huge one (sox 0x7ffff000, ffmpeg 0xffffffff).
_UNKNOWN_LENGTH = 0x7FFF0000
# An mp3 declares whole MPEG frames (1152 samples), of which decoders drop the delay and the padding at both ends.
_MP3_SLACK = 2 * 1152
_STDERR_TAIL = 2000
# torchaudio's defaults: zero crossings of the sinc on either side, and the cut-off below half of the lower rate.
_ZEROS, _ROLLOFF = 6, 0.99
_MOST_KERNEL = 2**24  # values of torchaudio's table of filters
_MOST_GROWTH = 100  # a recording of so low a rate holds no sound; a header of 1 Hz would ask for gigabytes
_BLOCK = 2**20  # values of filters at a time


def read_audio(spec: str, *, base_dir: str | os.PathLike | None = None) -> tuple[np.ndarray, int]:
    """Read the recording ``spec`` names -> ([channels, n] float32, sample rate in Hz).

    spec: a path (wav, flac, mp3, ogg, sph: what libsndfile reads); ``file.ark:offset`` (wav, flac or AUDIO entry);
    ``command |`` (run by the shell, its standard output read as an audio file). A relative path is looked up under
    ``base_dir`` first, then under the working directory; a command runs in ``base_dir``.
    Raises DataError, naming the spec: missing, unreadable, cut short, without samples, NaN or infinite samples, or a
    command that fails.
    """
    text = spec.strip()
    if not text:
        raise DataError("a recording without a name; expected a path, file.ark:offset, or a command that ends in |")
    if text.endswith("|"):
        wav, rate = _read_command(text[:-1].strip(), base_dir)
    else:
        wav, rate = _read_path(text, base_dir)
    return _checked(wav, text), rate


def read_audio_bytes(data: bytes, name: str) -> tuple[np.ndarray, int]:
    """An audio file in memory -> ([channels, n] float32, sample rate in Hz). DataError, naming ``name``, as ``read_audio``."""
    wav, rate = _decode(io.BytesIO(data), name)
    return _checked(wav, name), rate


def _checked(wav: np.ndarray, name: str) -> np.ndarray:
    if wav.shape[1] == 0:
        raise DataError(f"{name}: the recording has no samples")
    if not np.isfinite(wav).all():
        raise DataError(f"{name}: {int((~np.isfinite(wav)).sum())} samples are NaN or infinite")
    return wav


def first_channel(wav: np.ndarray) -> np.ndarray:
    """[channels, n] -> [n], the channel that ESPnet's encoders take."""
    assert wav.ndim == 2, f"expected [channels, n], got shape {wav.shape}"
    return wav[0]


def resample(wav: np.ndarray, rate: int, target: int) -> np.ndarray:
    """[..., n] float32 at ``rate`` -> [..., ceil(n * target / rate)] float32 at ``target`` Hz.

    torchaudio's windowed-sinc interpolation, as in ESPnet's speechlm readers. Equal rates give the array itself.
    Raises DataError for a rate that no recording has.
    """
    if rate < 1 or target < 1:
        raise DataError(f"cannot resample from {rate} Hz to {target} Hz: rates must be positive")
    if rate == target:
        return wav
    if target > _MOST_GROWTH * rate:
        raise DataError(
            f"cannot resample from {rate} Hz to {target} Hz: {wav.shape[-1]} samples would be {wav.shape[-1] / rate:.0f} s; is "
            "the rate right?"
        )
    original, new = rate // math.gcd(rate, target), target // math.gcd(rate, target)
    if new * (original + 2 * _reach(original, new)) > _MOST_KERNEL:
        return resample_by_sample(wav, original, new)
    import torch
    from torchaudio.functional import resample as torchaudio_resample

    samples = torch.from_numpy(np.ascontiguousarray(wav, dtype=np.float32))
    return torchaudio_resample(samples, rate, target).numpy()


def resample_by_sample(wav: np.ndarray, original: int, new: int) -> np.ndarray:
    """``resample`` for rates with hardly a common divisor, ``original`` : ``new`` as they are without it.

    torchaudio makes a table of ``new`` filters of more than ``original`` taps (44101 to 16000 Hz: 5.6 GB); here each sample's
    filter is made where it is used, and has only the taps that are not 0.
    """
    base, reach = min(original, new) * _ROLLOFF, _reach(original, new)
    count = -(-wav.shape[-1] * new // original)
    taps = np.arange(-reach, reach + 2)
    padded = np.pad(wav, [(0, 0)] * (wav.ndim - 1) + [(reach, reach + 2)])
    found = np.empty((*wav.shape[:-1], count), np.float32)
    block = max(1, _BLOCK // len(taps))
    for start in range(0, count, block):
        places = np.arange(start, min(start + block, count))
        whole, rest = np.divmod(places * original, new)
        times = np.clip((taps - rest[:, None] / new) / original * base, -_ZEROS, _ZEROS)
        filters = np.sinc(times) * np.cos(times * np.pi / _ZEROS / 2) ** 2 * (base / original)
        found[..., start : start + block] = (padded[..., whole[:, None] + taps + reach] * filters).sum(-1)
    return found


def _reach(original: int, new: int) -> int:
    """Samples on either side that an interpolated sample is made of."""
    return math.ceil(_ZEROS * original / (min(original, new) * _ROLLOFF))


def mono_at(wav: np.ndarray, rate: int, target: int, notes: Counter[str] | None = None) -> np.ndarray:
    """[n] or [channels, n] samples at ``rate`` -> [m] float32 at ``target`` Hz: first channel, resampled.

    ``notes`` counts the recordings of several channels and of other rates.
    """
    if wav.ndim == 2:
        if notes is not None and wav.shape[0] > 1:
            notes[f"recordings of {wav.shape[0]} channels, of which the first was taken"] += 1
        wav = first_channel(wav)
    if notes is not None and rate != target:
        notes[f"recordings resampled from {rate} to {target} Hz"] += 1
    return resample(wav.astype(np.float32, copy=False), rate, target)


def _read_path(text: str, base_dir: str | os.PathLike | None) -> tuple[np.ndarray, int]:
    path = _existing(text, base_dir)
    if path is not None:
        with _open(path) as file:
            return _decode(file, text)
    name, colon, offset = text.rpartition(":")
    if colon and offset.isdecimal():
        path = _existing(name, base_dir)
        if path is not None:
            with _open(path) as file:
                return _decode_ark_entry(file, int(offset), text)
    places = [Path(text)] if base_dir is None else [Path(base_dir) / text, Path(text)]
    raise DataError(f"{text}: no such file; looked at {' and '.join(dict.fromkeys(str(p.absolute()) for p in places))}")


def _existing(name: str, base_dir: str | os.PathLike | None) -> Path | None:
    for path in [Path(name)] if base_dir is None else [Path(base_dir) / name, Path(name)]:
        if os.path.isfile(path):  # Path.is_file raises for a name that is too long
            return path
    return None


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: cannot be opened: {error.strerror}") from error


def _read_command(command: str, base_dir: str | os.PathLike | None) -> tuple[np.ndarray, int]:
    if not command:
        raise DataError("the name of a recording is '|' with no command before it")
    # No standard input: a command that reads it would eat the input of the program that decodes.
    try:
        done = subprocess.run(
            command, shell=True, stdin=subprocess.DEVNULL, capture_output=True, cwd=base_dir, check=False
        )
    except (OSError, ValueError) as error:  # too long for the system, or with a NUL in it
        raise DataError(f"command cannot be started: {command[:200]}: {error}") from error
    stderr = done.stderr.decode("utf-8", errors="replace").strip()[-_STDERR_TAIL:] or "(nothing)"
    if done.returncode != 0:
        raise DataError(f"command failed with exit status {done.returncode}: {command}\nits last words: {stderr}")
    if not done.stdout:
        raise DataError(f"command gave no output: {command}\nits last words: {stderr}")
    return _decode(io.BytesIO(done.stdout), f"{command} |")


def _decode(file: BinaryIO, name: str) -> tuple[np.ndarray, int]:
    """A whole audio file -> ([channels, n] float32, rate)."""
    import soundfile

    if file.seek(0, os.SEEK_END) == 0:
        raise DataError(f"{name}: the file is empty")
    file.seek(0)
    _check_riff_is_whole(file, name)
    sphere_samples = _sphere_samples(file)
    try:
        with soundfile.SoundFile(file) as audio:
            # Some encodings (GSM 6.10) cannot be sought, and soundfile reads these to their end only if told where it is.
            wav = audio.read(-1 if audio.seekable() else audio.frames, dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise DataError(f"{name}: no audio that libsndfile reads, or cut short: {error.error_string}") from error
    except TypeError as error:  # soundfile takes a file whose name ends in .raw for samples without a header
        raise DataError(f"{name}: no audio with a header: {error}; convert it to wav or flac") from error
    declared = max(audio.frames - (_MP3_SLACK if audio.format == "MP3" else 0), sphere_samples)
    if len(wav) < declared:
        raise DataError(f"{name}: cut short, {len(wav)} of {declared} samples are there")
    return np.ascontiguousarray(wav.T), audio.samplerate


def _decode_ark_entry(file: BinaryIO, offset: int, name: str) -> tuple[np.ndarray, int]:
    """The recording that begins at byte ``offset`` of an ark -> ([channels, n] float32, rate)."""
    import kaldiio
    import soundfile

    size = file.seek(0, os.SEEK_END)
    if offset >= size:
        raise DataError(f"{name}: offset {offset} lies behind the end of the ark ({size} bytes); is the ark cut short?")
    file.seek(offset)
    start = file.read(5)
    if not start.startswith(_ARK_AUDIO):
        raise DataError(f"{name}: no recording begins at this offset (found {start!r}, expected wav, flac or AUDIO)")
    if start == b"AUDIO":
        _check_audio_entry_is_whole(file, size, name)
    file.seek(offset)
    _check_riff_is_whole(file, name)
    if start.startswith(b"RIFF"):
        # kaldiio reads 8 and 16 bits only, and takes any other encoding (mu-law, ...) for these.
        header = file.read(8)
        length = int.from_bytes(header[4:], "little")
        return _decode(io.BytesIO(header + file.read(min(length, size))), name)
    try:
        rate, samples = kaldiio.matio.read_kaldi(file)
    except (soundfile.LibsndfileError, EOFError, ValueError, struct.error, kaldiio.python_wave.Error) as error:
        raise DataError(f"{name}: cannot be read from the ark, or the ark is cut short: {error}") from error
    samples = samples[:, None] if samples.ndim == 1 else samples
    return np.ascontiguousarray(as_float(samples, name).T), rate


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


def _check_audio_entry_is_whole(file: BinaryIO, size: int, name: str) -> None:
    """``file`` stands behind the word AUDIO: a byte w, then w bytes of length, then an audio file of that length."""
    width = file.read(1)
    length = int.from_bytes(file.read(width[0]), "little") if width else 0
    left = size - file.tell()
    if left < length or length == 0:
        raise DataError(f"{name}: the ark is cut short, {left} of {length} bytes of the recording are there")


def _sphere_samples(file: BinaryIO) -> int:
    """Samples a channel that a NIST sphere header declares, which libsndfile does not compare; 0 for other files."""
    header = file.read(1024)
    file.seek(0)
    count = re.search(rb"^sample_count -i (\d+)", header, re.MULTILINE) if header.startswith(b"NIST_1A") else None
    return int(count[1]) if count else 0


def _check_riff_is_whole(file: BinaryIO, name: str) -> None:
    """Refuse a wav whose data chunk is longer than what is left of ``file``: libsndfile would read the rest silently.

    Begins at the file's position and comes back to it. Anything that is not RIFF passes.
    """
    start = file.tell()
    size = file.seek(0, os.SEEK_END)
    file.seek(start)
    if file.read(4) == b"RIFF":
        file.seek(start + 12)
        while len(header := file.read(8)) == 8:
            chunk, length = struct.unpack("<4sI", header)
            left = size - file.tell()
            if chunk == b"data":
                if left < length < _UNKNOWN_LENGTH:
                    raise DataError(f"{name}: cut short, {left} of {length} bytes of samples are there")
                break
            # Chunks are padded to an even length.
            file.seek(length + length % 2, os.SEEK_CUR)
    file.seek(start)
