"""A converted directory, opened."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..codec import CodecDescription
from ..errors import CheckpointError, SpeechLMError, shown
from ..layout import Layout
from .conversion import FORMAT_VERSION, check_family
from .sources import DESCRIPTION_FILE
from .writing import FORMAT, write_json

_KEYS = ("layout", "preprocessor", "codec", "continuous_audio", "max_rows", "source", "tensors", "files")
_MALFORMED = (SpeechLMError, KeyError, TypeError, ValueError, AttributeError, IndexError, AssertionError)


@dataclass(frozen=True, repr=False)
class Checkpoint:
    """A converted directory.

    Attributes:
        path: the directory: what vLLM and transformers are given.
        layout: vocabulary and streams.
        codec: None where the checkpoint names none (an OpusLM training directory): the decoding yaml must.
        preprocessor: facts for the prompt. OpusLM: speaker_prompt_length (frames), pad_speaker_prompt, n_ctx (rows),
            codec_token_per_frame (ids a frame in arks), subword_model. Bagpiper: audio_input, audio_output (names of IOs).
        continuous_audio: encoder of user audio (encoder, dtype, weights, config, preprocessor_config: files below
            ``path`` or None), or None.
        max_rows: rows of a sequence at most, prompt included (max_position_embeddings).
        source: what it was converted from (train_config, model_file, vocab_order, converter).
    """

    path: Path
    layout: Layout
    codec: CodecDescription | None
    preprocessor: Mapping[str, Any]
    continuous_audio: Mapping[str, Any] | None
    max_rows: int
    source: Mapping[str, Any]

    def __repr__(self) -> str:
        layout = self.layout
        return (
            f"<Checkpoint {str(self.path)!r}: {layout.family}, {layout.num_streams} streams, {layout.vocab_size} ids, up to "
            f"{self.max_rows} rows>"
        )

    @property
    def family(self) -> str:
        return self.layout.family

    @property
    def tokenizer_dir(self) -> Path:
        return self.path / "tokenizer"

    @property
    def codec_base(self) -> Path:
        """Folder that relative paths in ``codec`` count from."""
        return self.path


def is_converted(directory: str | Path) -> bool:
    return (Path(directory) / DESCRIPTION_FILE).is_file()


def read_description(directory: Path) -> dict[str, Any]:
    """speechlm.json. CheckpointError if it is missing, damaged or of another version."""
    path = directory / DESCRIPTION_FILE
    if not os.path.isdir(directory):  # Path.is_dir raises for a name that is too long
        raise CheckpointError(f"no such converted directory: {directory}")
    if not path.is_file():
        raise CheckpointError(
            f"{directory} is no converted directory: it has no {DESCRIPTION_FILE}; run espnet2-vllm convert"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; convert the checkpoint again") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the description of a converted directory; expected format {FORMAT!r}")
    if content.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {content.get('format_version')}, this package reads {FORMAT_VERSION}; convert again"
        )
    missing = [key for key in _KEYS if key not in content]
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}; convert the checkpoint again")
    return content


def write_description(directory: Path, layout: Layout, max_rows: int, source: Mapping[str, Any]) -> None:
    """speechlm.json of a directory without weights, codec and audio encoder, as for measurements."""
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "layout": layout.to_dict(),
        "preprocessor": {},
        "codec": None,
        "continuous_audio": None,
        "max_rows": max_rows,
        "source": dict(source),
        "files": {},
        "tensors": {},
    }
    write_json(directory / DESCRIPTION_FILE, content)


def open_checkpoint(directory: str | Path, *, family: str | None = None) -> Checkpoint:
    """Open what ``espnet2-vllm convert`` wrote; its small files only.

    Raises CheckpointError: no converted directory, another version, or another family than ``family``.
    """
    directory = Path(directory)
    content = read_description(directory)
    layout = read_layout(directory, content)
    check_family(layout.family, family, directory)
    kinds = {"preprocessor": Mapping, "continuous_audio": Mapping | None, "max_rows": int, "source": Mapping}
    for key, kind in kinds.items():
        if not isinstance(content[key], kind):
            raise _damaged(directory, f"{key} is {shown(content[key])}")
    _check_sizes(directory, layout, content["max_rows"])
    _check_files(directory, content)
    try:
        codec = None if content["codec"] is None else CodecDescription.from_dict(content["codec"])
    except _MALFORMED as error:
        raise _damaged(directory, f"codec: {error}") from error
    return Checkpoint(
        path=directory.absolute(),
        layout=layout,
        codec=codec,
        preprocessor=content["preprocessor"],
        continuous_audio=content["continuous_audio"],
        max_rows=content["max_rows"],
        source=content["source"],
    )


def _check_sizes(directory: Path, layout: Layout, max_rows: int) -> None:
    """The sizes that tables are made by are those of the model that will be loaded."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        vocabulary, context = config["vocab_size"], config["max_position_embeddings"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error!r}; convert the checkpoint again") from error
    if layout.vocab_size != vocabulary:
        raise _damaged(
            directory, f"the layout has {shown(layout.vocab_size)} ids, {path.name} a vocab_size of {shown(vocabulary)}"
        )
    if type(max_rows) is not int or type(context) is not int or not 2 <= max_rows <= context:
        raise _damaged(
            directory,
            f"max_rows is {shown(max_rows)}, expected 2 to the max_position_embeddings of {path.name}, {shown(context)}",
        )


def _check_files(directory: Path, content: Mapping[str, Any]) -> None:
    facts = content["continuous_audio"] or {}
    for key in ("weights", "config", "preprocessor_config"):
        if facts.get(key) is not None:
            check_inside(facts[key], f"{directory / DESCRIPTION_FILE}: continuous_audio.{key}")


def check_inside(name: Any, where: str) -> None:
    """CheckpointError unless ``name`` is a path to below the folder of the file that names it."""
    if not isinstance(name, str) or not name or os.path.isabs(name) or ".." in Path(name).parts or "\0" in name:
        raise CheckpointError(
            f"{where} is {shown(name)}, expected a file below its folder; convert the checkpoint again"
        )


def read_layout(directory: Path, content: Mapping[str, Any]) -> Layout:
    """The layout in speechlm.json's ``content``. CheckpointError if it is none."""
    try:
        return Layout.from_dict(content["layout"])
    except _MALFORMED as error:
        raise _damaged(directory, f"layout: {error}") from error


def _damaged(directory: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{directory / DESCRIPTION_FILE} is damaged ({what}); convert the checkpoint again")
