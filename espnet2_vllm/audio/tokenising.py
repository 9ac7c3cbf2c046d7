"""Recordings to what OpusLM reads: an SSL unit and the codec's codes a frame, as arks of ESPnet's recipe hold them.

Source: stage 5 of ESPnet's ``speechlm.sh`` (codec_ssl_tokenization.sh, splice_scp.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DataError
from ..layout import Layout
from .reading import mono_at

if TYPE_CHECKING:
    from .units import SpeechUnits

TOLERANCE = 1  # frames by which units and codes may differ in number (splice_scp.py)


class SpeechTokeniser:
    """Units and codes, spliced.

    Args:
        codec: an ``EspnetCodec``, which fits the layout.
        notes: counts the recordings of several channels and of other rates.
    """

    def __init__(self, layout: Layout, codec: Any, units: SpeechUnits, notes: Counter[str] | None = None) -> None:
        self.layout, self.codec, self.units = layout, codec, units
        self.notes: Counter[str] = Counter() if notes is None else notes
        self._offsets = np.array([span.start - layout.streams[0].start for span in layout.streams])

    @property
    def rate(self) -> int:
        """Of the codec, in Hz."""
        return self.codec.sample_rate

    def __call__(self, clips: Sequence[tuple[np.ndarray, int]]) -> list[np.ndarray | DataError]:
        """(samples [n] or [channels, n], rate) each -> [frames, S] int32, counted from the first SSL unit; or why there is none."""
        wavs = [mono_at(wav, rate, self.codec.sample_rate, self.notes) for wav, rate in clips]
        return [self._splice(wav, units) for wav, units in zip(wavs, self._units(wavs), strict=True)]

    def _units(self, wavs: Sequence[np.ndarray]) -> list[np.ndarray | DataError]:
        try:
            return list(self.units(wavs))
        except DataError:
            return [self._units_alone(wav) for wav in wavs]

    def _units_alone(self, wav: np.ndarray) -> np.ndarray | DataError:
        try:
            return self.units([wav])[0]
        except DataError as error:
            return error

    def _splice(self, wav: np.ndarray, units: np.ndarray | DataError) -> np.ndarray | DataError:
        if isinstance(units, DataError):
            return units
        codes = self.codec.encode_uncut(wav)
        if abs(len(units) - len(codes)) > TOLERANCE:
            return DataError(f"{len(units)} SSL units and {len(codes)} frames of codes differ by more than {TOLERANCE}")
        frames = min(len(units), len(codes))
        if not frames:
            return DataError(f"{len(wav)} samples at {self.codec.sample_rate} Hz make no frame")
        return (np.column_stack([units[:frames], codes[:frames]]) + self._offsets).astype(np.int32)
