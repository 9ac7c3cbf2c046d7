"""A checkpoint's audio tower (Qwen3-Omni's or Qwen2.5-Omni's) and linear adaptor: waveforms to input vectors, many at once.

Modules and their arithmetic are transformers' own. Chunking and attention are done here in a form that costs the same number of
kernels for one clip and for many (transformers attends window by window); a test compares the two.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import linear, pad, scaled_dot_product_attention

from ..checkpoint.expected import encoder_class
from ..errors import CheckpointError, DataError
from ..precision import convolutions
from .encoders import ENCODERS
from .features import LogMel
from .listening import Listening, audio_settings

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

PREFIX = "audio_tower."
_REMEMBERED = 2**28  # bytes of vectors that stay on the device, so that a clip that comes again has the very same


class AudioTower:
    """The continuous encoder of a checkpoint, with its own weights.

    Args:
        checkpoint: a converted directory with ``continuous_audio``.
        dtype: of weights and vectors, that of the model.
        device: torch's name.

    Raises:
        CheckpointError: if the checkpoint has no such encoder, or its tensors do not fit.
    """

    def __init__(self, checkpoint: Checkpoint, *, dtype: str = "float32", device: str = "cpu") -> None:
        from transformers import WhisperFeatureExtractor

        self.listening = Listening.of(checkpoint)
        self.dtype, self.device = getattr(torch, dtype), torch.device(device)
        folder = Path(checkpoint.path)
        preprocessor = checkpoint.continuous_audio["preprocessor_config"]
        extractor = WhisperFeatureExtractor.from_pretrained(folder / preprocessor, local_files_only=True)
        self._log_mel = LogMel(extractor, self.device)
        self._tower, self._adaptor = _load(checkpoint, self.listening.encoder, self.dtype, self.device)
        self._encoder = ENCODERS[self.listening.encoder](self._tower)
        self._windows = _Windows()
        for layer in self._tower.layers:
            layer.self_attn = _WindowAttention(layer.self_attn, self._windows)
        self._known: OrderedDict[_Clip, torch.Tensor] = OrderedDict()

    def features(self, wav: np.ndarray) -> np.ndarray:
        """[n] float32 at the encoder's rate -> [floor(n / hop), bins] float32: log-mel of the normalised waveform.

        Nothing is padded to 30 s (ESPnet gives the waveform's own length as ``max_length``).
        """
        return self._log_mel([wav])[0].cpu().numpy()

    def encode(self, prompts: Iterable[Sequence[np.ndarray]]) -> list[list[torch.Tensor]]:
        """Vectors of the clips of many prompts: of each prompt and clip [rows, H] on the CPU, in the tower's dtype.

        The clips of one prompt are what ESPnet encodes as one batch: a chunk is padded to the longest chunk among them, which
        for prompts whose clips are all shorter than a chunk changes the last rows. Prompts do not influence each other.

        Args:
            prompts: clips as ``Listening.prepare`` gives them.

        Raises:
            DataError: if a vector is NaN or infinite, of samples far beyond full scale for one.
        """
        prompts = [list(clips) for clips in prompts]
        chunk = 2 * self.listening.half_chunk
        names, todo = [], {}
        for clips in prompts:
            width = min(chunk, max((len(wav) // self.listening.hop for wav in clips), default=0))
            names.append([_Clip(wav, width) for wav in clips])
            for name in names[-1]:
                if name not in self._known:
                    todo.setdefault(width, {})[name] = name.wav
        made: dict[_Clip, torch.Tensor] = {}
        for width, clips in todo.items():
            vectors, rows = self._vectors(self._log_mel(list(clips.values())), width)
            if not vectors.isfinite().all():
                raise DataError(
                    f"the audio encoder gives NaN or infinite values in {self.dtype}; is the recording beyond all scale, or "
                    "too loud for this dtype?"
                )
            made.update(zip(clips, _to_host(vectors).split(rows), strict=True))
            self._known.update(zip(clips, vectors.split(rows), strict=True))
        found = [[made[name] if name in made else _to_host(self._known[name]) for name in clips] for clips in names]
        self._forget()
        return found

    def _forget(self) -> None:
        """Drops what was encoded first, until the rest is no larger than it may be."""
        size = sum(vectors.nbytes for vectors in self._known.values())
        while size > _REMEMBERED:
            size -= self._known.popitem(last=False)[1].nbytes

    def encode_features(self, features: Sequence[torch.Tensor], width: int) -> list[torch.Tensor]:
        """[frames, bins] each -> [rows, H] each, every chunk padded to ``width`` frames."""
        vectors, rows = self._vectors(features, width)
        return list(_to_host(vectors).split(rows))

    @torch.inference_mode()
    def _vectors(self, features: Sequence[torch.Tensor], width: int) -> tuple[torch.Tensor, list[int]]:
        """All vectors on the device, and the rows of each clip."""
        rows = [self.listening.rows_of_frames(len(mel)) for mel in features]
        with convolutions(self.device):
            hidden, of_clips = self._hear(features, width)
        vectors = linear(self._encoder.finish(hidden, of_clips), *self._adaptor)
        assert len(vectors) == sum(rows), f"the tower gave {len(vectors)} rows for {rows}"
        return vectors, rows

    def _hear(self, features: Sequence[torch.Tensor], width: int) -> tuple[torch.Tensor, list[int]]:
        """The layers' output of all clips, [rows, d_model], and how many rows are each one's."""
        tower = self._tower
        chunks = [pad(mel, (0, 0, 0, -len(mel) % width)).unflatten(0, (-1, width)) for mel in features]
        frames = [min(width, len(mel) - start) for mel in features for start in range(0, len(mel), width)]
        of_clips = [self._rows_of_chunks(len(mel), width) for mel in features]
        of_chunks = [rows for clip in of_clips for rows in clip]
        embedded = self._encoder.convolve(torch.cat(chunks).to(self.device, self.dtype), frames)
        embedded = embedded + tower.positional_embedding.positional_embedding[: embedded.shape[1]].to(embedded)
        kept = np.concatenate([place * embedded.shape[1] + np.arange(n) for place, n in enumerate(of_chunks)])
        hidden = embedded.flatten(0, 1)[torch.from_numpy(kept).to(self.device)]
        window = self._encoder.window(width)
        lengths = [min(window, sum(clip) - start) for clip in of_clips for start in range(0, sum(clip), window)]
        self._windows.set(lengths, self.device, _has_flash_attention(self.device, self.dtype))
        for layer in tower.layers:
            hidden = layer(hidden, None)[0]
        return hidden, list(map(sum, of_clips))

    def _rows_of_chunks(self, frames: int, width: int) -> list[int]:
        """Rows behind the convolutions of each chunk of a clip."""
        return [self._encoder.rows_of_chunk(min(frames - start, width)) for start in range(0, frames, width)]


def _to_host(vectors: torch.Tensor) -> torch.Tensor:
    # Pinned memory comes from torch's own pool; fresh pages would take longer than the copy.
    return torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=vectors.is_cuda).copy_(vectors)


class _Clip:
    """A clip as a key: equal to another of the same samples that is padded alike."""

    def __init__(self, wav: np.ndarray, width: int) -> None:
        self.wav, self.width = wav, width
        # A few samples tell most clips apart; all of them are compared where these are equal.
        self._hash = hash((len(wav), width, wav[:: len(wav) // 64 + 1].tobytes()))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Clip) and self.width == other.width and np.array_equal(self.wav, other.wav)


def _has_flash_attention(device: torch.device, dtype: torch.dtype) -> bool:
    """It is for numbers of 16 bits, on GPUs from Ampere on."""
    halves = (torch.bfloat16, torch.float16)
    return device.type == "cuda" and dtype in halves and torch.cuda.get_device_capability(device) >= (8, 0)


class _Windows:
    """Which rows attend to one another: windows of one clip each, as flash attention's ``cu_seqlens`` has them."""

    def set(self, lengths: Sequence[int], device: torch.device, packed: bool) -> None:
        """``packed``: for flash attention; otherwise side by side, filled up."""
        counts, width = np.asarray(lengths), max(lengths)
        self.packed, self.width = packed, width
        if packed:
            self.ends = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)).to(device)
            return
        inside = np.arange(width)[None, :] < counts[:, None]
        starts = np.cumsum(counts) - counts
        places = np.where(inside, starts[:, None] + np.arange(width)[None, :], 0)
        self.places = torch.from_numpy(places).to(device)
        self.back = torch.from_numpy(np.flatnonzero(inside)).to(device)
        self.mask = None if inside.all() else torch.from_numpy(inside[:, None, None, :]).to(device)


