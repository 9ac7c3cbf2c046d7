"""Is a converted directory whole and consistent? One finding a matter, all of them, not the first only."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..codec import CodecDescription, check_codec_fits, load_codec
from ..errors import CheckpointError, SpeechLMError
from ..layout import Layout
from ..text import TextTokenizer
from .backbones import check_backbone
from .expected import (
    ARCHITECTURES,
    backbone_shapes,
    continuous_audio_shapes,
    encoder_config,
    read_hf_config,
    xcodec_shapes,
)
from .headers import compare, compare_shapes, read_header, read_index
from .names import CODEC, CONTINUOUS_AUDIO, EMBEDDING, HEAD, MODEL
from .opening import read_description, read_layout
from .tensors import TensorSpec
from .writing import INDEX


class Finding(NamedTuple):
    """ok: whether it is as it should be. what: one line that says what was found."""

    ok: bool
    what: str


def check_directory(directory: str | Path) -> list[Finding]:
    """Verify what ``espnet2-vllm convert`` wrote: every tensor's name, shape and dtype, vocabulary, tokenizer, codec.

    Weights are not read, except the codec's, which is loaded. Nothing is raised for a faulty directory.
    """
    directory = Path(directory)
    try:
        content = read_description(directory)
        layout = read_layout(directory, content)
    except CheckpointError as error:
        return [Finding(False, str(error))]
    parts: list[Callable[[], str]] = [
        lambda: f"layout: {layout.family}, {content.get('vocabulary')}, {layout.num_streams} streams",
        lambda: _check_config(directory, layout),
        lambda: _check_model(directory, layout, content["tensors"].get(MODEL, {})),
        lambda: _check_tokenizer(directory, layout),
        lambda: _check_codec_tensors(directory, content),
        lambda: _check_codec(directory, layout, content["codec"]),
        lambda: _check_continuous_audio(directory, content),
    ]
    return list(_findings(parts))


def _findings(parts: list[Callable[[], str]]) -> Iterator[Finding]:
    for part in parts:
        try:
            what = part()
        except SpeechLMError as error:
            yield Finding(False, str(error))
        except Exception as error:  # noqa: BLE001 - a damaged file makes its readers raise anything, which is what is found
            yield Finding(False, f"cannot be read ({type(error).__name__}: {error}); convert the checkpoint again")
        else:
            if what:
                yield Finding(True, what)


def _check_config(directory: Path, layout: Layout) -> str:
    config = read_hf_config(directory, "converted directory")
    check_backbone(directory, "converted directory")
    wanted = {
        "architectures": [ARCHITECTURES.get(config.model_type)],
        "vocab_size": layout.vocab_size,
        "tie_word_embeddings": False,
    }
    for key, value in wanted.items():
        if getattr(config, key) != value:
            raise CheckpointError(f"{directory / 'config.json'}: {key} is {getattr(config, key)!r}, expected {value!r}")
    return (
        f"config: {config.model_type}, {config.num_hidden_layers} layers, hidden size {config.hidden_size}, "
        f"{config.max_position_embeddings} positions"
    )


def _check_model(directory: Path, layout: Layout, recorded: Mapping[str, str]) -> str:
    weight_map = read_index(directory)
    given: dict[str, TensorSpec] = {}
    files = sorted(set(weight_map.values()))
    for file in files:
        given |= read_header(directory / file)
    stray = sorted(path.name for path in directory.glob("*.safetensors") if path.name not in files)
    if stray:
        raise CheckpointError(f"{directory}: {INDEX} does not know {', '.join(stray)}, which an engine would load too")
    compare(f"{directory / INDEX}", dict.fromkeys(weight_map, ""), dict.fromkeys(given, ""))
    compare(str(directory), recorded, {name: str(spec) for name, spec in given.items()})
    config = read_hf_config(directory, "converted directory")
    compare_shapes(str(directory), backbone_shapes(config, layout.vocab_size, layout.num_streams), given)
    for name in (EMBEDDING, HEAD):
        if given[name].shape[0] != layout.vocab_size:
            raise CheckpointError(f"{directory}: {name} is {given[name]}, but the layout has {layout.vocab_size} ids")
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in Counter(spec.dtype for spec in given.values()).items())
    return (
        f"weights: {len(given)} tensors ({kinds}) in {len(files)} files; {layout.vocab_size} ids close the vocabulary"
    )


def _check_tokenizer(directory: Path, layout: Layout) -> str:
    count = len(TextTokenizer(directory / "tokenizer"))
    if count > layout.text.size:
        raise CheckpointError(
            f"{directory / 'tokenizer'} has {count} tokens, but the layout {layout.text.size} text ids"
        )
    return f"tokenizer: {count} tokens for {layout.text.size} text ids"


def _check_codec_tensors(directory: Path, content: Mapping[str, Any]) -> str:
    recorded = content["tensors"].get(CODEC)
    file = content["files"].get(CODEC)
    if not recorded or not file.endswith(".safetensors"):
        return ""
    given = read_header(directory / file)
    compare(str(directory / file), recorded, {name: str(spec) for name, spec in given.items()})
    config = read_hf_config((directory / file).parent, "codec")
    compare_shapes(str(directory / file), xcodec_shapes(config), given)
    return f"codec weights: {len(given)} tensors, from the checkpoint"


def _check_codec(directory: Path, layout: Layout, description: Mapping[str, Any] | None) -> str:
    if description is None:
        return "codec: none named here; the decoding yaml must (codec_ssl.tokenizer)"
    codec = load_codec(CodecDescription.from_dict(description), base_dir=directory)
    spans = [layout.code_spans[stream] for stream in layout.codec_streams]
    check_codec_fits(codec, len(spans), spans[0].size)
    return f"codec: {codec.num_codebooks} codebooks of {codec.codebook_size}, {codec.sample_rate} Hz, {codec.hop} samples a frame"


def _check_continuous_audio(directory: Path, content: Mapping[str, Any]) -> str:
    facts = content["continuous_audio"]
    if facts is None:
        return ""
    given = read_header(directory / facts["weights"])
    recorded = content["tensors"].get(CONTINUOUS_AUDIO, {})
    compare(facts["weights"], recorded, {name: str(spec) for name, spec in given.items()})
    if facts["config"] is None:
        return (
            f"continuous audio: {len(given)} tensors; without the configuration of {facts['encoder']} it cannot be used"
        )
    hidden_size = read_hf_config(directory, "converted directory").hidden_size
    audio = encoder_config(read_hf_config((directory / facts["config"]).parent, "audio encoder"))
    compare_shapes(facts["weights"], continuous_audio_shapes(audio, hidden_size), given)
    return f"continuous audio: {audio.model_type}, {len(given)} tensors"
