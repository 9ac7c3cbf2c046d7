"""OpusLM: an ESPnet1-style task directory, ``config.yaml`` and a flat state dict.

Source: espnet2/tasks/speechlm.py, espnet2/speechlm/module/huggingface.py, espnet2/speechlm/core_lm/ar_delay.py.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..codec import codec_from_tokenizer
from ..errors import CheckpointError
from ..layout import NUM_SPECIALS, Layout
from .codecs import check_size, decode_yaml_codec, espnet_codec_beside
from .describe import CodecPart, Description, check_dtype, find_backbone, find_tokenizer, tokenizer_files
from .sources import Source, require

DECODE_YAML = "decode_default.yaml"  # the decoding yaml of a release, which names the codec

# HFTransformerDecoder's defaults.
_BODY_DTYPE = "bfloat16"
_N_CTX = 8192

# What the preprocessor needs, with the default of ESPnet's SpeechLMTask.
_PREPROCESSOR = {"speaker_prompt_length": 150, "pad_speaker_prompt": True}

# Settings that would need other code, and the only value that is supported.
_ONLY = {
    "transformer": "huggingface",
    "corelm": "ar_delay",
    "subword_choice": "huggingface",
    "audio_modality": "codec_ssl",
    "encoder_decoder_format": False,
}


def describe(source: Source, *, vocab_order: str = "yaml") -> Description:
    """The description of an OpusLM checkpoint. ``vocab_order`` has no meaning here: ids come from ``token_list``."""
    arguments, where = source.arguments, source.train_config
    for key, value in _ONLY.items():
        if arguments.get(key, value) != value:
            raise CheckpointError(f"{where}: {key} is {arguments[key]!r}; only {value!r} is supported")
    layout = _layout(arguments, where)
    transformer = require(arguments, "transformer_conf", Mapping, where)
    name = require(arguments, "transformer_conf.hf_model_tag", str, where)
    directory, backbone = find_backbone(source, name, "transformer_conf.hf_model_tag", transformer.get("revision"))
    _check_text(layout, backbone.vocab_size, name, where)
    subword_model = require(arguments, "subword_model", str, where)
    tokenizer = find_tokenizer(source, subword_model, "subword_model")
    codec, notes = _codec(source, layout)
    facts = {key: arguments.get(key, default) for key, default in _PREPROCESSOR.items()}
    facts |= {
        "subword_model": subword_model,
        "n_ctx": transformer.get("n_ctx", _N_CTX),
        "codec_token_per_frame": arguments.get("codec_token_per_frame") or layout.num_streams,
    }
    files = (directory / "config.json", *tokenizer_files(tokenizer), *(codec.copies.values() if codec else ()))
    return Description(
        source=source,
        layout=layout,
        vocabulary=_sum(arguments["token_bias"], layout),
        backbone=backbone,
        backbone_dir=directory,
        tokenizer_dir=tokenizer,
        body_dtype=check_dtype(transformer.get("dtype", _BODY_DTYPE), "transformer_conf.dtype", where, backbone),
        body_dtype_key="transformer_conf.dtype" + ("" if "dtype" in transformer else ", by default"),
        stream_rows_spare=True,
        preprocessor=facts,
        codec=codec,
        files=(*files, *([source.base_dir / DECODE_YAML] if (source.base_dir / DECODE_YAML).is_file() else [])),
        notes=notes,
    )


def token_names(source: Source, layout: Layout) -> list[str]:
    """The names of the text ids, in their order, as ``token_list`` has them."""
    return [str(name) for name in source.arguments["token_list"][layout.text.start : layout.text.stop]]


def _layout(arguments: Mapping[str, Any], where: Path) -> Layout:
    token_list = require(arguments, "token_list", list, where)
    token_bias = require(arguments, "token_bias", Mapping, where)
    for place, name in enumerate(token_list[:NUM_SPECIALS]):
        if not isinstance(name, str):
            raise CheckpointError(
                f"{where}: token_list has {name!r} as entry {place}, expected the name of a special token"
            )
    for name, bounds in token_bias.items():
        if not isinstance(bounds, list) or [type(bound) for bound in bounds] != [int, int]:
            raise CheckpointError(f"{where}: token_bias.{name} is {bounds!r}, expected [first id, id behind the last]")
    key = "codec_token_in_use" if arguments.get("codec_token_in_use") else "codec_token_per_frame"
    streams = require(arguments, key, int, where)
    try:
        layout = Layout.opuslm(token_list, token_bias, streams)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
    if len(token_list) != layout.vocab_size:
        raise CheckpointError(
            f"{where}: token_list has {len(token_list)} entries, but token_bias ends at {layout.vocab_size}"
        )
    return layout


def _check_text(layout: Layout, size: int, name: str, where: Path) -> None:
    if layout.text.size != size:
        raise CheckpointError(
            f"{where}: token_bias gives text {layout.text.size} ids, but the backbone {name!r} (hf_model_tag) has a "
            f"vocabulary of {size}; is it the backbone that the model was trained from?"
        )


def _sum(token_bias: Mapping[str, Any], layout: Layout) -> str:
    blocks = sorted((start, name, stop - start) for name, (start, stop) in token_bias.items())
    listed = [f"{size} {name}" for _, name, size in blocks if name != "special_token"]
    return " + ".join([f"{NUM_SPECIALS} special", *listed]) + f" = {layout.vocab_size} ids"


def _codec(source: Source, layout: Layout) -> tuple[CodecPart | None, tuple[str, ...]]:
    path = source.base_dir / DECODE_YAML
    block = decode_yaml_codec(path) if path.is_file() else None
    if block is None:
        why = "names none" if path.is_file() else "does not exist"
        return None, (f"no codec: {path} {why}, so the decoding yaml must name it (codec_ssl.tokenizer)",)
    where = f"{path}: codec_ssl.tokenizer"
    description = codec_from_tokenizer(block, where=where)
    try:
        part = espnet_codec_beside(description, source.base_dir)
    except CheckpointError as error:
        # It is no part of the checkpoint, and a release may name a hub tag or a folder of the machine that trained it.
        by_tag = CodecPart(description) if description.path is not None else None
        return by_tag, (f"the codec is not at hand and will be looked for when audio is decoded ({where}: {error})",)
    check_size(part, len(layout.codec_streams), layout.code_spans[1].size, where)
    return part, ()
