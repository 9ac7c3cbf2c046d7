"""data.json and the files it names: what is read, and what an error spares."""

import json
import random
import re

import kaldiio
import numpy as np
import pytest

from espnet2_vllm.errors import DataError
from espnet2_vllm.io.data_json import open_data_json, read_utterances
from espnet2_vllm.layout import Layout
from espnet2_vllm.plan import Given, Utterance, Wanted
from espnet2_vllm.prompt.opuslm import Facts

NAMES = [f"<unused_{i}>" for i in range(256)]
for _place, _name in {
    0: "<pad>",
    1: "<unk>",
    5: "<sos/eos>",
    8: "<system_prompt>",
    9: "<user_input>",
    10: "<assistant_output>",
    34: "<codec_ssl_start/end>",
    35: "<text_bpe_start/end>",
    37: "<spk_start/end>",
    64: "<textlm_task>",
    80: "<codec_ssl_asr_task>",
    81: "<codec_ssl_tts_task>",
    82: "<codec_ssl_plain_tts_task>",
    83: "<codec_ssl_audiolm_task>",
    89: "<audio_dialogue_task>",
}.items():
    NAMES[_place] = _name
LAYOUT = Layout.opuslm(NAMES, {"text_bpe": [280, 400], "ssl": [256, 264], "codec": [264, 280]}, 3)
FACTS = Facts(speaker_prompt_length=4)


class Letters:
    """A letter a token."""

    def encode_opuslm(self, text):
        return [ord(c) % 100 for c in text]


def codes(frames: int, first: int = 1) -> np.ndarray:
    """Arks hold ids counted from the start of the SSL span: 0..7, 8..15, 16..23."""
    return np.array([[1 + (first + t) % 7, 8 + t % 8, 16 + t % 8] for t in range(frames)], dtype=np.int32).reshape(-1)


class Corpus:
    """Writes a data.json and its files, with paths relative to the data.json."""

    def __init__(self, folder):
        self.folder = folder

    def lines(self, name: str, values: dict[str, str], kind: str) -> str:
        text = "".join(f"{key} {value}\n" for key, value in values.items())
        (self.folder / name).write_text(text, encoding="utf-8")
        return f"{name},x,{kind}"

    def arks(self, name: str, arrays: dict[str, np.ndarray]) -> str:
        kaldiio.save_ark(str(self.folder / f"{name}.ark"), arrays, scp=str(self.folder / "scp"))
        text = (self.folder / "scp").read_text(encoding="utf-8").replace(f"{self.folder}/", "")
        (self.folder / name).write_text(text, encoding="utf-8")
        return f"{name},x,kaldi_ark"

    def write(self, task: str, files: list[str], examples: list[str], **more):
        path = self.folder / "data.json"
        data = {"task": task, "vocabularies": [], "data_files": files, "examples": examples, **more}
        path.write_text(json.dumps(data), encoding="utf-8")
        return path


@pytest.fixture
def corpus(tmp_path):
    return Corpus(tmp_path)


def read(path, **options) -> list:
    return list(read_utterances(open_data_json(path), LAYOUT, Letters(), FACTS, **options))


def test_bad_utterances_spare_the_others(corpus):
    text = corpus.lines("text", {"u1": "abc", "u2": "", "u4": "abc", "u5": "abcd"}, "text")
    wav = corpus.arks("wav.scp", {u: codes(3) for u in ("u1", "u2", "u3", "u5")})
    (corpus.folder / "wav.scp.ark").write_bytes((corpus.folder / "wav.scp.ark").read_bytes()[:-3])
    path = corpus.write("codec_ssl_plain_tts", [text, wav], ["u5", "u1", "u2", "u3", "u4"])
    results = read(path)
    keys = [r.key if isinstance(r, Utterance) else r[0] for r in results]
    assert (
        keys == [f"codec_ssl_plain_tts_{u}" for u in ("u5", "u1", "u2", "u3", "u4")] == list(open_data_json(path).keys)
    )
    cut, good, empty, missing, no_target = results
    assert "codec_ssl_plain_tts_u5: " in str(cut[1]) and "wav.scp.ark:" in str(cut[1]) and "cut short" in str(cut[1])
    assert isinstance(good, Utterance) and good.info["texts"] == {"text": "abc"} and good.parts[1].reference is not None
    assert "nothing stands behind u2" in str(empty[1]) and str(corpus.folder / "text") in str(empty[1])
    assert "no line begins with u3" in str(missing[1])
    assert all(isinstance(r[1], DataError) for r in (cut, empty, missing))
    # A reference that is not there is not needed.
    assert isinstance(no_target, Utterance) and no_target.parts[1].reference is None


