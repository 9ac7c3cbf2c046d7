"""Wavs of a Kaldi directory in memory, and random crops of them."""

from __future__ import annotations

from pathlib import Path

import kaldiio
import numpy as np
import torch


class Clips:
    """All utterances of ``directory``/wav.scp, in file order, int16 at 16 kHz."""

    def __init__(self, directory: Path) -> None:
        found = kaldiio.load_scp(str(directory / "wav.scp"))
        self.uids = list(found)
        self.wavs = [found[uid][1] for uid in self.uids]

    def crops(self, count: int, samples: int, rng: np.random.Generator) -> torch.Tensor:
        """[count, samples] float32 in [-1, 1]; an utterance shorter than a crop is filled up with zeros."""
        batch = np.zeros((count, samples), dtype=np.float32)
        for row, index in enumerate(rng.integers(len(self.wavs), size=count)):
            wav = self.wavs[index]
            start = rng.integers(max(len(wav) - samples, 0) + 1)
            part = wav[start : start + samples]
            batch[row, : len(part)] = part
        return torch.from_numpy(batch / 32768)
