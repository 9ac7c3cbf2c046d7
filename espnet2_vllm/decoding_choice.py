"""Decoding settings of a call from Python: what a yaml says, and single settings over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from .errors import ConfigError

# Those of the released models (inference_sft.yaml without guidance; decode_general.yaml), where nothing else is said.
DEFAULTS: dict[str, dict[str, Any]] = {
    "bagpiper": {
        "audio": {"temperature": 0.8, "topk": 20, "cfg": 1, "max_step": 2048, "min_step": 50},
        "text": {"temperature": 0.6, "topk": 20, "cfg": 1, "max_step": 8192, "min_step": 1},
    },
    "opuslm": {
        "codec_ssl": {
            "search_algo": "topk_sampling", "sampling_temperature": 0.8, "topk": 30, "length_method": "absolute",
            "maxlen": 2048, "minlen": 3,
        },
        "text_bpe": {
            "search_algo": "greedy_search", "sampling_temperature": 0.8, "topk": 20, "length_method": "absolute",
            "maxlen": 2048, "minlen": 1,
        },
    },
}  # fmt: skip
_BLOCKS = {
    "bagpiper": {"audio": "audio", "text": "text"},
    "opuslm": {"audio": "codec_ssl", "text": "text_bpe"},
}
_NAMES = {
    "bagpiper": {"temperature": "temperature", "topk": "topk", "max_step": "max_step", "min_step": "min_step"},
    "opuslm": {"temperature": "sampling_temperature", "topk": "topk", "max_step": "maxlen", "min_step": "minlen"},
}
_SAMPLINGS = {"topk": "topk_sampling", "top_p": "topp_sampling"}  # OpusLM


@dataclass(frozen=True)
class Decoding:
    """Settings over those of a yaml or of the model; None leaves them as they are.

    Attributes:
        cfg: guidance scale of audio (Bagpiper); 1 is none.
        temperature, topk: of text and audio; temperature 0 takes the best (``topk`` 1).
        max_step, min_step: rows of a segment, of text and audio.
        enforce_modality: modalities of the first segments (Bagpiper).
        text, audio: settings of one modality alone, in the words of the yaml; they win over the others.
        source: a yaml file, or what it would hold, under all of these.
    """

    cfg: float | None = None
    temperature: float | None = None
    topk: int | None = None
    max_step: int | None = None
    min_step: int | None = None
    enforce_modality: tuple[str, ...] | None = None
    text: Mapping[str, Any] | None = None
    audio: Mapping[str, Any] | None = None
    source: Mapping[str, Any] | str | Path | None = None

    @classmethod
    def over(cls, decoding: Decoding | Mapping[str, Any] | str | Path | None, **defaults: Any) -> Decoding:
        """``decoding`` with ``defaults`` where it says nothing itself."""
        if not isinstance(decoding, Decoding):
            decoding = cls(source=decoding)
        if decoding.source is not None:
            decoding = replace(decoding, source=_read(decoding.source))
            defaults = {name: value for name, value in defaults.items() if name not in decoding.source}
        return replace(decoding, **{k: v for k, v in defaults.items() if getattr(decoding, k) is None})

    def apply(self, settings: dict[str, Any], family: str) -> dict[str, Any]:
        """``settings``, as a yaml of ``family`` holds them, with these over them.

        Raises:
            ConfigError: for a setting that the family does not have.
        """
        if family == "opuslm" and (self.cfg is not None or self.enforce_modality is not None):
            raise ConfigError(
                "cfg and enforce_modality are for Bagpiper checkpoints; OpusLM takes the answer's turns instead"
            )
        result = {**settings}
        shared = {name: getattr(self, name) for name in _NAMES[family] if getattr(self, name) is not None}
        for modality, block in _BLOCKS[family].items():
            own = dict(_mapping(modality, getattr(self, modality) or {}))
            wanted = {_NAMES[family][name]: value for name, value in shared.items()}
            if modality == "audio" and self.cfg is not None:
                wanted["cfg"] = self.cfg
            if family == "opuslm" and wanted.get("sampling_temperature") == 0:
                del wanted["sampling_temperature"]
                wanted["topk"] = 1
            if block in settings or own:
                result[block] = _over(_mapping(block, settings.get(block) or {}), {**wanted, **own})
        if self.enforce_modality is not None:
            if isinstance(self.enforce_modality, str) or not isinstance(self.enforce_modality, Sequence):
                raise ConfigError(
                    f"enforce_modality: expected modalities, ('text', 'audio'), got {self.enforce_modality!r}"
                )
            result["enforce_modality"] = list(self.enforce_modality)
        return result


def _over(block: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``block`` with ``changes``; of the two kinds of sampling it takes the one that a change is about."""
    result = {**block, **changes}
    for name, search in _SAMPLINGS.items():
        if name in changes and "search_algo" not in changes and result.get("search_algo") in _SAMPLINGS.values():
            result["search_algo"] = search
    return result


def settings_of(family: str, *choices: Decoding | Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """What a yaml of ``family`` would hold: the released models' settings, then each of ``choices`` over them.

    Raises:
        ConfigError: for a file that cannot be read.
    """
    settings = DEFAULTS[family]
    for choice in choices:
        made = choice if isinstance(choice, Decoding) else Decoding(source=choice)
        if made.source is not None:
            settings = _read(made.source)
        settings = made.apply(settings, family)
    return settings


def label_of(*choices: Decoding | Mapping[str, Any] | str | Path | None) -> str:
    """What messages call the settings that ``settings_of`` makes: the last yaml file among them, if there is one."""
    sources = [choice.source if isinstance(choice, Decoding) else choice for choice in choices]
    files = [str(source) for source in sources if isinstance(source, (str, PathLike))]
    return f"decoding settings (over {files[-1]})" if files else "decoding settings"


def _mapping(modality: str, settings: Any) -> Mapping[str, Any]:
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{modality}: expected settings by their names, got {settings!r}")
    return settings


def _read(source: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, (str, PathLike)):
        raise ConfigError(f"decoding settings: expected Decoding, a mapping or a yaml file, got {source!r}")
    from .yaml_document import Document

    return Document.read(source).data