def test_a_set_without_references_can_be_decoded(corpus):
    text = corpus.lines("text", {"u1": "abc"}, "text")
    (utterance,) = read(corpus.write("codec_ssl_plain_tts", [text], ["u1"]))
    given, wanted = utterance.parts
    assert isinstance(given, Given) and isinstance(wanted, Wanted)
    assert wanted.header[:, 0].tolist() == [LAYOUT.modality_token("audio")] and wanted.reference is None
    assert utterance.info["entries"] == ("text", "wav.scp") and utterance.info["task"] == "codec_ssl_plain_tts"
    (utterance,) = read(corpus.write("codec_ssl_audiolm", [], ["u1"]))
    assert len(utterance.parts) == 1 and len(utterance.parts[0].header) == 3


def test_keys_choose_and_order(corpus):
    text = corpus.lines("text", {f"u{i}": "abc" for i in range(5)}, "text")
    path = corpus.write("codec_ssl_plain_tts", [text], [f"u{i}" for i in range(5)])
    wanted = ["codec_ssl_plain_tts_u3", "codec_ssl_plain_tts_u0"]
    assert [u.key for u in read(path, keys=wanted)] == wanted


def test_ids_that_begin_with_letters_of_the_task_stay_whole(corpus):
    """ESPnet's ``lstrip`` would make ``t`` of ``codec_t``."""
    text = corpus.lines("text", {"codec_t": "abc", "ssl": "de"}, "text")
    path = corpus.write("codec_ssl_plain_tts", [text], ["codec_t", "ssl"])
    assert [u.info["uid"] for u in read(path)] == ["codec_t", "ssl"]


def test_speaker_prompts_come_from_another_utterance(corpus):
    text = corpus.lines("text", dict.fromkeys("abcde", "abc"), "text")
    speakers = corpus.lines("utt2spk", {"a": "one", "b": "one", "c": "one", "d": "two", "e": "three"}, "text")
    wav = corpus.arks("wav.scp", {u: codes(2, i) for i, u in enumerate("abcd")})
    path = corpus.write("codec_ssl_tts", [text, speakers, wav], list("abde"))

    def prompt(part: Given) -> int:
        return int(part.rows[1, 0]) - LAYOUT.streams[0].start

    starts = {u: 1 + (i + 0) % 7 for i, u in enumerate("abcd")}
    drawn = {"a": set(), "b": set()}
    for seed in range(20):
        a, b, d, e = read(path, seed=seed)
        drawn["a"].add(prompt(a.parts[1]))
        drawn["b"].add(prompt(b.parts[1]))
        assert prompt(d.parts[1]) == starts["d"]  # the only one of its speaker
        assert len(d.parts[1].rows) == 1 + FACTS.speaker_prompt_length + LAYOUT.num_streams - 1
        assert "prompt of speaker three" in str(e[1]) and "no line begins with e" in str(e[1])
        again = read(path, seed=seed)[0]
        np.testing.assert_array_equal(again.parts[1].rows, a.parts[1].rows)
    assert drawn == {"a": {starts["b"], starts["c"]}, "b": {starts["a"], starts["c"]}}
    with pytest.raises(DataError, match="utt2spk names speakers, so a wav.scp of type kaldi_ark is needed"):
        open_data_json(corpus.write("codec_ssl_tts", [text, speakers], ["a"]))
    arks = corpus.arks("utt2spk", {"a": codes(2, 5)})
    (a,) = read(corpus.write("codec_ssl_tts", [text, arks], ["a"]))
    assert prompt(a.parts[1]) == 6


