"""The part that codecs made of torch modules share: checks, padding, batches. A codec adds two tensor functions."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from espnet2_vllm.errors import DataError
from espnet2_vllm.precision import convolutions


class TorchCodec(ABC):
    """Implements ``espnet2_vllm.codec.Codec`` on top of ``_encode_tensor`` and ``_decode_tensor``."""

    def __init__(self, *, sample_rate: int, hop: int, num_codebooks: int, codebook_size: int, device: str) -> None:
        self.sample_rate = sample_rate
        self.hop = hop
        self.num_codebooks = num_codebooks
        self.codebook_size = codebook_size
        self.device = torch.device(device)
        # Samples are to be a function of a clip's codes. A CPU's sums depend on the size of a batch, and large ones gain it little.
        self.one_by_one = self.device.type == "cpu"

    @abstractmethod
    def _encode_tensor(self, wav: torch.Tensor) -> torch.Tensor:
        """[B, 1, n] float32, n any positive count -> [B, frames, num_codebooks or more] int64, on the device."""

    @abstractmethod
    def _decode_tensor(self, codes: torch.Tensor) -> torch.Tensor:
        """[B, T, num_codebooks] int64, T > 0 -> [B, T * hop] float32, on the device."""

    def modules(self) -> Iterable[torch.nn.Module]:
        """What it is made of."""
        return (part for value in vars(self).values() if isinstance(value, torch.nn.Module) for part in value.modules())

    def features(self, clips: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Codes [T, C] of whole clips -> what ``synthesize`` takes, [T, F] on the device.

        Here is what a decoder must do from the beginning of a clip (recurrent layers); for the others features are the codes.
        """
        return self.checked(clips)

    def checked(self, clips: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Codes [T, C] as int64 tensors on the device. DataError for any that are not the codec's."""
        for clip in clips:
            self._check_codes(clip)
        if not clips:
            return []
        together = torch.from_numpy(np.concatenate(clips).astype(np.int64)).to(self.device)
        return list(together.split([len(clip) for clip in clips]))

    def growing_features(self) -> "GrowingFeatures":
        """Features of one clip as its codes arrive."""
        return GrowingFeatures(self)

    def push_features(self, pushes: Sequence[tuple["GrowingFeatures", np.ndarray, bool]]) -> list[torch.Tensor]:
        """``GrowingFeatures.push`` of many clips at once: (clip, its next codes, whether they are its last)."""
        return [clip.push(codes, last=last) for clip, codes, last in pushes]

    def synthesize(self, features: torch.Tensor) -> torch.Tensor:
        """[B, N, F] features of windows -> [B, N * hop] float32 on the device."""
        return self._decode_tensor(features)

    def encode(self, wav: np.ndarray) -> np.ndarray:
        """[n] float32 -> [floor(n / hop), num_codebooks] int64. Fewer than hop samples give no frame.

        The samples are cut to a multiple of hop before the codec sees them (ESPnet's DiscreteAudioIO.encode_batch):
        on uncut samples the codec gives other counts and other codes. Raises DataError on anything but finite mono
        floats.
        """
        return self.encode_batch([wav])[0]

    def encode_batch(self, wavs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Encode clips together: each [n_i] float32 -> [floor(max n / hop), num_codebooks] int64.

        See ``Codec.encode_batch`` for what the frames of shorter clips hold (DiscreteAudioIO.encode_batch).
        """
        for wav in wavs:
            check_wav(wav)
        frames = max((len(wav) for wav in wavs), default=0) // self.hop
        if frames == 0:
            return [np.zeros((0, self.num_codebooks), dtype=np.int64) for _ in wavs]
        padded = np.zeros((len(wavs), 1, frames * self.hop), dtype=np.float32)
        for row, wav in zip(padded, wavs, strict=True):
            kept = wav[: frames * self.hop]
            row[0, : len(kept)] = kept
        return list(self._encode_array(padded, frames))

    def _encode_array(self, wav: np.ndarray, frames: int) -> np.ndarray:
        """[B, 1, n] float32 -> [B, frames, num_codebooks] int64, with the codec's promises checked."""
        with torch.inference_mode():
            codes = self._encode_tensor(torch.from_numpy(wav).to(self.device))[:, :, : self.num_codebooks].cpu().numpy()
        expected = (len(wav), frames, self.num_codebooks)
        assert codes.shape == expected, f"codec gave codes of shape {codes.shape}, expected {expected}"
        return np.ascontiguousarray(codes, dtype=np.int64)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """[T, num_codebooks] integer in 0..codebook_size-1 -> [T * hop] float32. DataError on any other code."""
        return self.decode_batch([codes])[0]

    def decode_batch(self, codes: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Each [T_i, num_codebooks] -> [T_i * hop] float32, as ``decode`` gives it (within float noise).

        Only clips of one length are stacked: the decoders look ahead, so padding would change the last samples.
        """
        alike = defaultdict(list)
        for index, clip in enumerate(codes):
            self._check_codes(clip)
            alike[len(clip), index if self.one_by_one else 0].append(index)
        wavs: list[np.ndarray] = [np.zeros(0, dtype=np.float32)] * len(codes)
        for (length, _), indices in alike.items():
            if length == 0:
                continue
            stacked = np.stack([np.asarray(codes[index], dtype=np.int64) for index in indices])
            with torch.inference_mode(), convolutions(self.device):
                wav = self._decode_tensor(torch.from_numpy(stacked).to(self.device)).float().cpu().numpy()
            expected = (len(indices), length * self.hop)
            assert wav.shape == expected, f"codec gave waveforms of shape {wav.shape}, expected {expected}"
            for index, samples in zip(indices, wav, strict=True):
                wavs[index] = samples
        return wavs

    def _check_codes(self, codes: np.ndarray) -> None:
        if codes.ndim != 2 or codes.shape[1] != self.num_codebooks or codes.dtype.kind not in "iu":
            raise DataError(
                f"codes must be integers of shape [frames, {self.num_codebooks}], got {codes.dtype} {codes.shape}"
            )
        outside = np.argwhere((codes < 0) | (codes >= self.codebook_size))
        if len(outside):
            frame, book = outside[0]
            raise DataError(
                f"code {codes[frame, book]} at frame {frame}, codebook {book} lies outside 0..{self.codebook_size - 1} "
                f"({len(outside)} such codes); a pad or an id of another stream inside the audio?"
            )


class GrowingFeatures:
    """Features of a clip whose codes come by and by.

    Attributes:
        right: frames that must be known behind one before its features are.
    """

    right = 0

    def __init__(self, codec: TorchCodec) -> None:
        self._codec = codec

    def push(self, codes: np.ndarray, *, last: bool) -> torch.Tensor:
        """The next codes [m, C] -> the next features [k, F] that are final; all that are left if these are the ``last`` codes."""
        del last
        return self._codec.features([codes])[0]


def check_wav(wav: np.ndarray) -> None:
    if wav.ndim != 1 or wav.dtype.kind != "f":
        raise DataError(
            f"a codec takes mono float samples of shape [n], got {wav.dtype} {wav.shape}; take the first channel, and "
            "scale integer samples to [-1, 1) first"
        )
    if not np.isfinite(wav).all():
        raise DataError(f"a codec takes finite samples, got {int((~np.isfinite(wav)).sum())} that are NaN or infinite")
