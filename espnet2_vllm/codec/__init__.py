"""Codecs behind one interface. ``load_codec`` turns a ``CodecDescription`` into a ``Codec``.

A new codec is one module with a function ``load(description, *, device, base_dir, state_dict)`` and one line in
``_MODULES``. The modules are imported when a codec of that kind is loaded, because they import torch and ESPnet.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from espnet2_vllm.codec.base import SILENT_FRAMES, Codec, CodecDescription, check_codec_fits, decode_speech
from espnet2_vllm.codec.from_yaml import codec_from_discrete_audio, codec_from_tokenizer, codec_from_yaml
from espnet2_vllm.errors import CheckpointError

__all__ = [
    "SILENT_FRAMES",
    "Codec",
    "CodecDescription",
    "check_codec_fits",
    "codec_files",
    "codec_from_discrete_audio",
    "codec_from_tokenizer",
    "codec_from_yaml",
    "decode_speech",
    "load_codec",
]

_MODULES = {
    "xcodec": "espnet2_vllm.codec.xcodec",
    "espnet": "espnet2_vllm.codec.espnet",
}


def load_codec(
    description: CodecDescription,
    *,
    device: str = "cpu",
    base_dir: str | Path | None = None,
    state_dict: Mapping[str, Any] | None = None,
) -> Codec:
    """Build the codec that ``description`` names, in float32 on ``device``, ready for inference.

    Relative paths are looked up under ``base_dir`` first, then under the working directory, then as a hub tag in the
    local caches. Nothing is downloaded. ``state_dict``: weights from the checkpoint itself (names as in XcodecModel,
    or as in ESPnet's GAN codec model); they win over the files, which then need to hold the configuration only.

    Raises CheckpointError: unknown kind, files missing, damaged or of another codec, tensors missing or unknown, or a
    sample rate other than the stated one. The message says what was looked for and where.
    """
    if description.kind not in _MODULES:
        raise CheckpointError(f"codec of unknown kind {description.kind!r}; known are {sorted(_MODULES)}")
    module = importlib.import_module(_MODULES[description.kind])
    base = None if base_dir is None else Path(base_dir)
    codec = module.load(description, device=device, base_dir=base, state_dict=state_dict)
    if description.sample_rate not in (None, codec.sample_rate):
        raise CheckpointError(
            f"the codec runs at {codec.sample_rate} Hz, but its description states {description.sample_rate} Hz "
            "(codec_fs); correct the one that is wrong"
        )
    return codec


def codec_files(description: CodecDescription, base_dir: str | Path | None = None) -> list[Path]:
    """The files that ``load_codec`` reads: what the codec gives changes with them, and with nothing else.

    Raises CheckpointError: unknown kind, or files missing.
    """
    if description.kind not in _MODULES:
        raise CheckpointError(f"codec of unknown kind {description.kind!r}; known are {sorted(_MODULES)}")
    return importlib.import_module(_MODULES[description.kind]).files(
        description, None if base_dir is None else Path(base_dir)
    )
