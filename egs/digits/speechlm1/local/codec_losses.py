"""What the codec is trained with: distances of spectra, and a small discriminator of spectra (as in UnivNet and Encodec)."""

from __future__ import annotations

import torch
import torchaudio
from torch import nn

_SAMPLE_RATE = 16000
_FLOOR = 1e-4
_RESOLUTIONS = ((256, 64, 32), (512, 128, 64), (1024, 256, 80))  # FFT, hop, mel bands
_ADVERSARIES = ((320, 80), (640, 160), (1280, 320))  # FFT, hop


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


class SpectrumDiscriminator(nn.Module):
    """[B, n] -> feature maps of each of three complex spectra, the last of each the verdict."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        widths = [2, channels, 2 * channels, 2 * channels, 2 * channels]
        self.towers = nn.ModuleList(
            nn.ModuleList(
                [
                    *(norm(nn.Conv2d(a, b, (5, 3), (2, 1), (2, 1))) for a, b in zip(widths, widths[1:], strict=False)),
                    norm(nn.Conv2d(widths[-1], 1, 3, 1, 1)),
                ]
            )
            for _ in _ADVERSARIES
        )

    def forward(self, wav: torch.Tensor) -> list[list[torch.Tensor]]:
        found = []
        for (size, hop), tower in zip(_ADVERSARIES, self.towers, strict=True):
            window = torch.hann_window(size, device=wav.device)
            spectrum = torch.stft(wav, size, hop, window=window, return_complex=True)
            spectrum = spectrum / (spectrum.abs() + 1e-4).sqrt()  # compressed, so that quiet bands count
            maps, x = [], torch.stack([spectrum.real, spectrum.imag], dim=1)
            for layer in tower[:-1]:
                x = nn.functional.leaky_relu(layer(x), 0.1)
                maps.append(x)
            maps.append(tower[-1](x))
            found.append(maps)
        return found


def judge_loss(real: list[list[torch.Tensor]], fake: list[list[torch.Tensor]]) -> torch.Tensor:
    """The discriminator's: hinge."""
    relu = nn.functional.relu
    return sum(relu(1 - r[-1]).mean() + relu(1 + f[-1]).mean() for r, f in zip(real, fake, strict=True)) / len(real)


def deceive_loss(real: list[list[torch.Tensor]], fake: list[list[torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The decoder's: (hinge, distance of features relative to their size)."""
    verdict = -sum(maps[-1].mean() for maps in fake) / len(fake)
    pairs = [pair for r, f in zip(real, fake, strict=True) for pair in zip(r[:-1], f[:-1], strict=True)]
    features = sum((a.detach() - b).abs().mean() / (a.detach().abs().mean() + 1e-3) for a, b in pairs) / len(pairs)
    return verdict, features
