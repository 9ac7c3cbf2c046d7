"""Bagpiper: ESPnet's new-style SpeechLM, ``train.yaml`` and one strict state dict that holds the codec as well.

Source: espnet2/speechlm/model/speechlm/speechlm_job.py, lm/parallel.py, multimodal_io/{text,audio}.py.
"""

import dataclasses
import functools
import logging
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..codec import codec_from_discrete_audio
from ..codec.locate import locate_directory
from ..errors import CheckpointError
from ..layout import NUM_SPECIALS, Layout, Span, bagpiper_offsets
from .codecs import espnet_codec_in_checkpoint, xcodec_part
from .describe import (
    CodecPart,
    ContinuousAudioPart,
    Description,
    check_dtype,
    find_backbone,
    find_tokenizer,
    tokenizer_files,
)
from .expected import continuous_audio_shapes, encoder_config, read_hf_config
from .sources import Source, require

_CODECS = {"xcodec": xcodec_part, "espnet": espnet_codec_in_checkpoint}
_DISCRETE = ("text", "discrete_audio")
_CONTINUOUS = "continuous_audio"
_RECORD = "vocab_intervals"  # key of the yaml, written by ESPnet's trainer
_MODEL_CHOICES = ("parallel", "parallel_pp")  # the same model, trained as a whole or in the stages of a pipeline
# Of model_conf: what is read here; what is of training, of older ESPnet's too; how transformers finds and holds the weights.
_MODEL_CONF = (
    *("dtype", "torch_dtype", "tie_word_embeddings", "revision"),
    *("z_loss_weight", "compile_transformer_body", "freeze_text_embeddings", "attention_dropout"),
    *(
        "attn_implementation",
        "cache_dir",
        "device_map",
        "force_download",
        "local_files_only",
        "low_cpu_mem_usage",
        "token",
    ),
    *("trust_remote_code", "use_cache", "use_safetensors"),
)
_ENCODER, _ENCODER_DTYPE = "Qwen/Qwen2.5-Omni-7B", "bfloat16"  # defaults of ContinuousAudioIO

log = logging.getLogger(__name__)


def describe(source: Source, *, vocab_order: str = "yaml") -> Description:
    """The description of a Bagpiper checkpoint.

    ``vocab_order``: ``name`` or ``yaml``, see ``layout.bagpiper_offsets``.
    """
    arguments, where = source.arguments, source.train_config
    ios = _check_supported(arguments, where)
    conf = _model_conf(arguments, where)
    name = require(arguments, "model.model_hf_tag", str, where)
    directory, backbone = find_backbone(source, name, "model.model_hf_tag", conf.get("revision"))
    tokenizer_name = require(arguments, "multimodal_io.text.tokenizer_name", str, where)
    tokenizer = find_tokenizer(source, tokenizer_name, "multimodal_io.text.tokenizer_name")
    text_size = _text_size(backbone, tokenizer, tokenizer_name, name, where)
    description = codec_from_discrete_audio(ios["discrete_audio"], where=f"{where}: multimodal_io.discrete_audio")
    codec, stream_sizes = _CODECS[description.kind](description, source.base_dir)
    layout = _layout(arguments, text_size, stream_sizes, vocab_order, where)
    continuous = _continuous(source, ios[_CONTINUOUS], backbone.hidden_size) if _CONTINUOUS in ios else None
    dtype_key = "torch_dtype" if "torch_dtype" in conf and "dtype" not in conf else "dtype"
    dtype = "auto" if conf.get(dtype_key) is None else conf[dtype_key]  # the default of transformers 5
    return Description(
        source=source,
        layout=layout,
        vocabulary=_sum(text_size, stream_sizes, layout),
        backbone=backbone,
        backbone_dir=directory,
        tokenizer_dir=tokenizer,
        body_dtype=check_dtype(dtype, f"model.model_conf.{dtype_key}", where, backbone),
        body_dtype_key=f"model.model_conf.{dtype_key}"
        + ("" if dtype_key in conf else ", by default the backbone's own"),
        stream_rows_spare=False,
        tied=conf.get("tie_word_embeddings", False),
        preprocessor=_preprocessor(arguments, ios, where),
        codec=codec,
        continuous_audio=continuous,
        files=_files(directory, tokenizer, codec, continuous),
        notes=(*_order_notes(arguments, layout, where), *_missing_encoder(continuous)),
    )


