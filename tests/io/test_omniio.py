"""Data sets of omniio: parquet tables over large files, written here as the tool writes them."""

import json
import sys

import numpy as np
import pytest
import soundfile

from espnet2_vllm.errors import ConfigError, DataError
from espnet2_vllm.io.dataset_json import open_dataset, read_utterances
from espnet2_vllm.io.omniio import OMNIIO_READERS, open_table
from espnet2_vllm.io.specifiers import Specifier
from espnet2_vllm.layout import Layout
from espnet2_vllm.plan import Utterance

pyarrow = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

RATE = 8000
LAYOUT = Layout.bagpiper(200, [9] * 3)


def archive(folder, blobs, times=None, name="metadata.parquet"):
    """``blobs``: bytes by id, put one behind the other, as the tool does."""
    folder.mkdir(exist_ok=True)
    start, rows = 5, []  # something else stands before
    with open(folder / "audio_0.bin", "wb") as file:
        file.write(b"other")
        for uid, data in blobs.items():
            file.write(data)
            row = {
                "utt_id": uid,
                "path": str(folder / "audio_0.bin"),
                "start_byte_offset": start,
                "file_size_bytes": len(data),
            }
            none = dict.fromkeys(("start_time", "end_time")) if times else {}  # columns are those of the first row
            rows.append({**row, **none, **(times or {}).get(uid, {})})
            start += len(data)
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / name)
    return folder / name


def audio(samples, folder, kind="FLAC"):
    path = folder / f"x.{kind.lower()}"
    soundfile.write(path, samples, RATE, format=kind, subtype="PCM_16")
    return path.read_bytes()


def zstd(text):
    return pyarrow.compress(text.encode(), codec="zstd", asbytes=True)


def reader(kind, path, base_dir, **options):
    return OMNIIO_READERS[kind](open_table(path, **options), base_dir)


@pytest.mark.parametrize("kind", ["FLAC", "WAV"])
def test_recordings_and_parts_of_them(tmp_path, kind):
    wav = (np.sin(np.arange(RATE) / 9) / 2).astype(np.float32)
    stereo = np.stack([wav, -wav], 1)
    blobs = {"a": audio(wav, tmp_path, kind), "b": audio(stereo, tmp_path, kind), "part": audio(wav, tmp_path, kind)}
    times = {uid: {"start_time": None, "end_time": None} for uid in "ab"} | {
        "part": {"start_time": 0.25, "end_time": 0.5}
    }
    found = reader("omniio_audio", archive(tmp_path / "set", blobs, times), tmp_path)
    for uid, expected in (("a", wav[None]), ("b", stereo.T), ("part", wav[None, 2000:4000])):
        samples, rate = found.load(uid)
        assert rate == RATE and samples.dtype == np.float32 and samples.shape == expected.shape
        np.testing.assert_allclose(samples, expected, atol=1 / 32768)


def test_texts_and_dialogues(tmp_path):
    messages = [["user", "text", "h\u00e9llo \u97f3\nline"], ["assistant", "text", "yes"]]
    blobs = {
        "t": zstd("h\u00e9llo\nyou"),
        "d": zstd(json.dumps(messages)),
        "e": zstd(json.dumps({"messages": messages})),
    }
    path = archive(tmp_path / "set", blobs)
    assert reader("omniio_text", path, tmp_path).load("t") == "h\u00e9llo\nyou"
    assert [reader("omniio_dialogue", path, tmp_path).load(uid) for uid in "de"] == [messages, messages]


def test_a_bad_row_spares_the_others(tmp_path):
    wav = np.zeros(RATE, np.float32)
    blobs = {
        "a": audio(wav, tmp_path),
        "noise": b"no audio at all",
        "cut": audio(wav, tmp_path),
        "late": audio(wav, tmp_path),
    }
    times = {"late": {"start_time": 3.0, "end_time": 4.0}}
    path = archive(tmp_path / "set", blobs, times)
    bin_file = tmp_path / "set" / "audio_0.bin"
    found = reader("omniio_audio", path, tmp_path)
    assert found.load("a")[0].shape == (1, RATE)
    for uid, message in (
        ("noise", "noise of .*no audio that libsndfile reads"),
        ("late", "from 3.0 to 4.0 s is not within the recording"),
        ("gone", "no row has the utt_id gone"),
    ):
        with pytest.raises(DataError, match=message):
            found.load(uid)
    bin_file.write_bytes(bin_file.read_bytes()[:-10])
    with pytest.raises(DataError, match="late of .*is cut short"):
        found.load("late")
    bin_file.unlink()
    with pytest.raises(DataError, match="a of .*audio_0.bin: no such file"):
        found.load("a")
    texts = archive(tmp_path / "texts", {"t": b"not compressed", "empty": zstd(" "), "d": zstd("[1"), "o": zstd("{}")})
    for kind, uid, message in (
        ("omniio_text", "t", "t of .*no text compressed"),
        ("omniio_text", "empty", "the text is empty"),
        ("omniio_dialogue", "d", "d of .*is no JSON"),
        ("omniio_dialogue", "o", "holds a dict"),
    ):
        with pytest.raises(DataError, match=message):
            reader(kind, texts, tmp_path).load(uid)


