"""What a checkpoint is, as its yaml and the configurations that it names tell: everything but the tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..codec import CodecDescription
from ..codec.locate import locate_directory
from ..errors import CheckpointError, ConfigError
from ..layout import Layout
from .backbones import check_backbone
from .expected import ARCHITECTURES, Shapes, read_hf_config
from .sources import Source

VOCAB_ORDERS = ("yaml", "name")
MODEL_FILES = ("*.json", "*.txt", "*.model", "*.jinja")  # configuration and tokenizer of a model, without its weights
_TOKENIZER_PATTERNS = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt")
_TOKENIZER_MORE = ("spiece.model", "sentencepiece*.model", "chat_template*", "config.json")


@dataclass(frozen=True)
class CodecPart:
    """The codec of a checkpoint.

    description: as the converted directory will hold it, paths relative to that directory.
    copies: file in the converted directory -> file to copy.
    shapes: tensors that the checkpoint itself must hold; None if it holds none (or their names are not known here).
    """

    description: CodecDescription
    copies: Mapping[str, Path] = field(default_factory=dict)
    shapes: Shapes | None = None
    in_checkpoint: bool = False


@dataclass(frozen=True)
class ContinuousAudioPart:
    """The continuous encoder of user audio: facts for speechlm.json, files to copy, tensors to expect (None: not known)."""

    facts: Mapping[str, Any]
    copies: Mapping[str, Path] = field(default_factory=dict)
    shapes: Shapes | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class Description:
    """A checkpoint as its yaml describes it.

    Attributes:
        source: the files.
        layout: vocabulary and streams.
        vocabulary: the same as a sum, for messages.
        backbone: transformers configuration of the language model; ``backbone_dir`` is where it was found.
        tokenizer_dir: folder with the text tokenizer.
        body_dtype: dtype in which ESPnet creates the backbone and so rounds its weights; None: it does not.
        body_dtype_key: where that is said, for the report.
        stream_rows_spare: whether the stream embedding may have more rows than streams.
        tied: whether the head is the embedding, one parameter under two names.
        preprocessor: facts that the prompt needs.
        files: all small files read, for the fingerprint of the cache.
        notes: lines for the report.
    """

    source: Source
    layout: Layout
    vocabulary: str
    backbone: Any
    backbone_dir: Path
    tokenizer_dir: Path
    body_dtype: str | None
    body_dtype_key: str
    stream_rows_spare: bool
    preprocessor: Mapping[str, Any]
    tied: bool = False
    codec: CodecPart | None = None
    continuous_audio: ContinuousAudioPart | None = None
    files: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


def describe(source: Source, *, vocab_order: str = "yaml") -> Description:
    """Read the yaml of ``source`` and what it names. Raises CheckpointError or ConfigError with file and key."""
    from . import bagpiper, opuslm

    if vocab_order not in VOCAB_ORDERS:
        raise ConfigError(f"vocab_order {vocab_order!r}: expected one of {', '.join(VOCAB_ORDERS)}")
    families: dict[str, Callable[..., Description]] = {"bagpiper": bagpiper.describe, "opuslm": opuslm.describe}
    return families[source.family](source, vocab_order=vocab_order)


def find_backbone(source: Source, name: str, key: str, revision: str | None = None) -> tuple[Path, Any]:
    """Folder and configuration of the Hugging Face model ``name``. Its weights are not needed."""
    directory = _find_model_folder(source, name, key, revision)
    config = read_hf_config(directory, f"{key} of {source.train_config.name}")
    if config.model_type not in ARCHITECTURES:
        raise CheckpointError(
            f"{source.train_config}: {key} {name!r} is a model of type {config.model_type!r}; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    check_backbone(directory, f"{key} of {source.train_config.name}")
    return directory, config


def find_tokenizer(source: Source, name: str, key: str) -> Path:
    directory = _find_model_folder(source, name, key)
    if not any(path.name not in ("config.json",) for path in tokenizer_files(directory)):
        raise CheckpointError(
            f"{source.train_config}: {key} {name!r} holds no tokenizer: looked for "
            f"{', '.join(_TOKENIZER_PATTERNS)} in {directory}"
        )
    return directory


def tokenizer_files(directory: Path) -> list[Path]:
    """What ``AutoTokenizer`` may need of a model folder; config.json decides the class in some."""
    found = {path for pattern in (*_TOKENIZER_PATTERNS, *_TOKENIZER_MORE) for path in directory.glob(pattern)}
    return sorted(path for path in found if path.is_file())


def check_dtype(value: Any, key: str, where: Path, config: Any = None) -> str | None:
    """The name of the dtype that transformers would create a model of ``config`` in, or None where it keeps the weights'."""
    import torch

    if value == "auto":
        value = getattr(config, "dtype", None)
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    if not isinstance(getattr(torch, name, None), torch.dtype) or not getattr(torch, name).is_floating_point:
        raise CheckpointError(f"{where}: {key} is {value!r}, expected a floating point dtype such as bfloat16")
    return name


def _find_model_folder(source: Source, name: str, key: str, revision: str | None = None) -> Path:
    return locate_directory(
        name,
        base_dir=source.base_dir,
        what=f"{key} of {source.train_config.name}",
        revision=revision,
        include=MODEL_FILES,
    )
