"""What the codec is trained with: distances of spectra at several resolutions (as in Parallel WaveGAN and Encodec)."""

from __future__ import annotations

import torch
import torchaudio
from torch import nn

_SAMPLE_RATE = 16000
_FLOOR = 1e-4
_RESOLUTIONS = ((256, 64, 32), (512, 128, 64), (1024, 256, 80))  # FFT, hop, mel bands


class SpectralDistance(nn.Module):
    """Two waveforms [B, n] -> scalar: mean absolute difference of log mel spectra and of mel magnitudes, over three resolutions."""

    def __init__(self) -> None:
        super().__init__()
        for size, _, bands in _RESOLUTIONS:
            mel = torchaudio.functional.melscale_fbanks(size // 2 + 1, 0.0, _SAMPLE_RATE / 2, bands, _SAMPLE_RATE)
            self.register_buffer(f"mel{size}", mel)
            self.register_buffer(f"window{size}", torch.hann_window(size))

    def mels(self, wav: torch.Tensor, size: int, hop: int) -> torch.Tensor:
        """[B, n] -> magnitudes [B, T, bands]."""
        window = getattr(self, f"window{size}")
        spectrum = torch.stft(wav, size, hop, window=window, return_complex=True)
        power = spectrum.real**2 + spectrum.imag**2
        return (power.transpose(1, 2) @ getattr(self, f"mel{size}") + _FLOOR**2).sqrt()

    def forward(self, found: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(of logarithms, natural; of magnitudes)."""
        logs, magnitudes = 0.0, 0.0
        for size, hop, _ in _RESOLUTIONS:
            one, other = self.mels(found, size, hop), self.mels(wanted, size, hop)
            # What is 40 dB below a frame's loudest is not heard.
            logs = logs + ((one + 1e-2).log() - (other + 1e-2).log()).abs().mean()
            magnitudes = magnitudes + (one - other).abs().mean()
        return logs / len(_RESOLUTIONS), magnitudes / len(_RESOLUTIONS)
