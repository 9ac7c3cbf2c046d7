"""ESPnet's SEANet decoder in two parts: the recurrent one, which remembers a clip from its beginning, and the rest.

The decoder (of DAC, EnCodec and SoundStream; FunCodec's works on spectra) is a convolution, an LSTM at the rate of frames, and
then everything that makes samples. Only the LSTM has no finite reach. Its state is carried from chunk to chunk, so chunks are as
exact as the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from .reach import Reach, reach_of
from .torch_codec import GrowingFeatures

if TYPE_CHECKING:
    from .espnet import EspnetCodec


class SplitDecoder:
    """The parts of one decoder. Features are the LSTM's output, [T, D].

    Attributes:
        reach: of the convolution before the LSTM.
    """

    def __init__(self, generator: torch.nn.Module) -> None:
        self.quantizer = generator.quantizer
        self.before, self.recurrent, *rest = generator.decoder.model
        self.rest = torch.nn.Sequential(*rest)
        self.to_samples = getattr(generator, "freq_to_time_transfer", None)
        width = self.recurrent.lstm.input_size
        channels = self.before.conv.conv.in_channels
        weight = next(self.rest.parameters())

        noise = torch.Generator().manual_seed(0)

        def draw(frames: int) -> torch.Tensor:
            return torch.randn(frames, channels, generator=noise).to(weight)

        self.reach: Reach = reach_of(lambda frames: self.before(frames.T[None])[0].T, draw)
        assert self.reach.finite, f"the convolution before the LSTM of {width} units has no finite reach"

    @staticmethod
    def of(model: torch.nn.Module) -> SplitDecoder | None:
        """The parts of an ESPnet GAN codec's decoder; None if it is none that has an LSTM in the second place."""
        from espnet2.gan_codec.shared.decoder.seanet import SEANetDecoder
        from espnet2.gan_codec.shared.decoder.seanet_2d import SEANetDecoder2d

        generator = model.codec.generator
        decoder = getattr(generator, "decoder", None)
        if type(decoder) not in (SEANetDecoder, SEANetDecoder2d) or not hasattr(decoder.model[1], "lstm"):
            return None
        return SplitDecoder(generator) if not decoder.model[1].lstm.bidirectional else None

    def embed(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes [T, C] -> [1, D, T]."""
        return self.quantizer.decode(codes.T[:, None])

    def run(
        self, maps: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """[T, B, D] through the LSTM, from ``state`` on; what comes out, and the state behind it."""
        found, state = self.recurrent.lstm(maps, state)
        return (found + maps if self.recurrent.skip else found), state

    def zero_state(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of one clip, before its first frame."""
        lstm = self.recurrent.lstm
        zero = torch.zeros(lstm.num_layers, 1, lstm.hidden_size, device=next(lstm.parameters()).device)
        return zero, zero

    @torch.inference_mode()
    def features(self, clips: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Codes [T, C] of whole clips -> [T, D]. The LSTM takes all clips at once: what fills up a clip comes behind it."""
        if not clips:
            return []
        embedded = self.embed(torch.cat(list(clips))).split([len(codes) for codes in clips], dim=2)
        maps = [self.before(part)[0].T for part in embedded if part.shape[2]]
        if not maps:
            return [part[0].T for part in embedded]
        found, _ = self.run(torch.nn.utils.rnn.pad_sequence(maps))
        columns = iter(range(len(maps)))
        return [found[: len(codes), next(columns)] if len(codes) else found[:0, 0] for codes in clips]

    def synthesize(self, features: torch.Tensor) -> torch.Tensor:
        """[B, N, D] -> [B, n] samples."""
        sounds = self.rest(features.transpose(1, 2))
        return (sounds if self.to_samples is None else self.to_samples(sounds))[:, 0]


class GrowingRecurrentFeatures(GrowingFeatures):
    """Carries the LSTM's state, and as many frames as the convolution before it looks at."""

    def __init__(self, codec: EspnetCodec, parts: SplitDecoder) -> None:
        super().__init__(codec)
        self.right = parts.reach.right
        self._parts, self._left = parts, parts.reach.left
        self._state: tuple[torch.Tensor, torch.Tensor] | None = None
        self._kept: torch.Tensor | None = None  # [1, D, n] from frame ``_start`` on
        self._start = self._done = 0

    def push(self, codes: np.ndarray, *, last: bool) -> torch.Tensor:
        return push_together([(self, codes, last)])[0]

    def take_in(self, embedded: torch.Tensor, last: bool) -> int:
        """Keeps the next [1, D, m]; how many features become final by them."""
        self._kept = embedded if self._kept is None else torch.cat([self._kept, embedded], dim=2)
        known = self._start + self._kept.shape[2]
        return (known if last else max(self._done, known - self.right)) - self._done


@torch.inference_mode()
def push_together(pushes: Sequence[tuple[GrowingRecurrentFeatures, np.ndarray, bool]]) -> list[torch.Tensor]:
    """``push`` of many clips of one codec: those whose windows are alike go through convolution and LSTM as one batch."""
    clips = [clip for clip, _, _ in pushes]
    parts = clips[0]._parts
    codes = clips[0]._codec.checked([codes for _, codes, _ in pushes])
    if any(map(len, codes)):
        embedded = parts.embed(torch.cat(codes)).split([len(part) for part in codes], dim=2)
    else:
        embedded = [torch.zeros(1, parts.before.conv.conv.in_channels, 0, device=codes[0].device)] * len(codes)
    alike: dict[tuple[int, int, int], list[int]] = {}
    found = [torch.zeros(0, parts.recurrent.lstm.hidden_size, device=codes[0].device)] * len(clips)
    for index, (clip, part, (_, _, last)) in enumerate(zip(clips, embedded, pushes, strict=True)):
        count = clip.take_in(part, last)
        if count:
            alike.setdefault((clip._kept.shape[2], clip._done - clip._start, count), []).append(index)
    for (_, skipped, count), indices in alike.items():
        group = [clips[index] for index in indices]
        maps = parts.before(torch.cat([clip._kept for clip in group]))[:, :, skipped : skipped + count]
        states = [clip._state or parts.zero_state() for clip in group]
        state = tuple(torch.cat(half, dim=1) for half in zip(*states, strict=True))
        features, state = parts.run(maps.permute(2, 0, 1), state)
        for column, (index, clip) in enumerate(zip(indices, group, strict=True)):
            found[index] = features[:, column]
            clip._state = tuple(half[:, column : column + 1].contiguous() for half in state)
            clip._done += count
            start = max(clip._done - clip._left, clip._start)
            clip._kept, clip._start = clip._kept[:, :, start - clip._start :], start
    return found
