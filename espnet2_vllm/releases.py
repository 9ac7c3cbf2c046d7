"""The released Bagpiper checkpoints, and what a release folder says about itself.

Names, texts and figures are those of ESPnet's ``espnet2.bin.speechlm_inference`` (202611); a test compares them with the
installed ESPnet. The system turn of generated audio: Bagpiper (arXiv:2602.05220); none: Bagpiper-TTS (arXiv:2606.22811, 2.3).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import CheckpointError, ReleaseFileError, UntunedError, shown

DEFAULT_TAG = "espnet/bagpiper-sft"
BASE_TAG = "espnet/bagpiper"
AUTO = "<the checkpoint's own>"  # as an argument: what the release was trained with. None is nothing.

# Training data, word for word: another wording is off distribution, and the model gives no sound.
TTS_SYSTEM = (
    "You are a helpful assistant that generates audio based on user requests. You can create various types of audio "
    "including sound effects, music, speech, ambient sounds, and any combination of these. When given a request, first think "
    "through what the user wants and how to create high-quality audio, then provide a detailed description of the audio you "
    "will generate."
)
UNDERSTAND_SYSTEM = "You are an audio understanding assistant."
UNDERSTAND_PROMPT = "What sound is in this audio?"

# ``system``: the system turn of ``render``. Entries may be added, for other tags or folders.
RELEASES: dict[str, dict[str, Any]] = {
    "espnet/bagpiper-sft": {
        "what": "understanding and generation over speech, music and sound",
        "system": TTS_SYSTEM,
    },
    "espnet/bagpiper-tts-sft": {
        "what": "natural-language-guided speech synthesis, no reference audio",
        "system": None,
    },
    "espnet/bagpiper": {"what": "the pre-trained base, for probing and initialisation", "system": None},
}

# Table 10 of arXiv:2602.05220: the settings of a release that holds no decoding yaml.
PAPER_DECODING: dict[str, Any] = {
    "dtype": "bfloat16",
    "num_hypo": 1,
    "text": {"temperature": 0.6, "topk": 20, "cfg": 1, "max_step": 2048, "min_step": 1},
    "audio": {"temperature": 0.8, "topk": 20, "cfg": 3, "max_step": 2048, "min_step": 50},
}

CARD = "release.json"
RELEASE_FILES = (
    "inference_text.yaml",
    "inference_audio.yaml",
    "inference.yaml",
    CARD,
)  # beside training yaml and weights
_CARD_KEYS = {"what": str, "system": str | None, "describe": Mapping, "render": Mapping}
_DESCRIBE_KEYS = {"system": str | None, "prompt": str | None}
_RENDER_KEYS = {"enforce_modality": list}


@dataclass(frozen=True)
class Release:
    """What a release says about itself.

    Attributes:
        system: the system turn of ``render``; None: none.
        describe_system, describe_prompt: the system turn of ``describe`` and the text behind the recording; None: none.
        render_modalities: the segments that ``render`` asks for.
        text, audio: decoding yamls (a file, or what one would hold) of written and of spoken answers.
        dtype: as the yaml of written answers says; None if there is none.
    """

    system: str | None = TTS_SYSTEM
    describe_system: str | None = UNDERSTAND_SYSTEM
    describe_prompt: str | None = UNDERSTAND_PROMPT
    render_modalities: tuple[str, ...] = ("text", "audio")
    text: Path | Mapping[str, Any] = field(default_factory=lambda: PAPER_DECODING)
    audio: Path | Mapping[str, Any] = field(default_factory=lambda: PAPER_DECODING)
    dtype: str | None = None


# An OpusLM knows neither these system turns nor these settings.
OPUSLM = Release(system=None, describe_system=None)


def read_release(name: str, folder: Path | None) -> Release:
    """What the release ``name`` (a tag or folder, as given), whose files lie in ``folder``, says about itself.

    Decoding yamls are ``inference_text.yaml`` and ``inference_audio.yaml``, each else ``inference.yaml``, else
    ``PAPER_DECODING``. Turns are those of ``RELEASES``, else of ``release.json`` in the folder (doc/formats.md), else those of
    the general model, as in ESPnet's ``LocalBagpiper.from_pretrained``.

    Raises:
        CheckpointError: for a ``release.json`` that cannot be read or holds something else.
        ConfigError: for a decoding yaml that cannot be read.
    """
    text, audio = (_decoding_file(folder, f"inference_{kind}.yaml") for kind in ("text", "audio"))
    said: dict[str, Any] = {}
    if isinstance(text, Path):
        from .yaml_document import Document

        said["dtype"] = Document.read(text).data.get("dtype")
    if name in RELEASES:
        said["system"] = RELEASES[name].get("system", TTS_SYSTEM)
    elif folder is not None and (folder / CARD).is_file():
        said |= _read_card(folder / CARD)
    return Release(text=text, audio=audio, **said)


def refuse_base(name: str, allow_base: bool) -> None:
    """UntunedError, a ValueError, for the pre-trained base unless it is asked for twice."""
    if name == BASE_TAG and not allow_base:
        raise UntunedError(
            f"{name} is the pre-trained base: it was never tuned to answer requests, so describe, render and ask give nothing "
            f"of use; take {DEFAULT_TAG}, or say allow_base=True"
        )


def release_files(
    folder: Path, train_config: str | Path | None, checkpoint: str | Path | None
) -> tuple[Path, Path | None]:
    """Training yaml and weights of a release folder: the one ``*.yaml`` that is no ``inference*.yaml`` and the one ``*.pt``.

    A folder without ``*.pt`` is an experiment, a converted directory or another family's, whose files are found by
    ``checkpoint.sources``: it comes back as it is.

    Raises:
        ReleaseFileError: a FileNotFoundError, for several or none.
    """
    if train_config is not None and checkpoint is not None:
        return Path(train_config), Path(checkpoint)
    weights = sorted(folder.glob("*.pt"))
    if not weights:
        return folder if train_config is None else Path(train_config), None if checkpoint is None else Path(checkpoint)
    config = train_config
    if config is None:
        yamls = sorted(path for path in folder.glob("*.yaml") if not path.name.startswith("inference"))
        config = _only(yamls, f"training yaml (a *.yaml that is no inference*.yaml) in {folder}", "train_config")
    if checkpoint is None:
        checkpoint = _only(weights, f"checkpoint (*.pt) in {folder}", "checkpoint")
    return Path(config), Path(checkpoint)


def _only(found: list[Path], what: str, argument: str) -> Path:
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise ReleaseFileError(f"expected one {what}, found {names}; say which with {argument}=")
    return found[0]


def _decoding_file(folder: Path | None, name: str) -> Path | Mapping[str, Any]:
    for path in () if folder is None else (folder / name, folder / "inference.yaml"):
        if path.is_file():
            return path
    return PAPER_DECODING


def _read_card(path: Path) -> dict[str, Any]:
    """Fields of ``Release`` that release.json says."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    _check_keys(path, content, _CARD_KEYS, "")
    describe = content.get("describe", {})
    _check_keys(path, describe, _DESCRIBE_KEYS, "describe.")
    render = content.get("render", {})
    _check_keys(path, render, _RENDER_KEYS, "render.")
    said = {"system": content["system"]} if "system" in content else {}
    if "enforce_modality" in render:
        said["render_modalities"] = tuple(render["enforce_modality"])
    return said | {f"describe_{key}": value for key, value in describe.items()}


def _check_keys(path: Path, content: Any, known: Mapping[str, Any], prefix: str) -> None:
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path}: {prefix[:-1] or 'the top level'} is {shown(content)}, expected an object")
    for key, value in content.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else f"; known are {', '.join(known)}"
            raise CheckpointError(f"{path}: key {prefix}{key} is unknown{hint}")
        if not isinstance(value, known[key]):
            kind = {str: "a text", Mapping: "an object", list: "a list"}.get(known[key], "a text or null")
            raise CheckpointError(f"{path}: {prefix}{key} is {shown(value)}, expected {kind}")
