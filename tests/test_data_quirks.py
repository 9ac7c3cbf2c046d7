"""What data directories hold in the field, each by its name: one bad thing costs one utterance and one reason, never the others.

Names follow the threads that reported them (ESPnet, Kaldi, WeNet issues on data handling).
"""

import json
import pathlib
import random
import re
import shutil

import kaldiio
import numpy as np
import pytest
import soundfile
import yaml
from conftest import golden_models

from espnet2_vllm import backends
from espnet2_vllm.audio import read_audio
from espnet2_vllm.bin import format_audio, merge_outputs, speechlm_inference_chat, split_data
from espnet2_vllm.errors import DataError
from espnet2_vllm.io.data_json import open_data_json
from espnet2_vllm.io.keyed import read_keyed, write_keyed
from espnet2_vllm.io.vocabularies import check_vocabularies
from espnet2_vllm.plan import RowResult

MODEL = next(model for model in golden_models("opuslm") if "llama" in model.name)
RATE = 16000


# -- text files --------------------------------------------------------------------------------------------------------
def text_set(folder, content, examples, task="codec_ssl_plain_tts"):
    """A data.json over a ``text`` with these bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text").write_bytes(content if isinstance(content, bytes) else content.encode())
    data = {
        "task": task,
        "vocabularies": [],
        "data_files": [f"{folder}/text,text_bpe,text"],
        "examples": list(examples),
    }
    (folder / "data.json").write_text(json.dumps(data), encoding="utf-8")
    return folder / "data.json"


def texts(path):
    """Every example's text, or the message of what is wrong with it."""
    data = open_data_json(path)
    found = {}
    for uid in data.examples:
        try:
            found[uid] = data.load(uid, None)["text"]
        except DataError as error:
            found[uid] = str(error)
    return found