def test_a_row_without_a_place_costs_its_id_alone(tmp_path):
    """NaN for a time that is not known, as some tools write it; no path; bytes from before the file's begin."""
    wav = audio(np.zeros(RATE, np.float32), tmp_path)
    times = {"nan": {"start_time": 0.0, "end_time": float("nan")}}
    path = archive(tmp_path / "set", dict.fromkeys(("a", "nan", "nowhere", "before"), wav), times)
    rows = parquet.read_table(path).to_pylist()
    rows[2]["path"], rows[3]["start_byte_offset"] = None, -5
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    found = reader("omniio_audio", path, tmp_path)
    assert found.load("a")[0].shape == (1, RATE)
    for row, uid in enumerate(("nan", "nowhere", "before"), 2):
        with pytest.raises(DataError, match=f"row {row}: {uid}: expected a path as text, two whole numbers from 0"):
            found.load(uid)


def test_tables_that_are_none(tmp_path, monkeypatch):
    path = tmp_path / "t.parquet"
    path.write_bytes(b"no parquet")
    with pytest.raises(DataError, match="t.parquet: cannot be read as parquet"):
        open_table(path)
    with pytest.raises(DataError, match="is a folder; expected the parquet file"):
        open_table(tmp_path)
    parquet.write_table(pyarrow.table({"utt_id": ["a"], "path": ["x"]}), path)
    with pytest.raises(
        DataError, match="has no column start_byte_offset, file_size_bytes; its columns are utt_id, path"
    ):
        open_table(path)
    places = {"path": ["x", "x"], "start_byte_offset": [0, 1], "file_size_bytes": [1, 1]}
    parquet.write_table(pyarrow.table({"utt_id": ["a", "a"], **places}), path)
    with pytest.raises(DataError, match="row 2: utt_id 'a' comes twice"):
        open_table(path).read("a", tmp_path)
    parquet.write_table(pyarrow.table({"utt_id": ["a", None], **places}), path)
    assert set(open_table(path).places) == {"a"}
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="pip install pyarrow"):
        open_table(path)


def test_a_data_set_of_tables(tmp_path):
    """As ``dataset.json`` names them; relative paths count from its folder."""

    class Letters:
        def encode_bagpiper(self, text):
            return [ord(c) % 100 + 1 for c in text]

    archive(tmp_path / "audio", {"u1": audio(np.zeros(800, np.float32), tmp_path), "u2": b"broken"})
    archive(tmp_path / "texts", {"u1": zstd("abc"), "u2": zstd("de")})
    entries = [("audio1", "audio/metadata.parquet", "omniio_audio"), ("text1", "texts/metadata.parquet", "arkive_text")]
    data = {
        "data_entry": [dict(zip(("name", "path", "reader"), e, strict=True)) for e in entries],
        "samples": ["u1", "u2"],
    }
    path = tmp_path / "dataset.json"
    path.write_text(json.dumps(data), encoding="utf-8")

    def read(task):
        dataset = open_dataset(Specifier(task, "set", path, f"{task}:set:{path}"))
        encode = lambda clips: [np.zeros((wav.shape[-1] // 100 + 2, 3), np.int32) for wav, _ in clips]  # noqa: E731
        return list(read_utterances(dataset, LAYOUT, Letters(), encode_audio=encode))

    good, (key, error) = read("audio_to_text")
    assert isinstance(good, Utterance) and len(good.parts[0].rows) == 1 + 2 + 10 + 1
    assert key == "u2" and "u2 of" in str(error)
    assert [u.info["prompt"] for u in read("text_to_audio")] == ["abc", "de"]
