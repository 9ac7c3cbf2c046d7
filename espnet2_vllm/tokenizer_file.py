"""A text tokenizer as the files of its folder state it, whatever version of transformers is installed.

transformers 5 builds the tokenizers of some classes (``GPT2Tokenizer``, ``Qwen2Tokenizer``, ``LlamaTokenizer``) anew and drops
the normaliser and pre-tokenizer of ``tokenizer.json``; 4.x, with which the published models were trained, kept them. So the file
is read with the ``tokenizers`` library itself, and what else a folder says about ids is applied as ``PreTrainedTokenizerFast``
of transformers 4.57 applied it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, pre_tokenizers, processors

from .errors import CheckpointError

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTED = ("additional_special_tokens", "extra_special_tokens")
_END = "<|endoftext|>"


class Kind(NamedTuple):
    """What a class of tokenizers adds to its file.

    Attributes:
        tokens: special tokens that it has where the folder names none.
        prefix_space: whether a blank is put in front where the folder does not say; None: as in the file.
        ends: whether the beginning and the end of a text are marked where the folder does not say; None: as in the file.
        plain: special tokens that are named by a string match the text before it is normalised.
        files: what it can be built of without a ``tokenizer.json``: ``bpe``, ``qwen2`` (vocab.json and merges.txt),
            ``sentencepiece`` (tokenizer.model), or None.
    """

    tokens: Mapping[str, str] = {}
    prefix_space: bool | None = None
    ends: tuple[bool, bool] | None = None
    plain: bool = False
    files: str | None = None


_GPT2 = dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END)
_KINDS = {
    "PreTrainedTokenizer": Kind(),
    "TokenizersBackend": Kind(),
    "GPT2Tokenizer": Kind(_GPT2, prefix_space=False, files="bpe"),
    "GPTNeoXTokenizer": Kind(_GPT2, prefix_space=False, ends=(False, False)),
    "Qwen2Tokenizer": Kind(
        dict.fromkeys(("eos_token", "unk_token", "pad_token"), _END), prefix_space=False, plain=True, files="qwen2"
    ),
    "LlamaTokenizer": Kind(
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, ends=(True, False), files="sentencepiece"
    ),
}
_OF_MODELS = {
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "llama": "LlamaTokenizer",
    "olmo2": "GPT2Tokenizer",
    "gpt2": "GPT2Tokenizer",
    "gpt_neox": "GPTNeoXTokenizer",
}


@dataclass(frozen=True)
class FileTokenizer:
    """A tokenizer, and what its folder says beside it.

    Attributes:
        tokenizer: ids of a text, and back.
        file: what it was read from.
        unknown: id of the unknown token.
        clean_up: whether blanks before punctuation are taken out of decoded text (``clean_up_tokenization_spaces``).
        blank: whether a model of SentencePiece was told to put a blank in front.
        changes: what the folder's settings changed of the file, for people; ids may differ from the file's own, apart from those
            that stand around a text.
        notes: what a person who converts the checkpoint should know.
    """

    tokenizer: Tokenizer
    file: Path
    unknown: int | None
    clean_up: bool
    blank: bool
    changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def open_tokenizer(directory: Path) -> FileTokenizer:
    """The tokenizer in ``directory``.

    Raises:
        CheckpointError: if there is none, its class is not known here, a file is damaged, or it asks for what cannot be honoured.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such tokenizer folder")
    try:
        return _open(directory)
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001 - the tokenizers library raises Exception itself
        raise CheckpointError(
            f"{directory}: no tokenizer can be loaded from here: {type(error).__name__}: {str(error)[:300]}. Expected "
            "tokenizer.json, or the files that its class is built of, and tokenizer_config.json"
        ) from error