GOOD = {
    "unsorted": (b"b two\na one\n", {"a": "one", "b": "two"}),
    "crlf": (b"a one\r\nb two\r\n", {"a": "one", "b": "two"}),
    "bom": (b"\xef\xbb\xbfa one\nb two\n", {"a": "one", "b": "two"}),
    "tabs": (b"a\tone\nb\t\ttwo\twords\n", {"a": "one", "b": "two\twords"}),
    "trailing_spaces": (b"a one  \nb two \t\n", {"a": "one", "b": "two"}),
    "empty_lines": (b"\na one\n\n\nb two\n", {"a": "one", "b": "two"}),
    "no_newline_at_the_end": (b"a one\nb two", {"a": "one", "b": "two"}),
    "cjk": ("a 你好 世界\nb こんにちは\n", {"a": "你好 世界", "b": "こんにちは"}),
    "emoji": ("a 🙂👩‍👩‍👧\nb two\n", {"a": "🙂👩‍👩‍👧", "b": "two"}),
    "combining_marks": ("a e\u0301te\u0301\nb two\n", {"a": "e\u0301te\u0301", "b": "two"}),
    "right_to_left": ("a שלום עולם\nb مرحبا\n", {"a": "שלום עולם", "b": "مرحبا"}),
    "nul": (b"a o\x00ne\nb two\n", {"a": "o\x00ne", "b": "two"}),
    "u2028": ("a one\u2028more\nb two\x85more\n", {"a": "one\u2028more", "b": "two\x85more"}),
    "ids_of_every_kind": ("-dash one\n../up two\nx/y three\n", {"-dash": "one", "../up": "two", "x/y": "three"}),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_text_file_with(name, tmp_path):
    content, expected = GOOD[name]
    assert texts(text_set(tmp_path, content, expected)) == expected


@pytest.mark.parametrize(("content", "reason"), [(b"a one\nb\n", "b"), (b"a one\nb   \n", "b"), (b"a one\n", "b")])
def test_an_utterance_that_is_empty_or_an_id_only_costs_itself(content, reason, tmp_path):
    found = texts(text_set(tmp_path, content, "ab"))
    assert found["a"] == "one" and "text: n" in found["b"] and f" {reason}" in found["b"]


@pytest.mark.parametrize(
    ("content", "examples", "message"),
    [
        (b"a one\n", "aa", "examples come twice: a"),
        (b"a one\n", "", "there is nothing to decode"),
    ],
)
def test_what_makes_a_set_ambiguous_is_refused_with_its_line(content, examples, message, tmp_path):
    with pytest.raises(DataError, match=message):
        open_data_json(text_set(tmp_path, content, examples))


@pytest.mark.parametrize(
    ("content", "key", "message"),
    [
        (b"a one\nb two\na three\n", "a", "text:3: key 'a' was already in line 1"),
        (b"a one\nb \xff\n", "b", "text:2: not UTF-8"),
    ],
)
def test_a_line_that_is_ambiguous_or_damaged_costs_its_key_alone(content, key, message, tmp_path):
    data = open_data_json(text_set(tmp_path, content, "ab"))
    (other,) = {"a", "b"} - {key}
    assert data.sources["text"].load(other, None) in ("one", "two")
    with pytest.raises(DataError, match=message):
        data.sources["text"].load(key, None)


def test_one_utterance(tmp_path):
    path = text_set(tmp_path, b"a one\n", "a")
    assert texts(path) == {"a": "one"} and split_data.split(path, 4, tmp_path / "log") == 1


def test_splitting_keeps_an_empty_utterance(tmp_path):
    """ESPnet's ``split_data_jsons.py`` raises on a line that holds an id alone."""
    assert split_data.split(text_set(tmp_path, b"a\nb two\n", "ab"), 2, tmp_path / "log") == 2
    assert (tmp_path / "log/split2/1/text").read_bytes() == b"a\n"


def test_splitting_by_speaker_with_fewer_speakers_than_jobs_or_none(tmp_path):
    path = text_set(tmp_path, b"a one\nb two\nc three\n", "abc")
    data = json.loads(path.read_text(encoding="utf-8"))
    data["data_files"].append(f"{tmp_path}/utt2spk,spk,text")
    path.write_text(json.dumps(data), encoding="utf-8")
    (tmp_path / "utt2spk").write_text("a s\nb s\nc t\n", encoding="utf-8")
    assert split_data.split(path, 8, tmp_path / "log") == 2
    (tmp_path / "utt2spk").write_text("", encoding="utf-8")
    assert split_data.split(path, 8, tmp_path / "log") == 3


def test_paths_that_count_from_the_folder_of_the_set_do_so_in_its_parts(tmp_path):
    """The tokens lie beside the ``data.json``, and nothing names the working directory."""
    folder = tmp_path / "set"
    folder.mkdir()
    kaldiio.save_ark(str(folder / "codes.ark"), {"a": np.arange(9, dtype=np.int32)})
    (folder / "wav.scp").write_text("a codes.ark:2\n", encoding="utf-8")
    files = ["wav.scp,codec_ssl,kaldi_ark"]
    data = {"task": "codec_ssl_asr", "vocabularies": ["tokens"], "data_files": files, "examples": ["a"]}
    (folder / "data.json").write_text(json.dumps(data), encoding="utf-8")
    (folder / "tokens").write_text("", encoding="utf-8")
    assert split_data.split(folder / "data.json", 1, tmp_path / "log") == 1
    assert split_data.split(tmp_path / "log/split1/1/data.json", 1, tmp_path / "again") == 1
    for path in (folder / "data.json", tmp_path / "log/split1/1/data.json", tmp_path / "again/split1/1/data.json"):
        opened = open_data_json(path)
        assert opened.load("a", None)["wav.scp"].tolist() == list(range(9))
        assert opened.vocabularies == (folder / "tokens",)


def test_a_part_has_all_that_its_speakers_say_and_draws_the_same_prompts(tmp_path):
    """Of unsorted files, and with utterances that are there for prompts alone."""
    spoken = {key: np.full(9, number, dtype=np.int32) for number, key in enumerate("dacbe")}
    kaldiio.save_ark(str(tmp_path / "codes.ark"), spoken, scp=str(tmp_path / "wav.scp"))
    speakers = {"d": "s", "a": "s", "c": "s", "b": "t", "e": "t"}
    (tmp_path / "utt2spk").write_text("".join(f"{k} {v}\n" for k, v in speakers.items()), encoding="utf-8")
    path = text_set(tmp_path, "a one\nb two\n", "ab", task="codec_ssl_tts")
    data = json.loads(path.read_text(encoding="utf-8"))
    data["data_files"] += [f"{tmp_path}/utt2spk,spk,text", f"{tmp_path}/wav.scp,codec_ssl,kaldi_ark"]
    path.write_text(json.dumps(data), encoding="utf-8")
    assert split_data.split(path, 2, tmp_path / "log") == 2
    whole = open_data_json(path)
    for seed in range(4):
        for job, uid in enumerate("ab", 1):
            part = open_data_json(tmp_path / f"log/split2/{job}/data.json")
            drawn, expected = (one.load(uid, random.Random(seed))["utt2spk"] for one in (part, whole))
            assert part.examples == (uid,) and drawn.tolist() == expected.tolist()
            assert drawn[0] != list(spoken).index(uid), "its own recording as its prompt"


def test_duplicate_ids_across_shards_are_refused(tmp_path, capsys):
    path = text_set(tmp_path, b"a one\n", "a")
    for job in ("output.1", "output.2"):
        folder = tmp_path / job / "text"
        folder.mkdir(parents=True)
        write_keyed(folder / "text", {"codec_ssl_plain_tts_a_sample0": "x"})
    words = ["--family", "opuslm", "--data-json", str(path), "--output-dir", str(tmp_path / "out")]
    assert merge_outputs.main([*words, str(tmp_path / "output.1"), str(tmp_path / "output.2")]) == 1
    assert "is in the output of another job" in capsys.readouterr().err


def test_utterance_lists_that_differ_cost_what_only_one_of_them_has(tmp_path):
    """``text`` has what ``utt2spk`` and ``wav.scp`` do not."""
    found = texts(text_set(tmp_path, b"a one\nc three\n", "abc"))
    assert (found["a"], found["c"]) == ("one", "three") and "text: no line begins with b" in found["b"]


def test_files_are_read_and_written_in_utf8_whatever_the_locale_says(tmp_path, monkeypatch):
    import locale

    monkeypatch.setattr(locale, "getpreferredencoding", lambda *_: "ascii")
    write_keyed(tmp_path / "text", {"ä": "漢字"})
    assert read_keyed(tmp_path / "text") == {"ä": "漢字"}


def test_vocabularies_of_another_tokenizer_are_refused(tmp_path):
    from golden_layouts import opuslm_config, opuslm_layout

    from espnet2_vllm.text import TextTokenizer

    layout, tokenizer = opuslm_layout(MODEL), TextTokenizer(MODEL / "hf_backbone")
    own = opuslm_config(MODEL)["token_list"][layout.text.start : layout.text.stop]
    path = tmp_path / "text_bpe_token_list"
    sizes = tmp_path / "codec_ssl_token_list"
    path.write_text("".join(f"{token}\n" for token in own), encoding="utf-8")
    sizes.write_text("x\n" * (layout.streams[0].size + 256), encoding="utf-8")
    check_vocabularies([path, sizes, tmp_path / "gone_token_list"], layout, tokenizer)
    path.write_text(json.dumps(own), encoding="utf-8")
    check_vocabularies([path], layout, tokenizer)
    path.write_text("".join(f"{token}\n" for token in reversed(own)), encoding="utf-8")
    with pytest.raises(
        DataError, match="text_bpe_token_list: .* tokens are not the checkpoint's, the first is number 0"
    ):
        check_vocabularies([path], layout, tokenizer)
    sizes.write_text("x\n" * 99, encoding="utf-8")
    with pytest.raises(
        DataError, match="codec_ssl_token_list: has 99 tokens, but the checkpoint has 306 for codec_ssl"
    ):
        check_vocabularies([sizes], layout, tokenizer)


# -- recordings --------------------------------------------------------------------------------------------------------
def tone(seconds, rate, channels=1):
    wave = 0.4 * np.sin(2 * np.pi * 300 * np.arange(round(seconds * rate)) / rate)
    return np.stack([wave * 0.9**channel for channel in range(channels)], 1).astype(np.float32)


def data_dir(folder, lines, segments=None):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "wav.scp").write_text("".join(f"{key} {value}\n" for key, value in lines.items()), encoding="utf-8")
    if segments is not None:
        (folder / "segments").write_text("".join(f"{line}\n" for line in segments), encoding="utf-8")
    return folder


