"""Codec descriptions out of ESPnet's yaml blocks (Bagpiper train.yaml, OpusLM decoding yaml)."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from espnet2_vllm.codec.base import CodecDescription
from espnet2_vllm.errors import ConfigError, shown

# ESPnet's default of codec_max_token_per_frame (DiscreteAudioIO) and of max_token_per_frame (CodecTokenizer).
_DEFAULT_TOKENS_PER_FRAME = 8

_DISCRETE_AUDIO_KEYS = ("codec_choice", "codec_hf_model_tag", "codec_max_token_per_frame")
_TOKENIZER_KEYS = (
    "codec_choice",
    "codec_fs",
    "device",
    "dump_audio",
    "checkpoint_path",
    "config_path",
    "hf_model_tag",
    "max_token_per_frame",
)
_NESTED_KEYS = ("codec_config", "ssl_config")


def codec_from_yaml(block: Mapping[str, Any], *, where: str = "codec block") -> CodecDescription:
    """Any of the three shapes: Bagpiper's ``discrete_audio``, OpusLM's ``tokenizer`` nested or flat.

    ``where`` (file and key) opens every error message. Raises ConfigError.
    """
    _require_mapping(block, where)
    if "codec_config" not in block and any(key in block for key in _DISCRETE_AUDIO_KEYS[1:]):
        return codec_from_discrete_audio(block, where=where)
    return codec_from_tokenizer(block, where=where)


def codec_from_discrete_audio(
    block: Mapping[str, Any], *, where: str = "train.yaml: multimodal_io.discrete_audio"
) -> CodecDescription:
    """The ``multimodal_io.discrete_audio`` block of a Bagpiper train.yaml (ESPnet's DiscreteAudioIO arguments).

    Keys that do not begin with ``codec_`` (ssl, delay, weights) are not the codec's and are left alone.
    """
    _require_mapping(block, where)
    _refuse_unknown((key for key in block if str(key).startswith("codec_")), _DISCRETE_AUDIO_KEYS, where)
    kind = _kind(block, {"Xcodec": "xcodec", "ESPnet": "espnet"}, where)
    tag = _string(block, "codec_hf_model_tag", where)
    if tag is None:
        raise ConfigError(f"{where}: codec_hf_model_tag is missing; expected the directory or hub tag of the codec")
    return CodecDescription(kind, path=tag, num_codebooks=_tokens_per_frame(block, "codec_max_token_per_frame", where))


def codec_from_tokenizer(
    block: Mapping[str, Any], *, where: str = "decoding yaml: codec_ssl.tokenizer"
) -> CodecDescription:
    """The ``codec_ssl.tokenizer`` block of an OpusLM decoding yaml (ESPnet's CodecTokenizer arguments).

    Two shapes: ``{codec_config: {...}, ssl_config: {...}}``, and the arguments themselves. As in ESPnet,
    ``hf_model_tag`` wins over ``config_path`` and ``checkpoint_path``.
    """
    _require_mapping(block, where)
    if "codec_config" in block:
        _refuse_unknown(block, _NESTED_KEYS, where)
        return codec_from_tokenizer(block["codec_config"], where=f"{where}.codec_config")
    _refuse_unknown(block, _TOKENIZER_KEYS, where)
    kind = _kind(block, {"ESPnet": "espnet"}, where)
    common = {
        "num_codebooks": _tokens_per_frame(block, "max_token_per_frame", where),
        "sample_rate": _positive(block, "codec_fs", where),
    }
    tag = _string(block, "hf_model_tag", where)
    if tag is not None:
        return CodecDescription(kind, path=tag, **common)
    paths = {key: _string(block, key, where) for key in ("config_path", "checkpoint_path")}
    if None in paths.values():
        raise ConfigError(
            f"{where}: expected hf_model_tag, or both config_path and checkpoint_path, got "
            f"config_path={paths['config_path']!r} and checkpoint_path={paths['checkpoint_path']!r}"
        )
    return CodecDescription(kind, path=None, **paths, **common)


def _require_mapping(block: Any, where: str) -> None:
    if not isinstance(block, Mapping):
        raise ConfigError(f"{where}: expected a mapping that describes the codec, got {shown(block)}")


def _refuse_unknown(keys: Iterable[Any], known: tuple[str, ...], where: str) -> None:
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{where}: unknown key {shown(key)}, valid keys are {list(known)}{hint}")


def _kind(block: Mapping[str, Any], kinds: dict[str, str], where: str) -> str:
    choice = block.get("codec_choice")
    if not isinstance(choice, str) or choice not in kinds:
        raise ConfigError(f"{where}: codec_choice {shown(choice)} is not supported here; expected one of {list(kinds)}")
    return kinds[choice]


def _string(block: Mapping[str, Any], key: str, where: str) -> str | None:
    value = block.get(key)
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(f"{where}: {key} must be a path or a tag, got {shown(value)}")
    return value


def _positive(block: Mapping[str, Any], key: str, where: str) -> int | None:
    value = block.get(key)
    if value is not None and (type(value) is not int or value < 1):
        raise ConfigError(f"{where}: {key} must be a positive integer, got {shown(value)}")
    return value


def _tokens_per_frame(block: Mapping[str, Any], key: str, where: str) -> int:
    value = _positive(block, key, where)
    return _DEFAULT_TOKENS_PER_FRAME if value is None else value
