"""Decoding files: lines in messages, yaml that cannot be read, anchors."""

import pytest
from decoding_samples import write

from espnet2_vllm.decoding import load_decoding
from espnet2_vllm.errors import ConfigError
from espnet2_vllm.yaml_document import Document


def test_messages_name_file_and_line(tmp_path):
    path = write(tmp_path, "dtype: float32\naudio:\n  temperature: 0.8\n  topkk: 20\n  max_step: 9\n")
    with pytest.raises(ConfigError) as caught:
        load_decoding(path, "bagpiper")
    assert str(caught.value).startswith(f"{path}:4: audio.topkk: unknown key; did you mean 'topk'?")
    path = write(tmp_path, "audio:\n  temperature: 1e-3\n  topk: 1\n  max_step: 9\n")
    with pytest.raises(ConfigError, match=r"decode\.yaml:2: audio\.temperature: .*write 0\.001"):
        load_decoding(str(path), "bagpiper")
    path = write(tmp_path, "dtype: float32\naudio:\n  temperature: 0.1\n  max_step: 9\n")
    with pytest.raises(ConfigError, match=r"decode\.yaml:2: audio\.topk: is missing"):
        load_decoding(path, "bagpiper")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("audio:\n  topk: 1\n  topk: 2\n", r":3: audio\.topk: is given twice \(first on line 2\)"),
        ("dtype: a\n'dtype': b\n", r":2: dtype: is given twice"),
        ("a: [{x: 1, x: 2}]\n", r":1: a\.0\.x: is given twice"),
        ("audio:\n  topk: [1\ndtype: x\n", r":\d+: is not valid yaml"),
        ("audio:\n\ttopk: 1\n", r":2: is not valid yaml"),
        ("a: 1\n---\nb: 2\n", r":\d: is not valid yaml"),
        ("a: *nowhere\n", r":1: is not valid yaml"),
        ("a: !!python/object:os.system x\n", r":1: is not valid yaml"),
        ("a: 1\nb: \x07\n", r":2: is not valid yaml.*remove the character"),
        ("a: 2024-99-99\n", r": holds a value that yaml cannot read"),
        ("a: &x\n  b: *x\n", r": is nested too deeply or refers to itself"),
        ("[" * 3000, r": is nested too deeply"),
        ("", r": is empty; expected a mapping"),
        ("# nothing\n", r": is empty"),
        ("- audio\n", r": holds a list; expected a mapping"),
        ("audio\n", r": holds text; expected a mapping"),
        ("audio:\n", r":1: audio: is nothing \(null\); expected a mapping with the keys temperature, topk"),
        (b"audio: \xff\n", r": is not UTF-8 text \(byte 7\)"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_decoding(path, "bagpiper")
    assert str(caught.value).startswith(str(path))


def test_missing_file_and_directory(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.yaml: cannot be read \(No such file"):
        load_decoding(tmp_path / "nothing.yaml", "bagpiper")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_decoding(tmp_path, "opuslm")


def test_bom_crlf_and_anchors(tmp_path):
    text = "\ufeffaudio: &a\r\n  temperature: 0.5\r\n  topk: 3\r\n  max_step: 9\r\ntext:\r\n  <<: *a\r\n  topk: 4\r\n"
    config = load_decoding(write(tmp_path, text), "bagpiper")
    assert (config.audio.topk, config.text.topk, config.text.max_rows) == (3, 4, 9)
    shared = "audio: &a {temperature: 0.5, topk: 3, max_step: 9}\ntext: *a\n"
    config = load_decoding(write(tmp_path, shared), "bagpiper", overrides={"audio.topk": 7})
    assert (config.audio.topk, config.text.topk) == (7, 3)


def test_aliases_that_multiply_are_refused_before_they_fill_the_memory(tmp_path):
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    for before, name in ("ab", "bc", "cd", "de", "ef", "fg", "gh", "hi"):
        lines.append(f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]")
    with pytest.raises(ConfigError, match="its aliases"):
        Document.read(write(tmp_path, "\n".join(lines)))
    assert len(Document.read(write(tmp_path, "\n".join(lines[:3]))).data["c"]) == 10


@pytest.mark.parametrize(
    "value", ["!!bool abc", "!!timestamp x", "!!int abc", "!!float abc", "!!binary x", "2001-99-99"]
)
def test_values_that_are_not_what_their_tag_says_are_messages(tmp_path, value):
    with pytest.raises(ConfigError, match="yaml"):
        Document.read(write(tmp_path, f"dtype: {value}\n"))
