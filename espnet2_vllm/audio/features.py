"""Log-mel features of many clips at once, on the device where the encoder is.

transformers' ``WhisperFeatureExtractor`` is what ESPnet calls, clip by clip on the CPU; it gives the settings and the filters here,
and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

_VARIANCE_FLOOR = 1e-7  # as the extractor's zero_mean_unit_var_norm has it
_SAMPLES = 2**25  # of a batch, padding included: bounds the memory of its spectrogram


class LogMel:
    """The features that a Whisper extractor gives for normalised waveforms, batched.

    Args:
        extractor: a ``WhisperFeatureExtractor``.
        device: where features are made and left.
    """

    def __init__(self, extractor: Any, device: torch.device) -> None:
        self._size, self._hop, self._device = extractor.n_fft, extractor.hop_length, device
        self._window = torch.hann_window(self._size, device=device)
        self._filters = torch.from_numpy(np.asarray(extractor.mel_filters, dtype=np.float32).T.copy()).to(device)

    def __call__(self, wavs: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """[n] float32 each -> [floor(n / hop), bins] float32 each. n must be above half of the spectrogram's window."""
        found: list[Any] = [None] * len(wavs)
        for group in self._groups(wavs):
            for place, features in zip(group, self._batch([wavs[i] for i in group]), strict=True):
                found[place] = features
        return found

    def _groups(self, wavs: Sequence[np.ndarray]) -> Iterator[list[int]]:
        """Clips of similar length, so that little is padding."""
        group: list[int] = []
        for place in sorted(range(len(wavs)), key=lambda i: -len(wavs[i])):
            if group and (len(group) + 1) * len(wavs[group[0]]) > _SAMPLES:
                yield group
                group = []
            group.append(place)
        if group:
            yield group

    def _batch(self, wavs: Sequence[np.ndarray]) -> list[torch.Tensor]:
        lengths = [len(wav) for wav in wavs]
        stacked = torch.empty(len(wavs), max(lengths), pin_memory=self._device.type == "cuda")
        for row, wav in zip(stacked.numpy(), wavs, strict=True):
            row[: len(wav)], row[len(wav) :] = wav, 0
        counts = torch.tensor(lengths).unsqueeze(1).to(self._device)
        samples = self._normalised(stacked.to(self._device, non_blocking=True), counts)
        spectrum = torch.stft(
            self._reflected(samples, counts),
            self._size,
            self._hop,
            window=self._window,
            center=False,
            return_complex=True,
        )
        power = spectrum.abs().square()
        mel = (self._filters @ power).clamp(min=1e-10).log10()
        frames = counts // self._hop
        inside = torch.arange(mel.shape[-1], device=self._device) < frames
        highest = mel.masked_fill(~inside.unsqueeze(1), -torch.inf).amax((1, 2), keepdim=True)
        mel = (torch.maximum(mel, highest - 8.0) + 4.0) / 4.0
        return [one[:, : length // self._hop].t() for one, length in zip(mel, lengths, strict=True)]

    @staticmethod
    def _normalised(samples: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Zero mean and unit variance over the ``counts`` samples of each row; what is behind them stays zero."""
        inside = torch.arange(samples.shape[1], device=samples.device) < counts
        centred = (samples - samples.sum(1, keepdim=True) / counts) * inside
        variance = centred.square().sum(1, keepdim=True) / counts
        return centred / (variance + _VARIANCE_FLOOR).sqrt()

    def _reflected(self, samples: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Each row with half a window of its own reflection at both of its ends."""
        half = self._size // 2
        places = (torch.arange(samples.shape[1] + 2 * half, device=samples.device) - half).abs()
        places = torch.where(places < counts, places, 2 * (counts - 1) - places).clamp(min=0)
        return samples.gather(1, places)