class _WindowAttention(torch.nn.Module):
    """A layer's attention with all windows in one call, packed or the shorter ones masked."""

    def __init__(self, original: Any, windows: _Windows) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            getattr(original, f"{name}_proj") for name in ("q", "k", "v", "out")
        )
        self.heads, self.scaling, self.windows = original.num_heads, original.scaling, windows

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """[rows, d] -> [rows, d]."""
        windows = self.windows
        heads = [
            projection(hidden_states).unflatten(-1, (self.heads, -1))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        ]
        if windows.packed:
            sizes = (windows.ends, windows.ends, windows.width, windows.width)
            return self.out_proj(varlen_attn(*heads, *sizes, scale=self.scaling).flatten(1))
        query, key, value = (part[windows.places].transpose(1, 2) for part in heads)
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=windows.mask, scale=self.scaling)
        return self.out_proj(mixed.transpose(1, 2).flatten(2).flatten(0, 1)[windows.back])


def _load(
    checkpoint: Checkpoint, encoder: str, dtype: torch.dtype, device: torch.device
) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """The tower, and weight and bias of the adaptor."""
    from safetensors.torch import load_file

    path = Path(checkpoint.path) / checkpoint.continuous_audio["weights"]
    made_of = encoder_class(encoder)
    config = made_of.config_class.from_dict(dict(audio_settings(checkpoint)))
    try:
        tensors = load_file(path)
        tower = made_of._from_config(config, dtype=dtype)
        tower.load_state_dict({name[len(PREFIX) :]: t for name, t in tensors.items() if name.startswith(PREFIX)})
        adaptor = (tensors["adaptor.weight"], tensors["adaptor.bias"])
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot be loaded as {config.model_type} and adaptor ({type(error).__name__}: {error}); convert again"
        ) from error
    tower.to(device, dtype).eval().requires_grad_(False)
    return tower, tuple(tensor.to(device, dtype) for tensor in adaptor)
