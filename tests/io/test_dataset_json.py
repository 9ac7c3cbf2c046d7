"""dataset.json and its readers: what is read, and what an error spares."""

import gzip
import json
import re
import sys

import kaldiio
import numpy as np
import pytest
import soundfile
from conftest import golden_files
from golden_layouts import QWEN3_OMNI, bagpiper_model_layout

from espnet2_vllm.codec import CodecDescription, load_codec
from espnet2_vllm.errors import DataError
from espnet2_vllm.io.dataset_json import open_dataset, open_datasets, read_utterances
from espnet2_vllm.io.specifiers import REGISTRY, Specifier, parse_specifiers
from espnet2_vllm.layout import Layout
from espnet2_vllm.plan import Utterance
from espnet2_vllm.prompt.bagpiper import codec_encoder
from espnet2_vllm.text import TextTokenizer

LAYOUT = Layout.bagpiper(200, [9] * 3)


class Letters:
    """A letter a token."""

    def encode_bagpiper(self, text):
        return [ord(c) % 100 + 1 for c in text]


def frames_of_100(clips):
    return [np.zeros((wav.shape[-1] // 100 + 2, 3), np.int32) for wav, _ in clips]


def write(folder, entries, samples, name="dataset.json"):
    path = folder / name
    data = {"data_entry": [{"name": n, "path": str(p), "reader": r} for n, p, r in entries], "samples": samples}
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def opened(task, path):
    return open_dataset(Specifier(task, "set", path, f"{task}:set:{path}"))


def read(dataset, **options) -> list:
    return list(read_utterances(dataset, LAYOUT, Letters(), encode_audio=frames_of_100, **options))


# -- recorded sets -----------------------------------------------------------------------------------------------------
TREES = [
    pytest.param(path.parents[2], path.parent, id=f"{path.parents[2].name}-{path.parent.name}")
    for path in golden_files("bagpiper/*/trees/*/details.json")
]


@pytest.mark.parametrize(("model", "tree"), TREES)
def test_prompts_of_the_recorded_sets(model, tree, monkeypatch):
    monkeypatch.chdir(model)
    monkeypatch.setenv(REGISTRY, str(tree / "input" / "registry.yaml"))
    task = {"tts": "text_to_audio", "dialogue": "dialogue"}.get(tree.name, "audio_to_text")
    (dataset,) = open_datasets(parse_specifiers(f"{task}:{tree.name}", registered=True))
    assert (tree / "expected" / dataset.directory_name).is_dir()
    layout, continuous = bagpiper_model_layout(model), model.name.endswith("contaudio")
    codec = load_codec(CodecDescription("xcodec", path="codec", num_codebooks=layout.num_streams), base_dir=model)
    results = list(
        read_utterances(
            dataset,
            layout,
            TextTokenizer(model / "backbone"),
            encode_audio=codec_encoder(layout, codec),
            listening=QWEN3_OMNI if continuous else None,
        )
    )
    assert len(results) == len(dataset.samples)
    with np.load(tree / "details.npz") as arrays:
        for uid, utterance in zip(dataset.samples, results, strict=True):
            assert isinstance(utterance, Utterance), utterance
            assert utterance.key == uid
            np.testing.assert_array_equal(utterance.parts[0].rows, arrays[f"{uid}/prefill_ids"])


def test_kaldi_and_lhotse_give_the_same_audio(monkeypatch):
    sets = {tree.name: (model, tree) for model, tree in (p.values for p in TREES) if tree.name.startswith("asr_")}
    if len(sets) < 2:
        pytest.skip("the two recorded sets are not here")
    loaded = {}
    for name, (model, tree) in sets.items():
        monkeypatch.chdir(model)
        dataset = opened("audio_to_text", tree / "input" / "dataset.json")
        loaded[name] = {uid: dataset.messages(uid)[0][2] for uid in dataset.samples}
    for uid, (wav, rate) in loaded["asr_kaldi"].items():
        other, other_rate = loaded["asr_lhotse"][uid]
        assert rate == other_rate == 16000
        np.testing.assert_array_equal(wav, other)


# -- readers -----------------------------------------------------------------------------------------------------------
def test_bad_samples_spare_the_others(tmp_path):
    (tmp_path / "text1").write_text("u1 abc\nu2\nu3 de\n", encoding="utf-8")
    dataset = opened("text_to_audio", write(tmp_path, [("text1", "text1", "text")], ["u3", "u2", "u4", "u1"]))
    results = read(dataset)
    assert [r.key if isinstance(r, Utterance) else r[0] for r in results] == ["u3", "u2", "u4", "u1"]
    assert "u2: " in str(results[1][1]) and "nothing stands behind u2" in str(results[1][1])
    assert "no line begins with u4" in str(results[2][1])
    assert len(results[3].parts[0].rows) == 1 + 2 + 3 + 1
    assert [u.key for u in read(dataset, samples=["u1", "u3"])] == ["u1", "u3"]


def test_the_answer_need_not_be_there(tmp_path):
    (tmp_path / "text1").write_text("u1 abc\n", encoding="utf-8")
    entries = [("text1", "text1", "text"), ("audio1", "gone.scp", "arkive_audio")]
    assert len(read(opened("text_to_audio", write(tmp_path, entries, ["u1"])))) == 1
    (prompt,) = read(opened("text_only", write(tmp_path, [], ["u1"])))
    assert prompt.parts[0].rows[:, 0].tolist() == [LAYOUT.specials["bos"]]


def test_shares_cover_every_sample_once(tmp_path):
    samples = [f"u{i}" for i in range(7)]
    dataset = opened("text_only", write(tmp_path, [], samples))
    assert dataset.share(0, 1) == tuple(samples)
    assert dataset.share(1, 3) == ("u1", "u4")
    assert sorted(uid for rank in range(3) for uid in dataset.share(rank, 3)) == samples


def test_json_lines_of_text(tmp_path, caplog):
    """A line that cannot be read costs the id that can be made out in it, and nothing else."""
    path = tmp_path / "t.jsonl"
    path.write_bytes('\ufeff{"id": "u1", "text": "a\\nb"}\r\n\n{"id": "u2", "text": "é"}\n'.encode())
    dataset = opened("text_to_audio", write(tmp_path, [("text1", "t.jsonl", "text")], ["u1", "u2"]))
    assert [dataset.messages(u)[0] for u in ("u1", "u2")] == [["user", "text", "a\nb"], ["user", "text", "é"]]
    for content, message in [
        (b'{"id": "u1", "text": "a"}\n{"id": "u1", "text": "b"}\n', "t.jsonl:2: id 'u1' was already in line 1"),
        (b'{"id": "u1", "text": \n', "t.jsonl:1: no JSON"),
        (b'{"id": "u1", "text": "\xff"}\n', "t.jsonl:1: not UTF-8"),
        (b'{"id": "u1", "text": ' + b"9" * 5000 + b"}\n", "t.jsonl:1: no JSON that can be read: ValueError"),
        (b'{"id": "u1", "text": ' + b"[" * 200_000 + b"\n", "t.jsonl:1: no JSON that can be read: RecursionError"),
        (b'{"text": "a"}\n', "expected 'id', a string"),
        (b'{"id": \n', "no JSON"),
        (b'["u1"]\n', "holds a list"),
    ]:
        path.write_bytes(content + b'{"id": "u2", "text": "b"}\n')
        dataset = opened("text_to_audio", tmp_path / "dataset.json")
        assert dataset.messages("u2")[0] == ["user", "text", "b"]
        with pytest.raises(DataError) as caught:
            dataset.messages("u1")
        assert re.search(message, f"{caught.value} {caplog.text}"), caught.value
        caplog.clear()


@pytest.mark.parametrize(
    ("line", "message"),
    [('{"id": "u2"}', "t.jsonl:2: has no 'text'; expected a str"), ('{"id": "u2", "text": null}', "'text' is None")],
)
def test_a_json_line_without_its_text_costs_that_id_alone(tmp_path, line, message):
    (tmp_path / "t.jsonl").write_text('{"id": "u1", "text": "a"}\n' + line + '\n{"id": "u3", "text": "b"}\n', "utf-8")
    dataset = opened("text_to_audio", write(tmp_path, [("text1", "t.jsonl", "text")], ["u1", "u2", "u3"]))
    assert [dataset.messages(u)[0][2] for u in ("u1", "u3")] == ["a", "b"]
    with pytest.raises(DataError, match=message):
        dataset.messages("u2")


def test_a_dialogue_without_messages_costs_that_id_alone(tmp_path):
    lines = ['{"example_id": "u1", "messages": []}', '{"example_id": "u2", "messages": "x"}']
    (tmp_path / "d.jsonl").write_text("\n".join(lines), encoding="utf-8")
    dataset = opened("dialogue", write(tmp_path, [("dialogue", "d.jsonl", "dialogue")], ["u1", "u2"]))
    assert dataset.messages("u1") == []
    with pytest.raises(DataError, match="d.jsonl:2: 'messages' is 'x'; expected a list"):
        dataset.messages("u2")


def test_kaldi_audio(tmp_path):
    wav = (np.sin(np.arange(800)) * 20000).astype(np.int16)
    kaldiio.save_ark(str(tmp_path / "a.ark"), {"u1": (8000, wav)}, scp=str(tmp_path / "scp"))
    soundfile.write(tmp_path / "b.wav", wav, 8000)
    spec = (tmp_path / "scp").read_text(encoding="utf-8").split()[1]
    lines = f"u1 {spec}\nu2 b.wav\nu3 gone.wav\nu4 cat {tmp_path}/b.wav |\nu5 false |\n"
    (tmp_path / "audio1").write_text(lines, encoding="utf-8")
    path = write(tmp_path, [("audio1", "audio1", "kaldi_audio")], [f"u{i}" for i in range(1, 6)])
    results = read(opened("audio_to_text", path))
    assert [isinstance(r, Utterance) for r in results] == [True, True, False, True, False]
    assert {len(r.parts[0].rows) for r in results if isinstance(r, Utterance)} == {1 + 2 + 10 + 1}
    assert "gone.wav: no such file" in str(results[2][1]) and "u3 of" in str(results[2][1])
    assert "exit status 1" in str(results[4][1])


def test_dialogues(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.zeros(800), 8000)
    lines = [
        {"example_id": "d1", "messages": [["user", "text", "abc"], ["user", "audio", "a.wav"]]},
        {"example_id": "d2", "messages": [["user", "image", "x.png"]]},
        {"example_id": "d3", "messages": [["user", "text", "a"], ["assistant", "video", "never read"]]},
    ]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    path = write(tmp_path, [("dialogue", "d.jsonl", "dialogue")], ["d1", "d2", "d3", "d4"])
    results = read(opened("dialogue", path))
    assert [isinstance(r, Utterance) for r in results] == [True, False, True, False]
    assert "modality 'image' cannot be prompted" in str(results[1][1])
    assert "no line has the example_id d4" in str(results[3][1])


def recordings(folder, items, name="recordings.jsonl.gz"):
    folder.mkdir(exist_ok=True)
    with gzip.open(folder / name, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(item) + "\n" for item in items)


def recording(uid, source, **more):
    sources = [{"type": "file", "channels": [0], "source": str(source)}]
    return {"id": uid, "sources": sources, "sampling_rate": 8000, "num_samples": 800, "duration": 0.1, **more}


def test_lhotse_recordings_need_no_lhotse(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lhotse", None)
    soundfile.write(tmp_path / "a.wav", np.zeros(800), 8000)
    items = [
        recording("u1", tmp_path / "a.wav"),
        recording("u2", tmp_path / "gone.wav"),
        recording("u3", tmp_path / "a.wav", transforms=[{"name": "Speed", "kwargs": {"factor": 1.1}}]),
        recording("u4", tmp_path / "a.wav", sampling_rate=16000),
    ]
    recordings(tmp_path / "m", items)
    path = write(tmp_path, [("audio1", "m", "lhotse_audio")], ["u1", "u2", "u3", "u4", "u5"])
    good, *bad = read(opened("audio_to_text", path))
    assert isinstance(good, Utterance) and len(good.parts[0].rows) == 1 + 2 + 10 + 1
    for (_, error), message in zip(
        bad,
        ["gone.wav: no such file", "pip install lhotse", "sampled at 8000 Hz", "no item has the id u5"],
        strict=True,
    ):
        assert message in str(error)
    recordings(tmp_path / "m", items[:1] * 2)
    with pytest.raises(DataError, match="recordings.jsonl.gz:2: id 'u1' was already in line 1"):
        opened("audio_to_text", path).messages("u1")
    whole = (tmp_path / "m" / "recordings.jsonl.gz").read_bytes()
    (tmp_path / "m" / "recordings.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="recordings.jsonl.gz: damaged or cut short"):
        opened("audio_to_text", path)
    (tmp_path / "m" / "recordings.jsonl.gz").unlink()
    with pytest.raises(DataError, match="has neither cuts.jsonl.gz nor recordings.jsonl.gz"):
        opened("audio_to_text", path)


def test_cuts_are_read_by_lhotse(tmp_path):
    pytest.importorskip("lhotse")
    samples = np.sin(np.arange(800) / 10).astype(np.float32) / 2
    soundfile.write(tmp_path / "a.wav", samples, 8000, subtype="FLOAT")
    cut = {"id": "u1", "start": 0.025, "duration": 0.05, "channel": 0, "supervisions": [], "type": "MonoCut"}
    recordings(tmp_path / "m", [{**cut, "recording": recording("r", tmp_path / "a.wav")}], "cuts.jsonl.gz")
    dataset = opened("audio_to_text", write(tmp_path, [("audio1", "m", "lhotse_audio")], ["u1"]))
    wav, rate = dataset.messages("u1")[0][2]
    assert rate == 8000
    np.testing.assert_array_equal(wav, samples[None, 200:600])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", "dataset.json:1: no JSON"),
        ("{}", "is this a dataset.json"),
        ({"data_entry": [], "samples": []}, "there is nothing to decode"),
        ({"data_entry": [], "samples": ["a", ""]}, "list of ids"),
        ({"data_entry": [], "samples": ["a", "b", "a"]}, "samples come twice: a"),
        ({"data_entry": [{"name": "text1"}], "samples": ["a"]}, "expected name, path and reader"),
        ({"data_entry": [], "samples": ["a"]}, "needs the entry text1; the entries are none"),
        ({"data_entry": [("text1", "x", "text")] * 2, "samples": ["a"]}, "text1 twice"),
        ({"data_entry": [("text1", "x", "text")], "samples": ["a"]}, "x: no such file"),
        ({"data_entry": [("text1", ".", "arkive_text")], "samples": ["a"]}, "is a folder; expected the parquet file"),
        ({"data_entry": [("text1", ".", "lhotse")], "samples": ["a"]}, "did you mean 'lhotse_audio'"),
        (
            {"data_entry": [("text1", ".", "txt")], "samples": ["a"]},
            "reader 'txt' is not supported; did you mean 'text'.; supported are text, kaldi_audio",
        ),
    ],
)
def test_a_dataset_json_that_cannot_be_used(tmp_path, data, message):
    path = tmp_path / "dataset.json"
    if isinstance(data, dict):
        data["data_entry"] = [
            dict(zip(("name", "path", "reader"), e, strict=True)) if isinstance(e, tuple) else e
            for e in data["data_entry"]
        ]
        data = json.dumps(data)
    path.write_text(data, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        opened("text_to_audio", path)
