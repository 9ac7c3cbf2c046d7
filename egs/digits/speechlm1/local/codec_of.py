"""The recipe's codec, through the package's own loader."""

from __future__ import annotations

from pathlib import Path

from espnet2_vllm.codec import Codec, CodecDescription, load_codec


def codec_files(directory: Path) -> tuple[Path, Path]:
    """(config.yaml, its only epoch)."""
    found = sorted(directory.glob("*epoch.pth"))
    if len(found) != 1:
        raise ValueError(f"{directory} has {len(found)} files *epoch.pth, expected one: stage codec of run.sh makes it")
    return directory / "config.yaml", found[0]


def codec_of(directory: Path, device: str = "cpu") -> Codec:
    config, checkpoint = codec_files(directory)
    description = CodecDescription(kind="espnet", config_path=str(config), checkpoint_path=str(checkpoint))
    return load_codec(description, device=device)
