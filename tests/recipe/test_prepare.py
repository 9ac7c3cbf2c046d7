"""From Kaldi directories to data.json, dataset.json and plain wav files."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

from espnet2_vllm.bin import format_audio, prepare_data
from espnet2_vllm.io.keyed import read_keyed

TEXT = "utt2 go\nutt1 yes é\n"


@pytest.fixture
def data_dir(tmp_path):
    folder = tmp_path / "data" / "test"
    folder.mkdir(parents=True)
    (folder / "text").write_text(TEXT, encoding="utf-8")
    return folder


def prepare(data_dir, output, family, task, *more):
    words = ["--family", family, "--task", task, "--data-dir", str(data_dir), "--output-dir", str(output)]
    return prepare_data.main([*words, *more])


def load(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_plain_tts_needs_transcripts_only(data_dir, tmp_path, capsys):
    assert prepare(data_dir, tmp_path / "dump", "opuslm", "codec_ssl_plain_tts") == 0
    index = tmp_path / "dump" / "index_files" / "text"
    assert load(tmp_path / "dump" / "data.json") == {
        "task": "codec_ssl_plain_tts",
        "vocabularies": [],
        "data_files": [f"{index},text_bpe,text"],
        "num_examples": 2,
        "examples": ["utt1", "utt2"],
    }
    assert index.read_text(encoding="utf-8") == "utt1 yes é\nutt2 go\n"
    assert "2 utterances of codec_ssl_plain_tts" in capsys.readouterr().out


def test_text_dialogue(data_dir, tmp_path):
    (data_dir / "answer").write_text("utt1 no\nutt2 stop\n", encoding="utf-8")
    assert prepare(data_dir, tmp_path / "dump", "opuslm", "text_dialogue", "--system-prompt", "be brief") == 0
    data = load(tmp_path / "dump" / "data.json")
    path, modality, kind = data["data_files"][0].split(",")
    assert (modality, kind) == ("dialogue", "dialogue_json")
    lines = read_keyed(Path(path))
    assert load(tmp_path / "dump" / "dialogue.json")["utt1"] == [
        ["system", "text_bpe", False, "be brief"],
        ["user", "text_bpe", False, "yes é"],
        ["assistant", "text_bpe", True, "no"],
    ]
    assert lines == dict.fromkeys(["utt1", "utt2"], str(tmp_path / "dump" / "dialogue.json"))


def test_bagpiper_sets(data_dir, tmp_path):
    assert prepare(data_dir, tmp_path / "tts", "bagpiper", "text_to_audio") == 0
    dataset = load(tmp_path / "tts" / "dataset.json")
    assert dataset == {
        "data_entry": [{"name": "text1", "path": str(tmp_path / "tts" / "text1"), "reader": "text"}],
        "samples": ["utt1", "utt2"],
    }
    assert prepare(data_dir, tmp_path / "chat", "bagpiper", "dialogue") == 0
    lines = (tmp_path / "chat" / "dialogue.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[0]) == {
        "example_id": "utt1",
        "messages": [["user", "text", "yes é"], ["assistant", "text", "yes é"]],
    }


@pytest.mark.parametrize(
    "content, message",
    [("", "0 utterances"), ("utt1 yes\nutt2\n", "1 of 2 utterances have no words, the first is 'utt2'")],
)
def test_sets_without_words_are_refused(data_dir, tmp_path, content, message, capsys):
    (data_dir / "text").write_text(content, encoding="utf-8")
    assert prepare(data_dir, tmp_path / "dump", "opuslm", "codec_ssl_plain_tts") == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "dump").exists()


def test_a_task_that_cannot_be_prepared_names_those_that_can(data_dir, tmp_path, capsys):
    assert prepare(data_dir, tmp_path / "dump", "opuslm", "audio_dialogue") == 2
    message = capsys.readouterr().err
    assert "expected one of codec_ssl_plain_tts" in message and "--test_jsons" in message


# What stage 5 of ESPnet lists for each task (its files lie in tests/golden/opuslm/*/data), and what is tokenised for it.
TEMPLATES = {
    "codec_ssl_tts": (["text,text_bpe,text", "utt2spk,spk,text", "wav.scp,codec_ssl,kaldi_ark"], ["wav.scp"]),
    "codec_ssl_se": (["mix.scp,codec_ssl,kaldi_ark", "wav.scp,codec_ssl,kaldi_ark"], ["mix.scp", "wav.scp"]),
    "codec_ssl_tse": (
        ["mix.scp,codec_ssl,kaldi_ark", "utt2spk,spk,text", "wav.scp,codec_ssl,kaldi_ark"],
        ["mix.scp", "wav.scp"],
    ),
    # Recordings that nothing needs as tokens are no references either.
    "ag_codecssl": (["text,text_bpe,text"], []),
    "codec_ssl_plain_tts": (["text,text_bpe,text"], []),
    "codec_ssl_asr": (["wav.scp,codec_ssl,kaldi_ark", "text,text_bpe,text"], ["wav.scp"]),
}


@pytest.mark.parametrize("task", TEMPLATES)
def test_files_of_a_task_are_listed_as_espnet_lists_them(data_dir, tmp_path, task, capsys):
    (data_dir / "utt2spk").write_text("utt1 a\nutt2 a\nutt3 a\n", encoding="utf-8")
    (data_dir / "mix.scp").write_text("utt1 m.ark:5\nutt2 m.ark:99\n", encoding="utf-8")
    (data_dir / "wav.scp").write_text("utt1 a.ark:5\nutt2 a.ark:7\nutt3 a.ark:9\n", encoding="utf-8")
    files, tokenised = TEMPLATES[task]
    assert prepare(data_dir, tmp_path / "dump", "opuslm", task, "--show", "recordings") == 0
    assert capsys.readouterr().out.split() == tokenised and not (tmp_path / "dump").exists()
    assert prepare(data_dir, tmp_path / "dump", "opuslm", task) == 0
    made = load(tmp_path / "dump" / "data.json")
    assert made["data_files"] == [f"{tmp_path}/dump/index_files/{line}" for line in files]
    assert made["examples"] == (["utt1", "utt2", "utt3"] if task == "codec_ssl_asr" else ["utt1", "utt2"])
    if "wav.scp" not in tokenised:
        assert not (tmp_path / "dump" / "index_files" / "wav.scp").exists()
        return
    # A third recording of the speaker may be a prompt; as a reference of nothing it is left out.
    kept = read_keyed(tmp_path / "dump" / "index_files" / "wav.scp")
    assert list(kept) == ["utt1", "utt2"] + ["utt3"] * ("utt2spk,spk,text" in files or task == "codec_ssl_asr")


def test_an_utterance_without_its_condition_is_named(data_dir, tmp_path, capsys):
    (data_dir / "utt2spk").write_text("utt1 a\n", encoding="utf-8")
    (data_dir / "wav.scp").write_text("utt1 a.ark:5\n", encoding="utf-8")
    assert prepare(data_dir, tmp_path / "dump", "opuslm", "codec_ssl_tts") == 1
    assert "utt2spk: no line for 1 utterances of text, the first is 'utt2'" in capsys.readouterr().err


def test_tokens_of_recordings(data_dir, tmp_path):
    (data_dir / "wav.scp").write_text("utt1 a.ark:5\nutt3 a.ark:99\n", encoding="utf-8")
    assert prepare(data_dir, tmp_path / "dump", "opuslm", "codec_ssl_asr") == 0
    made = json.loads((tmp_path / "dump" / "data.json").read_text(encoding="utf-8"))
    assert made["examples"] == ["utt1", "utt3"]
    assert [line.rsplit(",", 2)[1:] for line in made["data_files"]] == [
        ["codec_ssl", "kaldi_ark"],
        ["text_bpe", "text"],
    ]
    assert read_keyed(tmp_path / "dump" / "index_files" / "text") == {"utt1": "yes é"}


@pytest.fixture
def recordings(data_dir):
    """Half a second of a stereo 8 kHz file, and the same through a pipe."""
    tone = np.sin(np.arange(4000) / 5).astype(np.float32) / 2
    soundfile.write(data_dir / "a.flac", np.stack([tone, 0 * tone], axis=1), 8000)
    (data_dir / "wav.scp").write_text(f"r1 {data_dir}/a.flac\nr2 cat {data_dir}/a.flac |\n", encoding="utf-8")
    return data_dir


def test_recordings_become_mono_16_bit_at_one_rate(recordings, tmp_path, capsys):
    words = ["--data-dir", str(recordings), "--output-dir", str(tmp_path / "dump"), "--fs", "16000"]
    assert format_audio.main(words) == 0
    lines = read_keyed(tmp_path / "dump" / "wav.scp")
    assert sorted(lines) == ["r1", "r2"]
    for path in lines.values():
        info = soundfile.info(path)
        assert (info.samplerate, info.channels, info.frames, info.subtype) == (16000, 1, 8000, "PCM_16")
    assert (tmp_path / "dump" / "text").read_text(encoding="utf-8") == TEXT
    assert "2 of 2 utterances" in capsys.readouterr().out


def test_several_files_of_recordings_are_formatted_apart(recordings, tmp_path, capsys):
    (recordings / "mix.scp").write_text(f"r1 {recordings}/a.flac\n", encoding="utf-8")
    words = ["--data-dir", str(recordings), "--output-dir", str(tmp_path / "dump"), "--name", "mix.scp", "wav.scp"]
    assert format_audio.main(words) == 0
    mix, wav = (read_keyed(tmp_path / "dump" / name) for name in ("mix.scp", "wav.scp"))
    assert list(mix) == ["r1"] and list(wav) == ["r1", "r2"] and mix["r1"] != wav["r1"]
    assert "3 of 3 utterances" in capsys.readouterr().out


def test_segments_cut_recordings(recordings, tmp_path):
    (recordings / "segments").write_text("u1 r1 0.1 0.2\nu2 r2 0 0.5\n", encoding="utf-8")
    assert (
        format_audio.main(["--data-dir", str(recordings), "--output-dir", str(tmp_path / "dump"), "--fs", "8000"]) == 0
    )
    whole, _ = soundfile.read(recordings / "a.flac", dtype="int16")
    piece, _ = soundfile.read(tmp_path / "dump" / "wav" / "u1.wav", dtype="int16")
    assert np.array_equal(piece, whole[800:1600, 0])


@pytest.mark.parametrize(
    "segments, message",
    [
        ("u1 r1 0.2 0.1\n", "reversed, negative"),
        ("u1 r1 0.2\n", "expected 'utterance recording start end [channel]'"),
        ("u1 r9 0 1\n", "'r9' is not in wav.scp"),
        ("u1 r1 5 6\nu2 r1 0 0.1\n", "u1: 5.0 to 6.0 s lies outside"),
    ],
)
def test_segments_that_cannot_be_cut_are_named(recordings, tmp_path, segments, message, capsys):
    (recordings / "segments").write_text(segments, encoding="utf-8")
    assert format_audio.main(["--data-dir", str(recordings), "--output-dir", str(tmp_path / "dump")]) == 1
    assert message in capsys.readouterr().err


def test_a_directory_is_not_formatted_into_itself(recordings, tmp_path, capsys):
    """Its list of recordings would be replaced, and what could not be read would be gone from it."""
    before = (recordings / "wav.scp").read_bytes()
    (tmp_path / "link").symlink_to(recordings)
    assert format_audio.main(["--data-dir", str(recordings), "--output-dir", str(tmp_path / "link")]) == 2
    assert "is --data-dir, whose files would be replaced" in capsys.readouterr().err
    assert (recordings / "wav.scp").read_bytes() == before


def test_one_bad_recording_loses_no_other(recordings, tmp_path, capsys):
    with open(recordings / "wav.scp", "a", encoding="utf-8") as file:
        file.write("r3 /no/such.wav\nr4 exit 3 |\n")
    assert format_audio.main(["--data-dir", str(recordings), "--output-dir", str(tmp_path / "dump")]) == 1
    captured = capsys.readouterr()
    assert "2 of 4 utterances" in captured.out
    assert "r3: /no/such.wav: no such file" in captured.err and "r4: command failed with exit status 3" in captured.err


def test_speech_recognition_takes_what_stage_format_wrote(recordings, tmp_path):
    assert format_audio.main(["--data-dir", str(recordings), "--output-dir", str(tmp_path / "dump" / "audio")]) == 0
    assert prepare(tmp_path / "dump" / "audio", tmp_path / "dump" / "asr", "bagpiper", "audio_to_text") == 0
    dataset = load(tmp_path / "dump" / "asr" / "dataset.json")
    assert [(entry["name"], entry["reader"]) for entry in dataset["data_entry"]] == [
        ("audio1", "kaldi_audio"),
        ("text1", "text"),
    ]
    assert dataset["samples"] == ["r1", "r2"]
    audio = read_keyed(Path(dataset["data_entry"][0]["path"]))
    assert soundfile.info(audio["r1"]).samplerate == 16000


def test_questions_about_recordings(tmp_path, capsys):
    data = tmp_path / "data"
    data.mkdir()
    (data / "text").write_text("a one two\nb three\n", encoding="utf-8")
    (data / "wav.scp").write_text("a /wav/a.wav\nb /wav/b.wav\n", encoding="utf-8")
    words = [
        "--family",
        "bagpiper",
        "--task",
        "dialogue",
        "--data-dir",
        str(data),
        "--output-dir",
        str(tmp_path / "set"),
    ]
    assert prepare_data.main([*words, "--question", "what is said?", "--system-prompt", "be brief"]) == 0
    lines = (tmp_path / "set" / "dialogue.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[0])["messages"] == [
        ["system", "text", "be brief"],
        ["user", "audio", "/wav/a.wav"],
        ["user", "text", "what is said?"],
        ["assistant", "text", "one two"],
    ]
    (data / "wav.scp").write_text("a /wav/a.wav\n", encoding="utf-8")
    assert prepare_data.main([*words, "--question", "what?"]) == 0
    assert "no recording for 1 utterances, the first is 'b'; they will be refused" in capsys.readouterr().err
    lines = (tmp_path / "set" / "dialogue.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["messages"][0][2] for line in lines] == ["/wav/a.wav", ""]
    (data / "wav.scp").write_text("z /wav/a.wav\n", encoding="utf-8")
    assert prepare_data.main([*words, "--question", "what?"]) == 1
    assert "no recording for 2 utterances, the first is 'a'" in capsys.readouterr().err
    assert prepare_data.main([*words[:3], "text_to_audio", *words[4:], "--question", "what?"]) == 2
