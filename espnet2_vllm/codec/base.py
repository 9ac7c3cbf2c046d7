"""What a codec is to the rest of the package: its description, its interface, and the rules around it.

Nothing here imports torch, so that descriptions can be read and written by light commands.
"""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from espnet2_vllm.errors import CheckpointError

# ESPnet's CodecTokenizer.decode (espnet2/speechlm/tokenizer/codec_tokenizer.py) gives zeros for this many frames or
# fewer; the writers of both OpusLM command lines go through it. AudioCoding.decode and Bagpiper have no such rule.
SILENT_FRAMES = 10


@dataclasses.dataclass(frozen=True)
class CodecDescription:
    """Which codec a checkpoint uses and where its files lie. Plain data: survives JSON.

    kind: name in the registry of ``espnet2_vllm.codec`` ('xcodec', 'espnet').
    path: directory or hub tag. xcodec: a transformers directory; espnet: an ESPnet model zoo package.
    config_path, checkpoint_path: espnet only, ``config.yaml`` and ``.pth``; they stand in place of ``path``.
    num_codebooks: keep the first so many codebooks (ESPnet's ``codec_max_token_per_frame``); a codec that has
        fewer keeps all of its own. None: all.
    sample_rate: in Hz, as the yaml states it (``codec_fs``); verified against the codec at loading. None: not stated.
    Raises CheckpointError where the fields contradict each other or have the wrong type.
    """

    kind: str
    path: str | None = None
    config_path: str | None = None
    checkpoint_path: str | None = None
    num_codebooks: int | None = None
    sample_rate: int | None = None

    def __post_init__(self) -> None:
        for name in ("path", "config_path", "checkpoint_path"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise CheckpointError(f"codec description: {name} must be a non-empty string or null, got {value!r}")
        for name in ("num_codebooks", "sample_rate"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise CheckpointError(f"codec description: {name} must be a positive integer or null, got {value!r}")
        if not isinstance(self.kind, str) or not self.kind:
            raise CheckpointError(f"codec description: kind must be a non-empty string, got {self.kind!r}")
        if self.path is None and self.config_path is None:
            raise CheckpointError(
                f"codec description of kind {self.kind!r} names no files: expected path (directory or hub tag), "
                "or config_path and checkpoint_path"
            )

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON takes them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "CodecDescription":
        """The inverse of ``to_dict``. Unknown keys and a missing ``kind`` raise CheckpointError."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise CheckpointError(f"codec description: unknown key {key!r}, valid keys are {known}{hint}")
        if "kind" not in values:
            raise CheckpointError(f"codec description: key 'kind' is missing, got {sorted(values)}")
        return cls(**values)


@runtime_checkable
class Codec(Protocol):
    """A neural codec with its weights: waveforms to codes and back.

    sample_rate in Hz; hop: samples a frame; num_codebooks: codes a frame; codebook_size: codes are 0..size-1.
    Every waveform is mono float32 at ``sample_rate``, in [-1, 1] apart from overshoot.
    """

    sample_rate: int
    hop: int
    num_codebooks: int
    codebook_size: int

    def encode(self, wav: np.ndarray) -> np.ndarray:
        """[n] float32 -> [floor(n / hop), num_codebooks] int64."""

    def encode_batch(self, wavs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Clips encoded TOGETHER as ESPnet does it: every clip gets the codes of the longest length.

        The clips are zero-padded on the right to the longest, cut to floor(longest / hop) frames and encoded as one
        batch; each result is [floor(longest / hop), num_codebooks] int64. The last frames of a shorter clip therefore
        differ from ``encode`` of that clip, and its frames from floor(n / hop) on are codes of the padding. The
        longest clip is encoded as if alone.
        """

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """[T, num_codebooks] integer -> [T * hop] float32."""

    def decode_batch(self, codes: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Each clip decoded as if alone (within float noise), in the order given."""


def decode_speech(codec: Codec, codes: np.ndarray, silent_frames: int = SILENT_FRAMES) -> np.ndarray:
    """Decode as ESPnet's CodecTokenizer does: ``silent_frames`` frames or fewer are zeros, hop samples a frame.

    For the OpusLM writers only. codes [T, num_codebooks] -> [T * hop] float32. The codes of a silent clip are not
    looked at, as in ESPnet.
    """
    if len(codes) <= silent_frames:
        return np.zeros(len(codes) * codec.hop, dtype=np.float32)
    return codec.decode(codes)


def check_codec_fits(codec: Codec, num_codebooks: int, codebook_size: int) -> None:
    """Raise CheckpointError unless the codec has exactly the codebooks that the layout has room for."""
    if (codec.num_codebooks, codec.codebook_size) != (num_codebooks, codebook_size):
        raise CheckpointError(
            f"the codec does not fit the layout: the codec gives {codec.num_codebooks} codebooks of "
            f"{codec.codebook_size} codes, the vocabulary has {num_codebooks} codebooks of {codebook_size}; name the "
            "codec that the model was trained with, or correct the number of codebooks kept "
            "(codec_max_token_per_frame)"
        )