def _check_supported(arguments: Mapping[str, Any], where: Path) -> Mapping[str, Mapping[str, Any]]:
    """The IOs of the yaml, after everything that would need other code has been refused."""
    if arguments.get("job_type", "speechlm") != "speechlm":
        raise CheckpointError(f"{where}: job_type is {arguments['job_type']!r}, expected 'speechlm'")
    if require(arguments, "model.model_choice", str, where) not in _MODEL_CHOICES:
        raise CheckpointError(
            f"{where}: model.model_choice is {arguments['model']['model_choice']!r}; supported are {', '.join(_MODEL_CHOICES)}"
        )
    ios = require(arguments, "multimodal_io", Mapping, where)
    for name in ios:
        if name not in (*_DISCRETE, _CONTINUOUS):
            raise CheckpointError(
                f"{where}: multimodal_io.{name} is not supported; known are {', '.join((*_DISCRETE, _CONTINUOUS))}"
            )
    for name in _DISCRETE:
        require(arguments, f"multimodal_io.{name}", Mapping, where)
    audio = ios["discrete_audio"]
    if audio.get("ssl_choice") is not None:
        raise CheckpointError(
            f"{where}: multimodal_io.discrete_audio.ssl_choice is {audio['ssl_choice']!r}; a Bagpiper model with SSL units "
            "beside the codec is not supported"
        )
    if audio.get("delay_interleave", False) is not True:
        raise CheckpointError(
            f"{where}: multimodal_io.discrete_audio.delay_interleave is {audio.get('delay_interleave', False)!r}; only "
            "models with delayed streams (true) are supported"
        )
    return ios


def _model_conf(arguments: Mapping[str, Any], where: Path) -> Mapping[str, Any]:
    """``model.model_conf``: what ESPnet gives to transformers, where any other key could change the model."""
    conf = arguments["model"].get("model_conf") or {}
    if not isinstance(conf, Mapping):
        raise CheckpointError(f"{where}: model.model_conf is {conf!r}, expected a mapping")
    for key, value in conf.items():
        if key not in _MODEL_CONF:
            raise CheckpointError(
                f"{where}: model.model_conf.{key} is {value!r}, which is not known here and could change the model; known are "
                f"{', '.join(_MODEL_CONF)}"
            )
    tied = conf.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise CheckpointError(f"{where}: model.model_conf.tie_word_embeddings is {tied!r}, expected true or false")
    return conf


def _text_size(backbone: Any, tokenizer: Path, tokenizer_name: str, name: str, where: Path) -> int:
    """ESPnet sizes the text vocabulary by the configuration beside the tokenizer and demands the backbone's size."""
    size = read_hf_config(tokenizer, f"multimodal_io.text.tokenizer_name of {where.name}").vocab_size
    if size != backbone.vocab_size:
        raise CheckpointError(
            f"{where}: the vocabulary of the tokenizer {tokenizer_name!r} has {size} ids, that of the backbone {name!r} "
            f"{backbone.vocab_size}; ESPnet refuses such a pair, so one of the two names is wrong"
        )
    return size


def _layout(
    arguments: Mapping[str, Any], text_size: int, stream_sizes: list[int], vocab_order: str, where: Path
) -> Layout:
    ios = arguments["multimodal_io"]
    sizes = {"text": text_size, "discrete_audio": sum(stream_sizes)}
    offsets = bagpiper_offsets(
        {name: sizes[name] for name in ios if name in sizes}, vocab_order=vocab_order, source=str(where)
    )
    text, audio = offsets["text"], offsets["discrete_audio"]
    plain = Layout.bagpiper(text_size, stream_sizes)
    shift = audio - plain.streams[0].start
    layout = dataclasses.replace(
        plain,
        text=Span(text, text + text_size),
        streams=tuple(Span(span.start + shift, span.stop + shift) for span in plain.streams),
    )
    _check_record(arguments.get(_RECORD), layout, vocab_order, where)
    return layout


def _check_record(record: Any, layout: Layout, vocab_order: str, where: Path) -> None:
    """Raises CheckpointError if ESPnet's trainer wrote down other ids into the yaml than ``layout`` has."""
    if record is None:
        return
    streams = [list(span) for span in layout.streams]
    ours = {"special_token": [[0, NUM_SPECIALS]], "text": [list(layout.text)], "discrete_audio": streams}
    try:
        theirs = {name: [[int(start), int(stop)] for start, stop in spans] for name, spans in record.items()}
        order = sorted(theirs, key=lambda name: theirs[name][0])
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"{where}: {_RECORD} is {reprlib.repr(record)}, expected [[first id, id behind the last], ...] for "
            f"each of {', '.join(ours)}"
        ) from error
    if theirs == ours:
        return
    differing = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    said = "; ".join(f"{name}: {theirs.get(name)} recorded, {ours.get(name)} here" for name in differing)
    raise CheckpointError(
        f"{where}: {_RECORD} records the ids in the order {', '.join(order)}, but by --vocab-order {vocab_order} they are in the "
        f"order {', '.join(sorted(ours, key=lambda name: ours[name][0]))} ({said}). Put the keys of multimodal_io back into the "
        "order that they were trained in (were they sorted when the yaml was saved again?), or name it with --vocab-order"
    )


