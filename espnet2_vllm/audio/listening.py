"""What becomes of a recording before a continuous encoder hears it, and how many rows it will take.

Source: ESPnet ``ContinuousAudioIO.preprocess`` (espnet2/speechlm/model/speechlm/multimodal_io/audio.py). Nothing here imports torch
unless a recording has another sampling rate than the encoder.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import CheckpointError, DataError
from ..plan import LONG_AUDIO
from .reading import mono_at

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

# model_type of the encoders that ESPnet accepts.
QWEN3_OMNI, QWEN25_OMNI = "qwen3_omni_moe_audio_encoder", "qwen2_5_omni_audio_encoder"


class RowCount(NamedTuple):
    """rows: of so many mel frames, where so many go through the convolutions together. least: frames that give a row."""

    rows: Callable[[int, int], int]
    least: int


def _rows_of_qwen3_omni(frames: int, chunk: int) -> int:
    """Three halvings of every chunk. A whole one of the released geometry has 100 frames; transformers writes its 13 rows."""
    chunks, rest = divmod(frames, chunk)
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return chunks * 13 + rest


def _rows_of_qwen25_omni(frames: int, chunk: int) -> int:
    """A halving, and pairs of what that leaves."""
    return ((frames - 1) // 2 + 1) // 2


ROW_COUNTS = {QWEN3_OMNI: RowCount(_rows_of_qwen3_omni, 1), QWEN25_OMNI: RowCount(_rows_of_qwen25_omni, 3)}


@dataclass(frozen=True)
class Listening:
    """How a checkpoint takes sound.

    Attributes:
        rate: of the encoder in Hz.
        hop: samples a mel frame.
        window: samples of the spectrogram's window; a clip must be longer than half of it, or its edges cannot be reflected.
        limit: samples that ``cut`` keeps of a recording and ``refuse`` allows, counted at the recording's own rate.
        half_chunk: half of the mel frames that go through the convolutions together (``n_window``).
        long_audio: one of ``plan.LONG_AUDIO``.
        encoder: its ``model_type``.
        notes: how many recordings were changed on the way, and how.
    """

    rate: int
    hop: int
    window: int
    limit: int
    half_chunk: int
    long_audio: str = "whole"
    encoder: str = QWEN3_OMNI
    notes: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, checkpoint: Checkpoint, long_audio: str = "whole") -> Listening:
        """From the encoder's own configuration files.

        Raises:
            CheckpointError: if the checkpoint has none, or another encoder than ESPnet's.
        """
        assert long_audio in LONG_AUDIO, f"long_audio {long_audio!r}"
        extractor = read_settings(checkpoint, "preprocessor_config")
        audio = audio_settings(checkpoint)
        try:
            return cls(
                rate=int(extractor["sampling_rate"]),
                hop=int(extractor["hop_length"]),
                window=int(extractor["n_fft"]),
                limit=int(extractor.get("n_samples") or extractor["chunk_length"] * extractor["sampling_rate"]),
                half_chunk=int(audio["n_window"]),
                long_audio=long_audio,
                encoder=audio["model_type"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{checkpoint.path}/continuous_audio: its configuration lacks {error}; expected the files of Qwen3-Omni or "
                "Qwen2.5-Omni; convert the checkpoint again"
            ) from error

    def prepare(self, wav: np.ndarray, rate: int) -> np.ndarray:
        """[n] or [channels, n] samples at ``rate`` -> [m] float32 at the encoder's rate: first channel, cut, resampled.

        The scale does not matter, since features are normalised.

        Raises:
            DataError: if it is too short for one frame, or too long where ``long_audio`` is ``refuse``.
        """
        length = wav.shape[-1]
        if length > self.limit and self.long_audio != "whole":
            allowed = f"{self.limit} samples ({self.limit / rate:.1f} s at {rate} Hz)"
            if self.long_audio == "refuse":
                raise DataError(
                    f"the audio has {length} samples ({length / rate:.1f} s), more than the {allowed} that the model was "
                    "trained on; split it, or choose long_audio whole or cut"
                )
            self.notes[f"recordings cut to their first {allowed}, as older ESPnet did"] += 1
            wav = wav[..., : self.limit]
        wav = mono_at(wav, rate, self.rate, self.notes)
        shortest = max(self.window // 2 + 1, self.hop * ROW_COUNTS[self.encoder].least)
        if len(wav) < shortest:
            raise DataError(
                f"the audio has {len(wav)} samples at {self.rate} Hz, but the audio encoder needs at least {shortest} "
                f"({1000 * shortest / self.rate:.1f} ms)"
            )
        return wav

    @property
    def enough(self) -> int | None:
        """Samples of a recording, at its own rate, that decide what is heard of it; None is all."""
        return self.limit + 1 if self.long_audio == "cut" else None

    def rows(self, samples: int) -> int:
        """Rows of the prompt that ``samples`` samples at the encoder's rate take."""
        return self.rows_of_frames(samples // self.hop)

    def rows_of_frames(self, frames: int) -> int:
        """Rows of ``frames`` mel frames, as transformers counts them for this encoder."""
        return ROW_COUNTS[self.encoder].rows(frames, 2 * self.half_chunk)


def audio_settings(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The audio encoder's part of its config.json. CheckpointError as ``Listening.of``."""
    config = read_settings(checkpoint, "config")
    audio = config.get("thinker_config", config).get("audio_config", config)
    if audio.get("model_type") not in ROW_COUNTS:
        raise CheckpointError(
            f"{checkpoint.path}: the audio encoder is of type {audio.get('model_type')!r}; only {' and '.join(ROW_COUNTS)} can "
            "be run"
        )
    return audio


def read_settings(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """``config`` or ``preprocessor_config`` of the encoder. CheckpointError if the conversion did not find it."""
    facts = checkpoint.continuous_audio
    if facts is None:
        raise CheckpointError(f"{checkpoint.path}: the checkpoint has no continuous audio encoder")
    if facts[name] is None:
        raise CheckpointError(
            f"{checkpoint.path}: {name}.json of the audio encoder {facts['encoder']} was not on the machine where the "
            f"checkpoint was converted, so audio input cannot be read; `hf download {facts['encoder']} config.json "
            "preprocessor_config.json` and convert again"
        )
    path = Path(checkpoint.path) / facts[name]
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}; convert the checkpoint again") from error
