"""Files that somebody else made: links, yaml that multiplies, ids that write on the terminal, sizes that nothing has."""

import json
import logging
import pathlib
import shutil

import numpy as np
import pytest
from conftest import golden_models

from espnet2_vllm.audio.writing import append_to_ark
from espnet2_vllm.audio_format import AudioFormat
from espnet2_vllm.checkpoint import convert, ensure_converted, open_checkpoint
from espnet2_vllm.checkpoint.sources import read_yaml, require
from espnet2_vllm.codec.base import CodecDescription
from espnet2_vllm.codec.espnet import find_files
from espnet2_vllm.decoding import load_decoding
from espnet2_vllm.errors import MOST_CHARACTERS, CheckpointError, ConfigError, DataError, SpeechLMError, shown
from espnet2_vllm.io.journal import Journal, Record
from espnet2_vllm.io.specifiers import read_registry
from espnet2_vllm.logs import OneLineFormatter, quiet_engine
from espnet2_vllm.safe_yaml import parse_yaml

BOMB = "a: &a [1, 2, 3, 4, 5, 6, 7, 8, 9]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
MODEL = golden_models("bagpiper")[0]


# -- links ------------------------------------------------------------------------------------------------------------
def test_a_lock_that_is_a_link_leaves_its_target_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("ESPNET2_VLLM_CACHE", str(tmp_path / "cache"))
    folder = shutil.copytree(MODEL, tmp_path / "model")
    ensure_converted(folder)
    (lock,) = (tmp_path / "cache").rglob(".*.lock")
    precious = tmp_path / "precious"
    precious.write_text("a thesis")
    lock.unlink()
    lock.symlink_to(precious)
    with pytest.raises(ConfigError, match="is a symbolic link .* remove the link"):
        ensure_converted(folder)
    assert precious.read_text() == "a thesis"


def test_a_lock_is_never_emptied(tmp_path, monkeypatch):
    monkeypatch.setenv("ESPNET2_VLLM_CACHE", str(tmp_path / "cache"))
    folder = shutil.copytree(MODEL, tmp_path / "model")
    ensure_converted(folder)
    (lock,) = (tmp_path / "cache").rglob(".*.lock")
    lock.write_text("whatever stands here")
    ensure_converted(folder)
    assert lock.read_text() == "whatever stands here"