def _open(directory: Path) -> FileTokenizer:
    from .tokenizer_parts import build

    settings = _read(directory / "tokenizer_config.json")
    name, kind = _kind(directory, settings)
    _check_settings(directory, settings)
    file = directory / "tokenizer.json"
    # LlamaTokenizerFast takes the model of SentencePiece where it is told about the blank in front.
    if not file.is_file() or (kind.files == "sentencepiece" and settings.get("add_prefix_space") is not None):
        tokenizer, file = build(directory, kind.files, name, settings)
    else:
        tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    before = json.loads(tokenizer.to_str())
    if before["model"].get("dropout"):
        raise CheckpointError(f"{file}: dropout {before['model']['dropout']} draws other ids each time; set it to null")
    special = _special_tokens(directory, settings, kind, tokenizer)
    notes = _set_prefix_space(tokenizer, settings, kind)
    _set_ends(tokenizer, settings, kind, special, directory)
    tokenizer.encode_special_tokens = bool(settings.get("split_special_tokens", False))
    unknown = special.get("unk_token")
    return FileTokenizer(
        tokenizer,
        file,
        None if unknown is None else tokenizer.token_to_id(str(unknown)),
        bool(settings.get("clean_up_tokenization_spaces", False)),
        settings.get("add_prefix_space") in (None, True),
        _changes(before, tokenizer) if file.name == "tokenizer.json" else (),
        notes,
    )


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected a mapping, got a {type(found).__name__}")
    return found


def _kind(directory: Path, settings: Mapping[str, Any]) -> tuple[str, Kind]:
    """Name and kind of the class that the folder states, or that goes with its model."""
    model = _read(directory / "config.json")
    name = (
        settings.get("tokenizer_class") or model.get("tokenizer_class") or _OF_MODELS.get(str(model.get("model_type")))
    )
    if name is None and not settings and not model and (directory / "tokenizer.json").is_file():
        name = "PreTrainedTokenizerFast"
    kind = _KINDS.get(str(name).removesuffix("Fast"))
    if kind is None:
        own = ", and its own code (auto_map) is never run" if "auto_map" in settings or "auto_map" in model else ""
        raise CheckpointError(
            f"{directory}: no tokenizer can be loaded from here: tokenizer_class {name!r} is not known{own}; known are "
            f"{', '.join(_KINDS)}. If tokenizer.json holds all there is, state PreTrainedTokenizerFast in tokenizer_config.json"
        )
    return str(name), kind


def _check_settings(directory: Path, settings: Mapping[str, Any]) -> None:
    if settings.get("fix_mistral_regex"):
        raise CheckpointError(
            f"{directory / 'tokenizer_config.json'}: fix_mistral_regex replaces the pattern of tokenizer.json, which is not "
            "supported; write the pattern into tokenizer.json and leave the setting out"
        )


# -- special and added tokens -----------------------------------------------------------------------------------------
def _special_tokens(
    directory: Path, settings: Mapping[str, Any], kind: Kind, tokenizer: Tokenizer
) -> dict[str, str | AddedToken]:
    """Adds the tokens that the folder names beside its file; the special ones by their names."""
    stated = {int(index): _added(token) for index, token in (settings.get("added_tokens_decoder") or {}).items()}
    values = dict(kind.tokens) | {name: settings[name] for name in (*_NAMED, *_LISTED) if name in settings}
    if "added_tokens_decoder" not in settings:  # a folder of before transformers 4.34
        values |= _read(directory / "special_tokens_map.json")
        stated = _older_added_tokens(directory, values) | tokenizer.get_added_tokens_decoder()
    known = {str(token.content): token for token in stated.values()}
    special = {
        name: _named(values[name], known, kind.plain)
        for name in _NAMED
        if values.get(name) is not None and values.get(name) != ""
    }
    listed = [
        _added(one) if isinstance(one, Mapping) else one for name in _LISTED for one in _members(values.get(name))
    ]
    there = {repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
    wanted: list[str | AddedToken] = [token for _, token in sorted(stated.items()) if repr(token) not in there]
    named: dict[str, str | AddedToken] = {}
    for token in (*special.values(), *listed):
        named.setdefault(_text(token), token)
    have = {str(t.content) for t in tokenizer.get_added_tokens_decoder().values()} | {_text(t) for t in wanted}
    for content, token in named.items():
        # A token with properties of its own replaces one of the file, a mere name does not.
        if (isinstance(token, AddedToken) and repr(token) not in there) or content not in have:
            wanted.append(token)
    tokenizer.add_tokens([_as_added(token, _text(token) in named) for token in wanted])
    return special


def _members(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, Mapping) else list(value or ())


def _named(value: Any, known: Mapping[str, AddedToken], plain: bool) -> str | AddedToken:
    value = _added(value) if isinstance(value, Mapping) else str(value)
    if (content := _text(value)) in known:
        return known[content]
    return AddedToken(value, special=True, normalized=False) if plain and isinstance(value, str) else value


def _older_added_tokens(directory: Path, special: Mapping[str, Any]) -> dict[int, AddedToken]:
    """``added_tokens.json``: a token -> its id."""
    names = {_text(_added(v) if isinstance(v, Mapping) else v) for n in _NAMED if (v := special.get(n)) is not None}
    names |= {_text(_added(v) if isinstance(v, Mapping) else v) for n in _LISTED for v in _members(special.get(n))}
    found = _read(directory / "added_tokens.json")
    return {int(i): AddedToken(c, normalized=c not in names, special=c in names) for c, i in found.items()}


def _added(value: Mapping[str, Any]) -> AddedToken:
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(value["content"], **{name: bool(value[name]) for name in names if name in value})


def _as_added(token: str | AddedToken, special: bool) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=special)
    token.special = token.special or special
    return token


