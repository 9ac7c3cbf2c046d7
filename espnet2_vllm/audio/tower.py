"""Qwen3-Omni's audio tower and the checkpoint's linear adaptor: waveforms to input vectors of the backbone, many at once.

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
from torch.nn.functional import gelu, linear, pad, scaled_dot_product_attention

from ..errors import CheckpointError, DataError
from ..precision import convolutions
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
        self._tower, self._adaptor = _load(checkpoint, self.dtype, self.device)
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
            hidden = self._hear(features, width)
        vectors = linear(self._project(hidden), *self._adaptor)
        assert len(vectors) == sum(rows), f"the tower gave {len(vectors)} rows for {rows}"
        return vectors, rows

    def _hear(self, features: Sequence[torch.Tensor], width: int) -> torch.Tensor:
        """The layers' output of all clips, [rows, d_model]."""
        tower, limit = self._tower, 2 * self.listening.half_chunk
        chunks = [pad(mel, (0, 0, 0, -len(mel) % width)).unflatten(0, (-1, width)) for mel in features]
        of_chunks = [
            self.listening.rows_of_frames(min(len(mel) - start, limit))
            for mel in features
            for start in range(0, len(mel), width)
        ]
        images = torch.cat(chunks).to(self.device, self.dtype).transpose(1, 2).unsqueeze(1)
        embedded = torch.cat([self._convolve(part) for part in images.split(tower.conv_chunksize)])
        embedded = embedded + tower.positional_embedding.positional_embedding[: embedded.shape[1]].to(embedded)
        kept = np.concatenate([place * embedded.shape[1] + np.arange(n) for place, n in enumerate(of_chunks)])
        hidden = embedded.flatten(0, 1)[torch.from_numpy(kept).to(self.device)]
        window = self.listening.rows_of_frames(width) * (tower.n_window_infer // limit)
        lengths = [
            min(window, rows - start)
            for rows in (self.listening.rows_of_frames(len(mel)) for mel in features)
            for start in range(0, rows, window)
        ]
        self._windows.set(lengths, self.device, _has_flash_attention(self.device, self.dtype))
        for layer in tower.layers:
            hidden = layer(hidden, None)[0]
        return hidden

    def _convolve(self, images: torch.Tensor) -> torch.Tensor:
        """[chunks, 1, bins, frames] -> [chunks, rows, d_model]."""
        tower = self._tower
        images = images.contiguous(memory_format=torch.channels_last)
        for convolution in (tower.conv2d1, tower.conv2d2, tower.conv2d3):
            images = gelu(convolution(images))
        return tower.conv_out(images.permute(0, 3, 1, 2).flatten(2))

    def _project(self, hidden: torch.Tensor) -> torch.Tensor:
        """What ESPnet calls the encoder's output, [rows, output_dim]."""
        tower = self._tower
        return tower.proj2(tower.act(tower.proj1(tower.ln_post(hidden))))


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


def _load(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """The tower, and weight and bias of the adaptor."""
    from safetensors.torch import load_file
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeAudioEncoderConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

    path = Path(checkpoint.path) / checkpoint.continuous_audio["weights"]
    config = Qwen3OmniMoeAudioEncoderConfig.from_dict(dict(audio_settings(checkpoint)))
    try:
        tensors = load_file(path)
        tower = Qwen3OmniMoeAudioEncoder._from_config(config, dtype=dtype)
        tower.load_state_dict({name[len(PREFIX) :]: t for name, t in tensors.items() if name.startswith(PREFIX)})
        adaptor = (tensors["adaptor.weight"], tensors["adaptor.bias"])
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot be loaded as {config.model_type} and adaptor ({type(error).__name__}: {error}); convert again"
        ) from error
    # cuDNN convolves this layout several times faster.
    for convolution in (tower.conv2d1, tower.conv2d2, tower.conv2d3):
        convolution.to(memory_format=torch.channels_last)
    tower.to(device, dtype).eval().requires_grad_(False)
    return tower, tuple(tensor.to(device, dtype) for tensor in adaptor)