def format_set(folder, out, **options):
    written, failures = format_audio.format_directory(folder, out, RATE, **options)
    return written, failures, read_keyed(out / "wav.scp")


@pytest.mark.parametrize("rate", [8000, 24000, 44100, 48000])
@pytest.mark.parametrize(
    ("channels", "subtype", "kind"), [(1, "PCM_16", "wav"), (2, "FLOAT", "wav"), (1, "PCM_24", "flac")]
)
def test_recordings_of_every_rate_width_and_number_of_channels(tmp_path, rate, channels, subtype, kind):
    """ "no utterances remained": own recordings at 44.1 or 48 kHz, in 32 bits."""
    path = tmp_path / f"a.{kind}"
    soundfile.write(path, tone(0.5, rate, channels), rate, subtype=subtype)
    written, failures, scp = format_set(data_dir(tmp_path / "data", {"a": path}), tmp_path / "out")
    assert (written, failures) == (1, [])
    samples, found = soundfile.read(scp["a"])
    assert found == RATE and samples.shape == (RATE // 2,) and soundfile.info(scp["a"]).subtype == "PCM_16"
    assert np.abs(samples).max() == pytest.approx(0.4, abs=0.03)


def test_a_recording_as_mp3(tmp_path):
    soundfile.write(tmp_path / "a.mp3", tone(1.0, RATE), RATE, format="MP3")
    written, _, scp = format_set(data_dir(tmp_path / "data", {"a": tmp_path / "a.mp3"}), tmp_path / "out")
    assert written == 1 and abs(soundfile.info(scp["a"]).frames - RATE) < 3000


@pytest.mark.parametrize("seconds", [0.01, 31.0, 1800.0])
def test_recordings_of_every_length(tmp_path, seconds):
    soundfile.write(tmp_path / "a.wav", tone(seconds, RATE), RATE)
    wav, rate = read_audio(str(tmp_path / "a.wav"))
    assert wav.shape == (1, round(seconds * RATE)) and rate == RATE


def test_bad_recordings_cost_themselves(tmp_path):
    """Pipes that work and that fail, places in arks, what is not there, what is empty: each with its own reason."""
    soundfile.write(tmp_path / "a.wav", tone(0.2, RATE), RATE)
    soundfile.write(tmp_path / "zero.wav", np.zeros((0, 1), np.float32), RATE)
    (tmp_path / "empty.wav").write_bytes(b"")
    ark = tmp_path / "a.ark"
    kaldiio.save_ark(
        str(ark), {"x": (RATE, (tone(0.2, RATE)[:, 0] * 32767).astype(np.int16))}, scp=str(tmp_path / "scp")
    )
    lines = {
        "pipe": f"cat {tmp_path}/a.wav |",
        "ark": (tmp_path / "scp").read_text(encoding="utf-8").split()[1],
        "sph2pipe": "sph2pipe-is-not-here -f wav x.sph |",
        "silent_pipe": "true |",
        "half_pipe": f"head -c 100 {tmp_path}/a.wav |",
        "gone": f"{tmp_path}//gone.wav",
        "zero": tmp_path / "zero.wav",
        "empty": tmp_path / "empty.wav",
        "offset": f"{ark}:99999999",
        "text": tmp_path / "scp",
    }
    written, failures, scp = format_set(data_dir(tmp_path / "data", lines), tmp_path / "out")
    assert written == 2 and set(scp) == {"pipe", "ark"}
    reasons = {failure.split(":")[0]: failure for failure in failures}
    assert set(reasons) == set(lines) - {"pipe", "ark"}
    for key, part in (
        ("sph2pipe", "exit status 127"),
        ("silent_pipe", "gave no output"),
        ("half_pipe", "cut short"),
        ("gone", "no such file"),
        ("zero", "no samples"),
        ("empty", "empty"),
        ("offset", "behind the end of the ark"),
        ("text", "no audio"),
    ):
        assert part in reasons[key], reasons[key]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("u r 0.8 0.2", "^u: .*segments: times 0.8 to 0.2 s are reversed"),
        ("u r -1 0.2", "times -1.0 to 0.2 s are reversed, negative"),
        ("u r 0 inf", "times 0.0 to inf s are reversed, negative or endless"),
        ("u other 0 0.2", "recording 'other' is not in wav.scp"),
        ("u r 0.1", "expected 'utterance recording start end .channel.'"),
        ("u r a b", "expected 'utterance recording start end .channel.'"),
        ("u r 0 1 2 3", "expected 'utterance recording start end .channel.', the channel from 0"),
        ("u r 0 1 A", "expected 'utterance recording start end .channel.'"),
        ("u r 0 1 -1", "the channel from 0"),
        ("u r 0 -2", "reversed, negative or endless"),
    ],
)
def test_segments_that_cannot_be(tmp_path, line, message):
    soundfile.write(tmp_path / "r.wav", tone(1.0, RATE), RATE)
    folder = data_dir(tmp_path / "data", {"r": tmp_path / "r.wav"}, [line, "good r 0 0.5"])
    written, (failure,), scp = format_set(folder, tmp_path / "out")
    assert (written, list(scp)) == (1, ["good"]) and re.search(message, failure)