def _order_notes(arguments: Mapping[str, Any], layout: Layout, where: Path) -> tuple[str, ...]:
    """Said where nothing confirms an order that a sorted yaml would have as well."""
    if _RECORD in arguments or layout.text.start == NUM_SPECIALS:
        return ()
    note = (
        f"audio has the ids before text, since {where.name} names discrete_audio first and has no {_RECORD}; if its keys were "
        "sorted after training, nothing recognisable will be decoded: --vocab-order name"
    )
    _warn_once(f"{where}: {note}")
    return (note,)


@functools.cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


def _sum(text_size: int, stream_sizes: list[int], layout: Layout) -> str:
    return (
        f"{NUM_SPECIALS} special + {text_size} text + {len(stream_sizes)} streams x {stream_sizes[0]} audio "
        f"= {layout.vocab_size} ids"
    )


def _preprocessor(arguments: Mapping[str, Any], ios: Mapping[str, Any], where: Path) -> dict[str, Any]:
    facts = {key: require(arguments, f"preprocessor.{key}", str, where) for key in ("audio_input", "audio_output")}
    for key, io in facts.items():
        if io not in ios:
            raise CheckpointError(f"{where}: preprocessor.{key} is {io!r}, which multimodal_io does not have")
    if facts["audio_output"] != "discrete_audio":
        raise CheckpointError(
            f"{where}: preprocessor.audio_output is {facts['audio_output']!r}, expected 'discrete_audio'"
        )
    return facts


def _continuous(source: Source, block: Mapping[str, Any], hidden_size: int) -> ContinuousAudioPart:
    where = f"{source.train_config}: multimodal_io.{_CONTINUOUS}"
    if block.get("encoder_choice", "huggingface") != "huggingface":
        raise CheckpointError(f"{where}.encoder_choice is {block['encoder_choice']!r}; only 'huggingface' is supported")
    tag = require({"encoder_hf_model_tag": _ENCODER, **block}, "encoder_hf_model_tag", str, where)
    dtype = check_dtype(block.get("dtype", _ENCODER_DTYPE), f"{_CONTINUOUS}.dtype", source.train_config)
    facts = {"encoder": tag, "dtype": dtype, "weights": f"{_CONTINUOUS}/model.safetensors"}
    directory = _encoder_folder(tag, source.base_dir)
    if directory is None:
        return ContinuousAudioPart(facts | {"config": None, "preprocessor_config": None}, dtype=dtype)
    audio = encoder_config(read_hf_config(directory, where))
    copies = {f"{_CONTINUOUS}/config.json": directory / "config.json"}
    preprocessor = directory / "preprocessor_config.json"
    if preprocessor.is_file():
        copies[f"{_CONTINUOUS}/preprocessor_config.json"] = preprocessor
    facts |= {"config": f"{_CONTINUOUS}/config.json"}
    facts |= {"preprocessor_config": f"{_CONTINUOUS}/{preprocessor.name}" if preprocessor.is_file() else None}
    return ContinuousAudioPart(facts, copies, continuous_audio_shapes(audio, hidden_size), dtype)


def _encoder_folder(tag: str, base_dir: Path) -> Path | None:
    """None where only the weights are at hand: all but continuous audio input works without its configuration."""
    try:
        return locate_directory(
            tag, base_dir=base_dir, what="audio encoder", include=("config.json", "preprocessor_config.json")
        )
    except CheckpointError:
        return None


def _missing_encoder(continuous: ContinuousAudioPart | None) -> tuple[str, ...]:
    if continuous is None or continuous.shapes is not None:
        return ()
    tag = continuous.facts["encoder"]
    return (
        f"the configuration of the audio encoder {tag} is not on this machine, so its tensors were kept unchecked and "
        f"continuous audio input will be refused; `hf download {tag} config.json preprocessor_config.json` and convert again",
    )


def _files(
    backbone: Path, tokenizer: Path, codec: CodecPart, continuous: ContinuousAudioPart | None
) -> tuple[Path, ...]:
    copies = [*codec.copies.values(), *(continuous.copies.values() if continuous else ())]
    return (backbone / "config.json", *tokenizer_files(tokenizer), *copies)
