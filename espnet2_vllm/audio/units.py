"""Discrete units of speech: the hidden states of an SSL model of ESPnet's (XEUS), named by their nearest k-means centre.

Source: ``ESPnetSSLModel.inference_encode`` and the k-means step of ESPnet's tokenisation scripts (dump_km_label).
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointError, DataError

RATE = 16000
_LAYER = 18  # of the OpusLM releases


@dataclass(frozen=True)
class UnitsDescription:
    """Files of an SSL model and its k-means.

    Which checkpoint, layer and centres belong together is the training recipe's choice; a wrong combination gives units that look
    right and mean nothing.

    Attributes:
        config: ESPnet's training yaml of the SSL model.
        checkpoint: its weights.
        kmeans: ``.npy`` of centres [clusters, dimension], or scikit-learn's model as joblib wrote it (a pickle: only from whom you
            trust).
        layer: which of the encoder's hidden states, from 0.
    """

    config: Path
    checkpoint: Path
    kmeans: Path
    layer: int = _LAYER


class SpeechUnits:
    """Waveforms to units, one a frame.

    Args:
        clusters: of the model that reads the units.

    Raises:
        CheckpointError: if files are missing, damaged or do not fit each other.
        ConfigError: if ESPnet is not installed.
    """

    def __init__(self, description: UnitsDescription, *, clusters: int, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.layer = description.layer
        self._model = _load_model(description).to(self.device).eval().requires_grad_(False)
        centres = _load_centres(description.kmeans)
        if len(centres) != clusters:
            raise CheckpointError(
                f"{description.kmeans}: {len(centres)} centres, but the checkpoint knows {clusters} units"
            )
        self._centres = torch.from_numpy(centres).to(self.device).t()
        self._norms = self._centres.square().sum(0)
        found = self.hidden([np.zeros(RATE, np.float32)])[0].shape[1]
        if found != centres.shape[1]:
            raise CheckpointError(
                f"{description.kmeans}: centres of {centres.shape[1]} values, but layer {self.layer} of {description.checkpoint} "
                f"gives {found}"
            )

    def __call__(self, wavs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """[n] float32 at 16 kHz each -> [frames] int64 each."""
        return [self._nearest(hidden) for hidden in self.hidden(wavs)]

    @torch.inference_mode()
    def hidden(self, wavs: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """[n] float32 at 16 kHz each -> [frames, D] each. Clips of equal length go together, others would see padding."""
        found: list[Any] = [None] * len(wavs)
        lengths: dict[int, list[int]] = {}
        for place, wav in enumerate(wavs):
            lengths.setdefault(len(wav), []).append(place)
        for length, places in lengths.items():
            batch = torch.from_numpy(np.stack([wavs[place] for place in places])).to(self.device)
            sizes = torch.full((len(places),), length, device=self.device)
            try:
                _, layers, _ = self._model.inference_encode(batch, sizes, use_mask=False, use_final_output=False)
            except RuntimeError as error:
                raise DataError(f"the SSL model cannot take {length} samples at {RATE} Hz: {error}") from error
            if self.layer >= len(layers):
                raise CheckpointError(
                    f"the SSL model has {len(layers)} layers, there is no layer {self.layer} (from 0)"
                )
            for place, states in zip(places, layers[self.layer], strict=True):
                found[place] = states
        return found

    def _nearest(self, hidden: torch.Tensor) -> np.ndarray:
        distances = hidden.square().sum(1, keepdim=True) - 2 * hidden @ self._centres + self._norms
        return distances.argmin(1).cpu().numpy()


def _load_model(description: UnitsDescription) -> Any:
    from ..espnet_tree import import_espnet
    from ..safe_yaml import read_yaml

    for path in (description.config, description.checkpoint, description.kmeans):
        if not Path(path).is_file():
            raise CheckpointError(f"SSL units: no such file: {path}")
    task = import_espnet("espnet2.tasks.ssl", "SSL units need ESPnet's").SSLTask
    from typeguard import TypeCheckError

    arguments = read_yaml(description.config, CheckpointError)
    try:
        with torch.random.fork_rng(devices=[]):
            model = task.build_model(argparse.Namespace(**arguments))
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, TypeCheckError) as error:
        raise CheckpointError(
            f"{description.config}: ESPnet cannot build this SSL model: {type(error).__name__}: {error}"
        ) from error
    try:
        weights = torch.load(description.checkpoint, map_location="cpu", weights_only=True)
        weights = weights.get("module", weights.get("model", weights))
        left = model.load_state_dict(weights, strict=False)
    except (OSError, RuntimeError, EOFError, AttributeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{description.checkpoint}: cannot be loaded: {error}") from error
    # What only training needs may be missing or be there under other names.
    missing = [
        name for name in left.missing_keys if name.split(".")[0] in ("frontend", "preencoder", "encoder", "normalize")
    ]
    if missing:
        raise CheckpointError(
            f"{description.checkpoint} lacks {len(missing)} tensors of {description.config}: {', '.join(missing[:5])}"
        )
    return model


def _load_centres(path: Path) -> np.ndarray:
    """[clusters, D] float32."""
    try:
        if Path(path).suffix == ".npy":
            centres = np.load(path)
        else:
            import joblib

            centres = joblib.load(path).cluster_centers_
    except (OSError, ValueError, EOFError, AttributeError, ImportError, LookupError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path}: holds no k-means centres: {type(error).__name__}: {error}") from error
    if centres.ndim != 2:
        raise CheckpointError(f"{path}: centres of shape {centres.shape}, expected [clusters, dimension]")
    return np.ascontiguousarray(centres, dtype=np.float32)
