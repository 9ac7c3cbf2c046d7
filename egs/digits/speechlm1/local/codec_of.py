"""The recipe's codec, through the package's own loader."""

from __future__ import annotations

from pathlib import Path

from espnet2_vllm.codec import Codec, CodecDescription, load_codec


def codec_of(directory: Path, device: str = "cpu") -> Codec:
    (checkpoint,) = directory.glob("*epoch.pth")
    description = CodecDescription(
        kind="espnet", config_path=str(directory / "config.yaml"), checkpoint_path=str(checkpoint)
    )
    return load_codec(description, device=device)
