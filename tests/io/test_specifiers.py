"""Data sets as command lines name them."""

import logging

import pytest

from espnet2_vllm.errors import ConfigError
from espnet2_vllm.io.specifiers import REGISTRY, parse_specifiers, read_registry


def names(specifiers) -> list[tuple]:
    return [(s.task, s.name, str(s.path)) for s in specifiers]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("text_to_audio:a:/data/a/dataset.json", ("text_to_audio", "a", "/data/a/dataset.json")),
        ("audio_to_text:b:c.json:2.5", ("audio_to_text", "b", "c.json")),
        ("dialogue:d:/my data/'x' \\ \"y\"/é.json ", ("dialogue", "d", "/my data/'x' \\ \"y\"/é.json ")),
        ("dialogue:my set:a b.json:1e1", ("dialogue", "my set", "a b.json")),
        ("text_only:a:x.json dialogue", ("text_only", "a", "x.json dialogue")),
    ],
)
def test_the_text_of_an_option_is_one_specifier_as_it_stands(text, expected):
    assert names(parse_specifiers(text, registered=False)) == [expected]
    assert parse_specifiers([text], registered=False)[0].text == text


def test_several_in_one_option_and_several_options():
    text = " text_to_audio:a:/data/a/dataset.json  audio_to_text:b:c.json:2.5\tdialogue:d:e.json:3 "
    old = [
        ("text_to_audio", "a", "/data/a/dataset.json"),
        ("audio_to_text", "b", "c.json"),
        ("dialogue", "d", "e.json"),
    ]
    assert names(parse_specifiers(text, registered=False)) == old
    new = parse_specifiers([text, "dialogue:e:/with blanks/f.json"], registered=False)
    assert names(new) == [*old, ("dialogue", "e", "/with blanks/f.json")]


def test_registered(tmp_path, monkeypatch, caplog):
    first, second = tmp_path / "one.yaml", tmp_path / "two.yaml"
    first.write_text("a: {path: a.json}\nb: {path: /abs/b.json}\n", encoding="utf-8")
    second.write_text("b: {path: /abs/newer.json, note: x}\n", encoding="utf-8")
    (tmp_path / "a.json").write_text("{}", encoding="utf-8")
    monkeypatch.setenv(REGISTRY, f"{first}: :{second}:{tmp_path}/gone.yaml")
    with caplog.at_level(logging.WARNING):
        found = parse_specifiers("text_to_audio:a dialogue:b:1.5", registered=True)
    assert names(found) == [("text_to_audio", "a", str(tmp_path / "a.json")), ("dialogue", "b", "/abs/newer.json")]
    assert "gone.yaml: no such file" in caplog.text and "two.yaml wins" in caplog.text
    with pytest.raises(ConfigError, match="'c' is not registered; registered are a, b"):
        parse_specifiers("text_to_audio:c", registered=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(REGISTRY, "one.yaml")
    assert names(parse_specifiers("text_only:a", registered=True)) == [("text_only", "a", "a.json")]
    monkeypatch.delenv(REGISTRY)
    with pytest.raises(ConfigError, match=f"registered are none .{REGISTRY} is ''"):
        parse_specifiers("text_only:a", registered=True)


@pytest.mark.parametrize(
    ("text", "registered", "message"),
    [
        ("", False, "is empty; expected task:name:path"),
        (
            "text_to_audio:a",
            False,
            "'text_to_audio:a' is no task:name:path/dataset.json.*it has 2 parts.*expected 3 or 4",
        ),
        (
            "text_only:a:b:/c.json:1",
            False,
            "it has 5 parts with ':' between them, expected 3 or 4; a path cannot hold one",
        ),
        ("text_only:a:b:/c.json", False, "the factor '/c.json' is no number"),
        ("text_to_audio::x.json", False, "is no task:name:path.*a part is empty"),
        ("text_to_audio", True, "is no task:name.:factor..*it has 1 parts.*expected 2 or 3"),
        ("text_to_audio:a:x.json", True, "the factor 'x.json' is no number"),
        (" text_only:a:x.json", False, "unknown task ' text_only'.*did you mean 'text_only'"),
        ("text_to_audoi:a:x.json", False, "unknown task 'text_to_audoi'.*did you mean 'text_to_audio'"),
        ("text_only:a:x.json dialogue:a:y.json", False, "a is named twice: text_only:a:x.json and dialogue:a:y.json"),
    ],
)
def test_slips_are_usage_errors(text, registered, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_specifiers(text, registered=registered, registry={})
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [", "cannot read"),
        ("- a", "expected a mapping"),
        ("a: b.json", "data set a is 'b.json'"),
        ("a: {p: x}", "data set a"),
    ],
)
def test_registries_that_are_none(tmp_path, content, message):
    path = tmp_path / "r.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_registry(str(path))