def test_an_ark_that_is_a_link_is_not_written_through(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("a thesis")
    (tmp_path / "wav.ark").symlink_to(precious)
    with pytest.raises(ConfigError, match="wav.ark: is a symbolic link"):
        append_to_ark(tmp_path / "wav.ark", "a", np.zeros(100, dtype=np.float32), 16000, AudioFormat("wav.ark", "16"))
    assert precious.read_text() == "a thesis"


@pytest.mark.parametrize("there", [True, False], ids=["target", "no target"])
@pytest.mark.parametrize("name", ["", "journal.jsonl", "tokens.i32"])
@pytest.mark.parametrize("resumed", [True, False], ids=["resumed", "fresh"])
def test_a_journal_that_is_a_link_is_not_written_through(tmp_path, monkeypatch, name, there, resumed):
    monkeypatch.delenv("VLLM_LOGGING_CONFIG_PATH", raising=False)
    monkeypatch.setattr("espnet2_vllm.logs._USERS_CHOICE", ())
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    link, target = out / ".journal" / name, elsewhere / "precious"
    out.mkdir()
    elsewhere.mkdir()
    if resumed:
        journal = Journal(out, {})
        journal.append(Record("a", "ok", tokens=(journal.save_tokens(np.arange(5)),)))
        journal.close()
    if not name:
        target = elsewhere / "folder"
        shutil.move(link, target) if resumed else target.mkdir()
        if not there:
            shutil.rmtree(target)
    else:
        link.parent.mkdir(exist_ok=True)
        if there:
            shutil.move(link, target) if resumed else target.write_text("a thesis")
        link.unlink(missing_ok=True)
    link.symlink_to(target)
    before = {path: path.is_file() and path.read_bytes() for path in elsewhere.rglob("*")}
    try:
        quiet_engine(out / ".journal" / "libraries.log")
        journal = Journal(out, {}, resume=resumed)
        journal.append(Record("b", "ok", tokens=(journal.save_tokens(np.arange(7)),)))
        journal.close()
    except ConfigError as error:
        assert "is a symbolic link" in str(error) and "remove the link" in str(error)
        assert link.is_symlink()
    else:  # set aside or replaced, itself
        assert name and not link.is_symlink() and not resumed
    assert {path: path.is_file() and path.read_bytes() for path in elsewhere.rglob("*")} == before


# -- yaml that multiplies ---------------------------------------------------------------------------------------------
def codec_of(folder: pathlib.Path):
    (folder / "meta.yaml").write_text(BOMB)
    return find_files(CodecDescription("espnet", path=str(folder)), base_dir=folder, weights_needed=False)


READERS = {
    "training yaml": lambda path: read_yaml(path),
    "decoding yaml": lambda path: load_decoding(path, "bagpiper"),
    "registry": lambda path: read_registry(str(path)),
    "codec": lambda path: codec_of(path.parent),
    "option": lambda path: parse_yaml(path.read_text(), "--engine_option x: the value", ConfigError),
}


@pytest.mark.parametrize("reader", READERS)
def test_aliases_do_not_multiply(reader, tmp_path):
    path = tmp_path / "bomb.yaml"
    path.write_text(BOMB)
    with pytest.raises(SpeechLMError, match=r"its aliases \(\*\) stand for [0-9]+ values") as caught:
        READERS[reader](path)
    assert len(str(caught.value)) < 1000


def test_blocks_named_twice_are_read(tmp_path):
    """As ESPnet's own yaml dumps have them."""
    assert parse_yaml("a: &x {b: [1, 2]}\nc: *x\n", "here", ConfigError) == {"a": {"b": [1, 2]}, "c": {"b": [1, 2]}}


def test_a_long_token_list_is_read(tmp_path):
    (tmp_path / "config.yaml").write_text("token_list:\n" + "".join(f"- token{n}\n" for n in range(200_000)))
    assert len(read_yaml(tmp_path / "config.yaml")["token_list"]) == 200_000


def test_messages_show_the_beginning_of_a_long_value():
    with pytest.raises(CheckpointError) as caught:
        require({"key": list(range(100_000))}, "key", str, "train.yaml")
    assert str(caught.value).startswith("train.yaml: key is [0, 1, 2") and len(str(caught.value)) < 500


# -- what a terminal or a log would take for its own ------------------------------------------------------------------
@pytest.mark.parametrize("text", ["\x1b[2J", "a\rb", "\x9b31m", "\x00", "a\u2028b", "\ud800"])
def test_messages_are_printable(text):
    message = str(DataError(f"utterance {text}: too long"))
    assert text not in message and "too long" in message
    message.encode()


def test_long_messages_keep_what_to_do():
    message = str(DataError(f"utterance {'x' * 100_000}: too long; shorten it"))
    assert len(message) < 1.1 * MOST_CHARACTERS and message.endswith("shorten it") and "characters ...]" in message


def test_an_id_cannot_write_a_line_of_the_log():
    record = logging.LogRecord("x", logging.ERROR, "x.py", 1, "%s: refused", ("a\nERROR: all lost\x1b[0m",), None)
    line = OneLineFormatter("%(levelname)s: %(message)s").format(record)
    assert line == "ERROR: a\\nERROR: all lost\\x1b[0m: refused"


def test_shown_is_short():
    for value in ("x" * 10**7, list(range(10**6)), [10**5000], {"a" * 10**6: 1}, ValueError("y" * 10**6)):
        assert len(shown(value)) < 1200


# -- converted directories --------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole") / "converted"
    convert(MODEL, directory)
    return directory


DESCRIPTIONS = {
    "rows below zero": (lambda content: content.update(max_rows=-1), "max_rows is -1, expected 2 to"),
    "rows of another type": (lambda content: content.update(max_rows=True), "max_rows is True"),
    "more rows than positions": (lambda content: content.update(max_rows=10**12), "max_rows is 1000000000000"),
    "a file elsewhere": (
        lambda content: content.update(continuous_audio={"encoder": "x", "weights": "../../x"}),
        "continuous_audio.weights is '../../x', expected a file below",
    ),
    "an absolute file": (
        lambda content: content.update(continuous_audio={"encoder": "x", "config": "/etc/passwd"}),
        "continuous_audio.config is '/etc/passwd'",
    ),
}


@pytest.mark.parametrize("case", DESCRIPTIONS)
def test_what_is_opened_is_checked(case, whole, tmp_path):
    change, words = DESCRIPTIONS[case]
    directory = shutil.copytree(whole, tmp_path / "converted")
    content = json.loads((directory / "speechlm.json").read_text())
    change(content)
    (directory / "speechlm.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(directory)


@pytest.mark.parametrize("size", [10**12, 1, -5])
def test_the_vocabulary_is_the_models(size, whole, tmp_path):
    directory = shutil.copytree(whole, tmp_path / "converted")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    with pytest.raises(CheckpointError, match=f"{config['vocab_size']} ids, config.json a vocab_size of {size}"):
        open_checkpoint(directory)
