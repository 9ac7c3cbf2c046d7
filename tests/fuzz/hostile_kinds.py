"""Kinds of files that are read: how to make one of each, and how this package reads it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from conftest import REPO, golden_models

from espnet2_vllm.errors import SpeechLMError

RATE = 16000
WHOLE = "(the whole set)"
_BAGPIPER, _OPUSLM = golden_models("bagpiper")[0], golden_models("opuslm")[0]


@dataclasses.dataclass(frozen=True)
class Kind:
    """``make`` writes a folder's files, of which ``damaged`` are; ``read`` gives what each entry is read as.

    Attributes:
        by_line: entries are lines that begin with their key.
        everything: the key under which a set that is refused as a whole says so.
    """

    make: Callable[[pathlib.Path], None]
    read: Callable[[pathlib.Path], dict[str, Any]]
    damaged: Sequence[str]
    by_line: bool = False
    others: tuple[str, ...] = ()
    everything: str = WHOLE

    def untouched(self, before: bytes, after: bytes) -> set[str]:
        """Entries that the damage left as they were."""
        if not self.by_line:
            return set(self.others)
        lines, kept = after.split(b"\n"), set()
        for line in before.split(b"\n"):
            key = line.split(b" ")[0]
            if key and lines.count(line) == 1 and sum(key in other for other in lines) == 1:
                kept.add(key.decode())
        return kept


def _tone(seconds: float = 0.4, pitch: float = 300.0) -> np.ndarray:
    return (0.3 * np.sin(2 * np.pi * pitch * np.arange(int(RATE * seconds)) / RATE)).astype(np.float32)


def _said(call: Callable[[], Any]) -> Any:
    """What ``call`` gives, or that it is refused, in a sentence."""
    try:
        value = call()
    except SpeechLMError as error:
        assert str(error), "an error without a message"
        return f"refused: {error}"
    return hashlib.sha256(value.tobytes()).hexdigest() if isinstance(value, np.ndarray) else value


# -- recordings -------------------------------------------------------------------------------------------------------
def _recording(suffix: str, **how: Any) -> Kind:
    def make(folder: pathlib.Path) -> None:
        import soundfile

        for name, pitch in (("a", 300.0), ("b", 500.0)):
            soundfile.write(folder / f"{name}.{suffix}", _tone(pitch=pitch), RATE, **how)

    def read(folder: pathlib.Path) -> dict[str, Any]:
        from espnet2_vllm.audio import read_audio

        return {name: _said(lambda name=name: read_audio(str(folder / f"{name}.{suffix}"))[0]) for name in "ab"}

    return Kind(make, read, (f"a.{suffix}",), others=("b",))


def _make_ark(folder: pathlib.Path) -> None:
    import kaldiio

    with kaldiio.WriteHelper(f"ark,scp:{folder}/wav.ark,{folder}/wav.scp") as writer:
        for name in "ab":
            writer(name, (RATE, (_tone() * 32767).astype(np.int16)))


def _read_ark(folder: pathlib.Path) -> dict[str, Any]:
    from espnet2_vllm.audio import read_audio

    places = dict(line.split() for line in (folder / "wav.scp").read_text(encoding="utf-8").splitlines())
    names = {name: f"{folder}/wav.ark:{place.rpartition(':')[2]}" for name, place in places.items()}
    return {name: _said(lambda spec=spec: read_audio(spec)[0]) for name, spec in names.items()}


def _make_codes(folder: pathlib.Path) -> None:
    import kaldiio

    with kaldiio.WriteHelper(f"ark,scp:{folder}/codes.ark,{folder}/codes.scp") as writer:
        for name in "ab":
            writer(name, np.arange(90, dtype=np.int32))


def _read_codes(folder: pathlib.Path) -> dict[str, Any]:
    from espnet2_vllm.io.kaldi import load_codes

    places = dict(line.split() for line in (folder / "codes.scp").read_text(encoding="utf-8").splitlines())
    names = {name: f"codes.ark:{place.rpartition(':')[2]}" for name, place in places.items()}
    return {name: _said(lambda spec=spec: load_codes(spec, folder)) for name, spec in names.items()}


# -- sets of Bagpiper -------------------------------------------------------------------------------------------------
@functools.cache
def _opened(model: pathlib.Path) -> Any:
    from espnet2_vllm.checkpoint import convert, open_checkpoint
    from espnet2_vllm.text import TextTokenizer

    folder = pathlib.Path(tempfile.mkdtemp(prefix="hostile."))
    convert(model, folder / "converted")
    checkpoint = open_checkpoint(folder / "converted")
    return checkpoint, TextTokenizer(checkpoint.tokenizer_dir)


def _rows(items: Any) -> dict[str, Any]:
    """Digests of what utterances are for the model."""
    from espnet2_vllm.io.journal import digest

    read: dict[str, Any] = {}
    for item in items:
        if isinstance(item, tuple):
            assert isinstance(item[1], SpeechLMError), item
            read[item[0]] = f"refused: {item[1]}"
        else:
            read[item.key] = digest(item)
    return read


def _dataset(task: str, entry: str, reader: str, file: str) -> Callable[[pathlib.Path], dict[str, Any]]:
    def read(folder: pathlib.Path) -> dict[str, Any]:
        from espnet2_vllm.io.dataset_json import open_datasets, read_utterances
        from espnet2_vllm.io.specifiers import parse_specifiers

        checkpoint, tokenizer = _opened(_BAGPIPER)
        path = folder / "dataset.json"
        if not path.exists():
            content = {"data_entry": [{"name": entry, "path": file, "reader": reader}], "samples": ["a", "b", "c"]}
            path.write_text(json.dumps(content), encoding="utf-8")
        try:
            (dataset,) = open_datasets(parse_specifiers(f"{task}:set:{path}", registered=False))
            return _rows(read_utterances(dataset, checkpoint.layout, tokenizer))
        except SpeechLMError as error:
            return {WHOLE: f"refused: {error}"}

    return read


def _make_text(folder: pathlib.Path) -> None:
    (folder / "text").write_text("a one two\nb three\nc four five six\n", encoding="utf-8")


def _make_dataset_json(folder: pathlib.Path) -> None:
    _make_text(folder)
    _dataset("text_only", "text1", "text", "text")(folder)


def _make_dialogue(folder: pathlib.Path) -> None:
    lines = [
        json.dumps({"example_id": uid, "messages": [["user", "text", f"say {uid}"], ["assistant", "text", ""]]})
        for uid in "abc"
    ]
    (folder / "dialogue.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


# -- sets of OpusLM ---------------------------------------------------------------------------------------------------
def _make_data_json(folder: pathlib.Path) -> None:
    shutil.copytree(_OPUSLM / "data" / "codec_ssl_asr", folder / "data" / "codec_ssl_asr")
    for path in (_OPUSLM / "data").glob("*.*"):
        shutil.copy(path, folder / "data")


def _read_data_json(folder: pathlib.Path) -> dict[str, Any]:
    from espnet2_vllm.io.data_json import open_data_json, read_utterances
    from espnet2_vllm.prompt.opuslm import Facts

    checkpoint, tokenizer = _opened(_OPUSLM)
    try:
        data = open_data_json(folder / "data" / "codec_ssl_asr" / "data.json", base_dir=_OPUSLM)
        facts = Facts.from_preprocessor(checkpoint.preprocessor)
        return _rows(read_utterances(data, checkpoint.layout, tokenizer, facts))
    except SpeechLMError as error:
        return {WHOLE: f"refused: {error}"}


# -- yaml, checkpoints, journals --------------------------------------------------------------------------------------
def _copy(*paths: pathlib.Path) -> Callable[[pathlib.Path], None]:
    def make(folder: pathlib.Path) -> None:
        for path in paths:
            shutil.copy(path, folder)

    return make


def _one(read: Callable[[pathlib.Path], Any]) -> Callable[[pathlib.Path], dict[str, Any]]:
    return lambda folder: {"it": str(_said(lambda: read(folder)))[:500]}


def _decoding(folder: pathlib.Path) -> Any:
    from espnet2_vllm.decoding import load_decoding

    return load_decoding(folder / "inference_sft.yaml", "bagpiper")


def _source(folder: pathlib.Path) -> Any:
    from espnet2_vllm.checkpoint.describe import describe
    from espnet2_vllm.checkpoint.sources import find_source

    return describe(find_source(folder)).layout


def _make_model(folder: pathlib.Path) -> None:
    shutil.copytree(_BAGPIPER, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("cases", "data", "trees"))


def _make_converted(folder: pathlib.Path) -> None:
    shutil.copytree(_opened(_BAGPIPER)[0].path, folder / "converted")


def _read_converted(folder: pathlib.Path) -> dict[str, Any]:
    from espnet2_vllm.checkpoint import open_checkpoint
    from espnet2_vllm.checkpoint.checking import check_directory

    opened = str(_said(lambda: open_checkpoint(folder / "converted").layout))[:200]
    check_directory(folder / "converted")
    return {"opened": opened}


def _make_journal(folder: pathlib.Path) -> None:
    from espnet2_vllm.io.journal import Journal, Record

    journal = Journal(folder, {"seed": 1})
    for uid in "abc":
        (folder / f"{uid}.txt").write_text(uid, encoding="utf-8")
        places = (journal.save_tokens(np.arange(40, dtype=np.int32)),)
        journal.append(Record(uid, "ok", input="x", tokens=places, result=[uid, "one two three"]))
    journal.close()


def _read_journal(folder: pathlib.Path) -> dict[str, Any]:
    """A record is taken over as it was written, or its utterance is decoded again."""
    from espnet2_vllm.io.journal import Journal

    try:
        journal = Journal(folder, {"seed": 1})
    except SpeechLMError as error:
        return {WHOLE: f"refused: {error}"}
    read: dict[str, Any] = {"opened": True}
    for uid in "abc":
        if journal.finished(uid, "x"):
            record = journal.records[uid]
            tokens = [journal.load_tokens(place).tolist() for place in record.tokens]
            assert record.result == [uid, "one two three"] and tokens == [list(range(40))], record
    journal.close()
    return read


def _tokenizer(folder: pathlib.Path) -> Any:
    from espnet2_vllm.text import TextTokenizer

    return TextTokenizer(folder / "tokenizer").encode_bagpiper("one two three")


def _make_tokenizer(folder: pathlib.Path) -> None:
    shutil.copytree(_opened(_BAGPIPER)[0].tokenizer_dir, folder / "tokenizer")


KINDS: dict[str, Kind] = {
    "wav": _recording("wav"),
    "float wav": _recording("wav", subtype="FLOAT"),
    "flac": _recording("flac"),
    "ogg": _recording("ogg"),
    "mp3": _recording("mp3"),
    "recordings in an ark": Kind(_make_ark, _read_ark, ("wav.ark",)),
    "codes in an ark": Kind(_make_codes, _read_codes, ("codes.ark",)),
    "text": Kind(_make_text, _dataset("text_only", "text1", "text", "text"), ("text",), by_line=True),
    "dataset.json": Kind(_make_dataset_json, _dataset("text_only", "text1", "text", "text"), ("dataset.json",)),
    "dialogue": Kind(
        _make_dialogue, _dataset("dialogue", "dialogue", "dialogue", "dialogue.jsonl"), ("dialogue.jsonl",)
    ),
    "data.json": Kind(_make_data_json, _read_data_json, ("data/codec_ssl_asr/data.json",)),
    "decoding yaml": Kind(_copy(REPO / "conf" / "inference_sft.yaml"), _one(_decoding), ("inference_sft.yaml",)),
    "training yaml": Kind(_make_model, _one(_source), ("train.yaml",)),
    "converted directory": Kind(
        _make_converted,
        _read_converted,
        tuple(f"converted/{name}" for name in ("speechlm.json", "config.json", "model.safetensors.index.json")),
    ),
    "shard": Kind(_make_converted, _read_converted, ("converted/model-00001-of-00001.safetensors",)),
    "tokenizer": Kind(_make_tokenizer, _one(_tokenizer), ("tokenizer/tokenizer.json",)),
    "journal": Kind(_make_journal, _read_journal, (".journal/journal.jsonl", ".journal/tokens.i32")),
}
