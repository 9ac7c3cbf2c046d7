"""Decoding settings of a call from Python: what a yaml says, and single settings over it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

from . import decoding_rules as rules
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
_YAML_KEYS = {*rules.BAGPIPER, *rules.CHAT, *rules.FLAT}
_SAMPLINGS = {"topk": "topk_sampling", "top_p": "topp_sampling"}  # OpusLM


@dataclass(repr=False)
class Decoding:
    """Settings over those of a yaml or of the model; None leaves them as they are.

    The first six are those of ESPnet's ``Decoding``, in its order. ``describe``, ``render`` and ``ask`` of a Bagpiper take
    temperatures and ``topk`` that are None for ESPnet's: ``text_temperature`` 0.6, ``audio_temperature`` 0.8, ``topk`` 20.

    Attributes:
        text_temperature, audio_temperature: of one modality; they win over ``temperature``.
        topk: of text and audio.
        cfg: guidance scale of audio (Bagpiper); 1 is none.
        max_tokens: rows of a whole answer at most, of a model behind a server.
        max_steps, max_step: rows of a segment at most, of text and audio, of a model in this process; two names of one setting.
        temperature: of text and audio; 0 takes the best (``topk`` 1).
        min_step: rows of a segment at least, of text and audio.
        enforce_modality: modalities of the first segments (Bagpiper).
        text, audio: settings of one modality alone, in the words of the yaml; they win over the others.
        source: a yaml file, or what it would hold, under all of these.
    """

    text_temperature: float | None = None
    audio_temperature: float | None = None
    topk: int | None = None
    cfg: float | None = None
    max_tokens: int | None = None
    max_steps: int | None = None
    _: KW_ONLY
    temperature: float | None = None
    max_step: int | None = None
    min_step: int | None = None
    enforce_modality: tuple[str, ...] | None = None
    text: Mapping[str, Any] | None = None
    audio: Mapping[str, Any] | None = None
    source: Mapping[str, Any] | str | Path | None = None

    def __repr__(self) -> str:
        said = ((part.name, getattr(self, part.name)) for part in fields(self))
        return f"Decoding({', '.join(f'{name}={value!r}' for name, value in said if value is not None)})"

    @classmethod
    def of(cls, choice: Decoding | Mapping[str, Any] | str | Path | None, family: str) -> Decoding:
        """What a caller gave. A mapping is a whole yaml where it could be one, else settings over the model's own.

        Raises:
            ConfigError: for a setting that there is not.
        """
        if isinstance(choice, Decoding):
            return choice
        if not isinstance(choice, Mapping) or _is_whole(choice, family):
            return cls(source=choice)
        blocks = {block: modality for modality, block in _BLOCKS[family].items()}
        given = {blocks.get(name, name): value for name, value in choice.items()}
        known = [part.name for part in fields(cls)]
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"
                raise ConfigError(f"decoding settings: {name!r} is no setting of a call{hint}")
        return cls(**given)

    def tokens(self, audio: bool) -> int:
        """``max_tokens`` of an answer from a server: as set, or ESPnet's 12000 where it is ``audio``, else 4096."""
        if self.max_tokens is not None:
            return self.max_tokens
        return 12000 if audio else 4096

    def temperature_of(self, modality: str) -> float | None:
        """That of ``text`` or ``audio``; None where nothing is said."""
        own = self.text_temperature if modality == "text" else self.audio_temperature
        return self.temperature if own is None else own

    @property
    def rows(self) -> int | None:
        """``max_step`` or ``max_steps``. ConfigError where they differ."""
        if None not in (self.max_step, self.max_steps) and self.max_step != self.max_steps:
            raise ConfigError(
                f"max_step {self.max_step} and max_steps {self.max_steps} are one setting; give one of them"
            )
        return self.max_steps if self.max_step is None else self.max_step

    @classmethod
    def over(
        cls, decoding: Decoding | Mapping[str, Any] | str | Path | None, family: str = "bagpiper", **defaults: Any
    ) -> Decoding:
        """``decoding`` with ``defaults`` where it says nothing itself."""
        decoding = cls.of(decoding, family)
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
        shared = {"topk": self.topk, "max_step": self.rows, "min_step": self.min_step}
        for modality, block in _BLOCKS[family].items():
            own = dict(_mapping(modality, getattr(self, modality) or {}))
            said = {"temperature": self.temperature_of(modality), **shared}
            wanted = {_NAMES[family][name]: value for name, value in said.items() if value is not None}
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


# What ESPnet's own Decoding sets where a caller says nothing, over whatever a yaml says (espnet2.bin.speechlm_inference).
ESPNET_SAMPLING = Decoding(text_temperature=0.6, audio_temperature=0.8, topk=20)


def _is_whole(settings: Mapping[str, Any], family: str) -> bool:
    """Whether these are the content of a yaml: keys that only a yaml has, or blocks with all that ESPnet has no default for."""
    blocks = [settings[name] for name in _BLOCKS[family].values() if name in settings]
    if (_YAML_KEYS - {part.name for part in fields(Decoding)} - {*_BLOCKS[family].values()}) & settings.keys():
        return True
    needed = rules.BAGPIPER_NEEDED if family == "bagpiper" else rules.CHAT_NEEDED
    return bool(blocks) and all(isinstance(block, Mapping) and needed.keys() <= block.keys() for block in blocks)


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
        made = Decoding.of(choice, family)
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