def test_dialogues(corpus):
    corpus.arks("turns", {"t": codes(2)})
    spec = (corpus.folder / "turns").read_text(encoding="utf-8").split()[1]
    turns = [
        ["system", "codec_ssl", False, spec],
        ["user", "text_bpe", False, "hello"],
        ["assistant", "codec_ssl", True, spec],
    ]
    pack = {
        "good": turns,
        "shape": [["user", "text_bpe", "hello"]],
        "image": [["user", "image", False, "x.png"]],
        "gone": [["user", "codec_ssl", False, "other.ark:3"], turns[2]],
        "none": [],
    }
    (corpus.folder / "pack 1.json").write_text(json.dumps(pack), encoding="utf-8")
    (corpus.folder / "broken.json").write_text('{"x":\n [', encoding="utf-8")
    index = dict.fromkeys([*pack, "lost"], "pack 1.json") | {"broken": "broken.json", "absent": "absent.json"}
    files = [corpus.lines("dialogue", index, "dialogue_json")]
    results = read(corpus.write("audio_dialogue", files, list(index)))
    errors = {r[0]: str(r[1]) for r in results if not isinstance(r, Utterance)}
    (good,) = [r for r in results if isinstance(r, Utterance)]
    assert [(type(p), p.role, p.modality) for p in good.parts] == [
        (Given, "system", "spk"),
        (Given, "user", "text_bpe"),
        (Wanted, "assistant", "codec_ssl"),
    ]
    assert good.parts[2].header[:, 0].tolist() == [10, 34]
    for uid, message in {
        "shape": "turn 0 of shape is .*expected .role, modality, is_target",
        "image": "modality 'image' cannot be decoded",
        "gone": "turn 0 of gone: other.ark:3: no such file|other.ark: no such file",
        "none": "expected a list of turns",
        "lost": "has no dialogue lost",
        "broken": "broken.json:2: no JSON",
        "absent": "absent.json: no such file",
    }.items():
        assert re.search(message, errors[f"audio_dialogue_{uid}"]), errors[f"audio_dialogue_{uid}"]
    (last,) = read(corpus.write("audio_dialogue", files, ["good"]), inference_last_segment=True)
    assert isinstance(last.parts[2], Wanted)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "data.json:1: no JSON"),
        ("[]", "expected an object"),
        ("{}", "'task' is missing"),
        ('{"task": "codec_ssl_asr", "data_files": []}', "'examples' is missing"),
        ('{"task": "codec_ssl_asr", "data_files": [], "examples": []}', "there is nothing to decode"),
        ('{"task": "codec_ssl_asr", "data_files": [], "examples": [3]}', "list of ids"),
        ('{"task": "codec_ssl_asr", "data_files": [], "examples": ["a", "b", "a"]}', "come twice: a"),
        ('{"task": "codec_ssl_arr", "data_files": [], "examples": ["a"]}', "did you mean 'codec_ssl_asr'"),
        ('{"task": "codec_ssl_asr", "data_files": ["x"], "examples": ["a"]}', "expected 'path,modality,type'"),
        ('{"task": "codec_ssl_asr", "data_files": [], "examples": ["a"]}', "needs wav.scp among its data_files"),
        ('{"task": "textlm", "data_files": [], "examples": ["a"]}', "needs text among its data_files; it has none"),
        ('{"task": "textlm", "data_files": ["TEXT", "TEXT"], "examples": ["a"]}', "two files named text"),
        ('{"task": "textlm", "data_files": ["TEXT"], "examples": ["a"], "vocabularies": 3}', "'vocabularies' is 3"),
        ('{"task": "codec_ssl_asr", "data_files": ["a/wav.scp,y,kaldi_ark"], "examples": ["a"]}', "a/wav.scp: no such"),
    ],
)
def test_a_data_json_that_cannot_be_used(tmp_path, content, message):
    path = tmp_path / "data.json"
    (tmp_path / "text").write_text("a one\n", encoding="utf-8")
    path.write_text(content.replace("TEXT", "text,text_bpe,text"), encoding="utf-8")
    with pytest.raises(DataError, match=message) as caught:
        open_data_json(path)
    assert str(path) in str(caught.value) or "looked at" in str(caught.value)
    assert caught.value.exit_code == 1


def test_a_type_that_does_not_fit_its_entry(corpus):
    text = corpus.lines("text", {"u": "abc"}, "kaldi_ark")
    with pytest.raises(DataError, match="text is of type kaldi_ark, expected text"):
        open_data_json(corpus.write("codec_ssl_plain_tts", [text], ["u"]))


def test_the_random_state_is_the_examples_own(corpus):
    """Whatever stands before an example, its draws are the same: a later start or another order changes nothing."""
    text = corpus.lines("text", dict.fromkeys("abcd", "abc"), "text")
    arks = corpus.arks("utt2spk", {u: codes(30, i) for i, u in enumerate("abcd")})
    path = corpus.write("codec_ssl_tts", [text, arks], list("abcd"))
    every = {u.key: u.parts[1].rows for u in read(path, seed=7)}
    for key, rows in every.items():
        (alone,) = read(path, seed=7, keys=[key])
        np.testing.assert_array_equal(alone.parts[1].rows, rows)
    state = random.getstate()
    read(path)
    assert random.getstate() == state
