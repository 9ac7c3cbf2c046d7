"""Other sampling rates: torchaudio's windowed-sinc interpolation, as in ESPnet's speechlm readers, for any rate and length."""

import math

import numpy as np

from ..errors import DataError

# torchaudio's defaults: zero crossings of the sinc on either side, and the cut-off below half of the lower rate.
_ZEROS, _ROLLOFF = 6, 0.99
_MOST_KERNEL = 2**24  # values of torchaudio's table of filters
_MOST_GROWTH = 100  # a recording of so low a rate holds no sound; a header of 1 Hz would ask for gigabytes
_BLOCK = 2**20  # values of filters at a time
_TOGETHER = 2**22  # samples that torchaudio resamples at a time


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
    if wav.shape[-1] <= _TOGETHER:
        return _torchaudio(wav, rate, target)
    # In pieces, since torchaudio takes several times the memory of what it resamples. Each begins and ends with neighbours.
    beside = original * math.ceil(_reach(original, new) / original)
    step = original * max(1, _TOGETHER // original)
    found = np.empty((*wav.shape[:-1], -(-wav.shape[-1] * new // original)), np.float32)
    for start in range(0, wav.shape[-1], step):
        first = max(0, start - beside)
        piece = _torchaudio(wav[..., first : start + step + beside], rate, target)
        place = start // original * new
        piece = piece[..., (start - first) // original * new :][..., : step // original * new]
        count = min(piece.shape[-1], found.shape[-1] - place)
        found[..., place : place + count] = piece[..., :count]
    return found


def _torchaudio(wav: np.ndarray, rate: int, target: int) -> np.ndarray:
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