def _text(token: str | AddedToken) -> str:
    return token.content if isinstance(token, AddedToken) else str(token)


# -- what stands around a text ----------------------------------------------------------------------------------------
def _set_prefix_space(tokenizer: Tokenizer, settings: Mapping[str, Any], kind: Kind) -> tuple[str, ...]:
    """``add_prefix_space`` where the file's pre-tokenizer is a byte-level one alone: inside of a sequence nobody sets it."""
    found = json.loads(tokenizer.to_str())["pre_tokenizer"] or {}
    if "add_prefix_space" not in found or kind.files == "sentencepiece":
        return ()
    wanted = settings.get("add_prefix_space", kind.prefix_space)
    if wanted is None:
        if not found["add_prefix_space"]:
            return ()
        return (
            "tokenizer.json puts a blank in front of a text and tokenizer_config.json does not say add_prefix_space: done as in "
            "the file; transformers 4 did without (state add_prefix_space: false if the model was trained so)",
        )
    if bool(wanted) != found["add_prefix_space"]:
        others = {name: found[name] for name in ("trim_offsets", "use_regex") if name in found}
        tokenizer.pre_tokenizer = getattr(pre_tokenizers, found["type"])(add_prefix_space=bool(wanted), **others)
    return ()


def _set_ends(
    tokenizer: Tokenizer, settings: Mapping[str, Any], kind: Kind, special: Mapping[str, Any], directory: Path
) -> None:
    """Marks of beginning and end, in the classes that write the post-processor themselves."""
    if kind.ends is None:
        return
    ends = []
    for side, name, usual in zip(("bos", "eos"), ("bos_token", "eos_token"), kind.ends, strict=True):
        if not settings.get(f"add_{side}_token", usual):
            ends.append(None)
        elif name not in special:
            raise CheckpointError(
                f"{directory / 'tokenizer_config.json'}: add_{side}_token is true, but there is no {name}"
            )
        else:
            ends.append(_text(special[name]))
    first, last = ends
    single = [*([f"{first}:0"] if first else []), "$A:0", *([f"{last}:0"] if last else [])]
    ids = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(filter(None, ends))]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=[*single, "$B:1"], special_tokens=ids)


def _changes(before: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[str, ...]:
    after = json.loads(tokenizer.to_str())
    names = {"pre_tokenizer": "add_prefix_space", "added_tokens": "added and special tokens"}
    changed = [what for name, what in names.items() if before[name] != after[name]]
    return (*changed, *(["split_special_tokens"] if tokenizer.encode_special_tokens else []))