def test_segments_beyond_the_end_cost_themselves(tmp_path):
    soundfile.write(tmp_path / "r.wav", tone(1.0, RATE), RATE)
    segments = ["in r 0.25 0.5", "over r 0.75 3.0", "out r 5.0 6.0"]
    written, failures, scp = format_set(
        data_dir(tmp_path / "data", {"r": tmp_path / "r.wav"}, segments), tmp_path / "out"
    )
    assert (
        written == 2
        and soundfile.info(scp["in"]).frames == RATE // 4
        and soundfile.info(scp["over"]).frames == RATE // 4
    )
    assert failures == [f"out: 5.0 to 6.0 s lies outside of the recording {tmp_path}/r.wav"]


def test_segments_and_wav_scp_may_have_different_numbers_of_lines(tmp_path):
    """The limit of jobs is that of segments."""
    for name in "rs":
        soundfile.write(tmp_path / f"{name}.wav", tone(1.0, RATE), RATE)
    lines = {name: tmp_path / f"{name}.wav" for name in "rs"}
    written, failures, _ = format_set(
        data_dir(tmp_path / "data", lines, [f"u{i} r {i / 10} {i / 10 + 0.1}" for i in range(5)]), tmp_path / "out"
    )
    assert (written, failures) == (5, [])


def test_ids_land_in_files_of_the_output_directory(tmp_path):
    soundfile.write(tmp_path / "a.wav", tone(0.1, RATE), RATE)
    ids = ["../../up", "x/y", "..", "-dash", "z" * 300, "z" * 299 + "y", "%2F", "汉字"]
    outside = tmp_path / "deep" / "deeper"
    written, _, scp = format_set(data_dir(outside / "data", dict.fromkeys(ids, tmp_path / "a.wav")), outside / "out")
    assert written == len(ids) == len(set(scp.values()))
    assert {pathlib.Path(path).resolve().parent for path in scp.values()} == {(outside / "out" / "wav").resolve()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.wav", "deep"]


# -- a whole run -------------------------------------------------------------------------------------------------------
class Instant:
    """An engine that ends every answer at its first chance."""

    max_rows = 4096

    def __init__(self, checkpoint, **options):
        self.layout, self._waiting = checkpoint.layout, []

    @property
    def unfinished(self):
        return len(self._waiting)

    def submit(self, request):
        self._waiting.append(request)

    def step(self):
        finished, self._waiting = self._waiting, []
        return [(request.request_id, self._answer(request)) for request in finished]

    def _answer(self, request):
        rules, state, rows, done = request.rules, request.rules.start(), [], False
        eos, word = self.layout.specials["eos"], self.layout.text.start + 5
        while not done:
            primary = rules.constraint(state).primary
            first = eos if any(span.start <= eos < span.stop for span in primary) and rows else word
            state, step = rules.advance(state, (first, *[self.layout.pad] * (self.layout.num_streams - 1)))
            rows.append(step.emitted)
            done = step.done
        shape = (len(rows), self.layout.num_streams)
        return RowResult(np.array(rows, np.int32), np.zeros(shape, np.float32), np.zeros(shape, bool))

    def take_rows(self):
        return []

    def abort(self, ids):
        pass

    def close(self):
        pass


@pytest.fixture
def thousand(tmp_path, monkeypatch):
    """A set of a thousand dialogues, each in a file of its own, and the command that decodes it with an instant engine."""
    monkeypatch.setattr(backends, "make_engine", lambda name, checkpoint, dtype, **options: Instant(checkpoint))
    keys = [f"d{number:04}" for number in range(1000)]
    packs = tmp_path / "packs"
    packs.mkdir()
    for key in keys:
        turns = [["user", "text_bpe", False, f"question {key}"], ["assistant", "text_bpe", True, "answer"]]
        (packs / f"{key}.json").write_text(json.dumps({key: turns}), encoding="utf-8")
    (tmp_path / "dialogue").write_text("".join(f"{key} {packs}/{key}.json\n" for key in keys), encoding="utf-8")
    files = [f"{tmp_path}/dialogue,dialogue,dialogue_json"]
    data = {"task": "text_dialogue", "vocabularies": [], "data_files": files, "examples": keys}
    (tmp_path / "data.json").write_text(json.dumps(data), encoding="utf-8")
    decode = yaml.safe_load((MODEL / "decode_default.yaml").read_text(encoding="utf-8"))
    decode = {"text_bpe": {**decode["text_bpe"], "maxlen": 12, "minlen": 1}}
    (tmp_path / "decode.yaml").write_text(yaml.safe_dump(decode), encoding="utf-8")

    def run(out):
        return speechlm_inference_chat.main(
            [
                *("--train_config", str(MODEL / "config.yaml"), "--model_file", str(MODEL / "model.pth")),
                *("--inference_config_file", str(tmp_path / "decode.yaml"), "--output_dir", str(out)),
                *("--data_path_and_name_and_type", f"{tmp_path}/data.json,_,dataset_json", "--backend", "pytorch"),
            ]
        )

    return keys, packs, run


def test_one_missing_file_among_a_thousand_gives_999_outcomes_one_reason_and_a_non_zero_exit(
    thousand, tmp_path, caplog
):
    keys, packs, run = thousand
    out = tmp_path / "out"
    (packs / "d0500.json").rename(tmp_path / "elsewhere.json")
    assert run(out) == 1
    lines = (out / ".journal" / "journal.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    outcomes = {record["key"]: record for record in map(json.loads, lines)}
    assert len(lines) == len(outcomes) == 1000
    failed = [record for record in outcomes.values() if record["outcome"] == "refused"]
    assert [record["key"] for record in failed] == ["text_dialogue_d0500"]
    assert "d0500.json: no such file" in failed[0]["reason"]
    assert [m for m in caplog.messages if m.startswith("no result for")] == [
        f"no result for text_dialogue_d0500: {failed[0]['reason']}"
    ]
    written = json.loads((out / "dialogue" / "dialogue.json").read_text(encoding="utf-8"))
    assert [key for record in written for key in record] == [f"text_dialogue_{key}" for key in keys if key != "d0500"]
    report = json.loads((out / ".journal" / "report.json").read_text(encoding="utf-8"))
    assert report["utterances"] == 1000 and list(report["failures"]) == ["text_dialogue_d0500"]
    shutil.copy(tmp_path / "elsewhere.json", packs / "d0500.json")
    assert run(out) == 0
    assert len(json.loads((out / "dialogue" / "dialogue.json").read_text(encoding="utf-8"))) == 1000


def test_segments_name_channels_and_the_end_of_their_recording(tmp_path):
    """As Kaldi's extract-segments: both speakers of a call, and an end of -1."""
    call = np.stack([np.full(2 * RATE, 0.25), np.full(2 * RATE, -0.5)]).astype(np.float32)
    soundfile.write(tmp_path / "call.wav", call.T, RATE)
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "wav.scp").write_text(f"call {tmp_path}/call.wav\n", encoding="utf-8")
    lines = ("A call 0 1.5 0", "B call 0 1.5 1", "rest call 0.5 -1 1", "none call 0 1 2", "plain call 1 2")
    (folder / "segments").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    written, failures, found = format_set(folder, tmp_path / "out")
    assert written == 4 and "has no channel 2: it has 2" in failures[0]
    sounds = {key: soundfile.read(path)[0] for key, path in found.items()}
    assert {key: (len(wav) / RATE, float(wav.mean())) for key, wav in sounds.items()} == {
        "A": (1.5, 0.25),
        "B": (1.5, -0.5),
        "rest": (1.5, -0.5),
        "plain": (1.0, 0.25),
    }
