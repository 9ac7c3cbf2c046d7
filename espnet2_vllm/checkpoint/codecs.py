"""The codec's part of a conversion: how many codebooks of which size, which files to copy, which tensors to expect."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..codec import CodecDescription
from ..codec.locate import locate_directory
from ..errors import CheckpointError, ConfigError
from .describe import CodecPart
from .expected import read_hf_config, xcodec_shapes
from .sources import read_yaml, require

FOLDER = "codec"
_CONFIG = f"{FOLDER}/config.yaml"
_WEIGHTS = f"{FOLDER}/model.pth"


def xcodec_part(description: CodecDescription, base_dir: Path) -> tuple[CodecPart, list[int]]:
    """(part, ids per stream) of an Xcodec whose weights the checkpoint holds.

    Ids per stream are the codebook's and one pad (ESPnet's DiscreteAudioIO).
    """
    directory = locate_directory(description.path, base_dir=base_dir, what="Xcodec model", include=("*.json",))
    config = read_hf_config(directory, "Xcodec model")
    if config.model_type != "xcodec":
        raise CheckpointError(f"{directory} is a model of type {config.model_type!r}, expected 'xcodec'")
    books = _kept(description, config.num_quantizers)
    copies = {f"{FOLDER}/config.json": directory / "config.json"}
    part = CodecPart(dataclasses.replace(description, path=FOLDER), copies, xcodec_shapes(config), in_checkpoint=True)
    return part, [config.codebook_size + 1] * books


def espnet_codec_in_checkpoint(description: CodecDescription, base_dir: Path) -> tuple[CodecPart, list[int]]:
    """(part, ids per stream) of an ESPnet codec whose weights the checkpoint holds."""
    config, _ = espnet_codec_files(description, base_dir)
    books, size = espnet_codec_size(config)
    converted = dataclasses.replace(description, path=None, config_path=_CONFIG, checkpoint_path=_WEIGHTS)
    part = CodecPart(converted, {_CONFIG: config}, in_checkpoint=True)
    return part, [size + 1] * _kept(description, books)


def espnet_codec_beside(description: CodecDescription, base_dir: Path) -> CodecPart:
    """An ESPnet codec with its own weights, copied, so that the converted directory stands alone."""
    config, weights = espnet_codec_files(description, base_dir)
    converted = dataclasses.replace(description, path=None, config_path=_CONFIG, checkpoint_path=_WEIGHTS)
    return CodecPart(converted, {_CONFIG: config, _WEIGHTS: weights})


def espnet_codec_files(description: CodecDescription, base_dir: Path) -> tuple[Path, Path]:
    """(config.yaml, .pth) of an ESPnet codec."""
    from ..codec.espnet import find_files

    return find_files(description, base_dir, weights_needed=True)


def espnet_codec_size(config: Path) -> tuple[int, int]:
    """(codebooks, codes a codebook), as the yaml of ESPnet's GAN codecs states them (generator_params)."""
    arguments = read_yaml(config)
    found = [require(arguments, f"codec_conf.generator_params.quantizer_{key}", int, config) for key in ("n_q", "bins")]
    return found[0], found[1]


def check_size(part: CodecPart, books: int, size: int, where: str) -> None:
    """Raise CheckpointError if an ESPnet codec has not ``books`` codebooks of ``size`` codes."""
    available, bins = espnet_codec_size(part.copies[_CONFIG])
    if (_kept(part.description, available), bins) != (books, size):
        raise CheckpointError(
            f"{where}: the codec does not fit the layout: {part.copies[_CONFIG]} has {available} codebooks of {bins} codes "
            f"({_kept(part.description, available)} kept), the vocabulary has {books} codebooks of {size}"
        )


def decode_yaml_codec(path: Path) -> Mapping[str, Any] | None:
    """The ``codec_ssl.tokenizer`` block of an OpusLM decoding yaml; None if it has none."""
    block = read_yaml(path).get("codec_ssl")
    if block is None:
        return None
    if not isinstance(block, Mapping):
        raise ConfigError(f"{path}: codec_ssl is {block!r}, expected a mapping")
    return block.get("tokenizer")


def _kept(description: CodecDescription, available: int) -> int:
    wanted = description.num_codebooks
    return available if wanted is None else min(available, wanted)
