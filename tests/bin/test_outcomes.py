"""How answers end, through the Bagpiper command line: what was cut is returned and flagged, codes out of range are counted."""

import json
import logging

import numpy as np
import pytest
import soundfile
from commands import bagpiper
from conftest import golden_models

from espnet2_vllm import delay
from espnet2_vllm.checkpoint import ensure_converted

MODEL = next(model for model in golden_models("bagpiper") if not (model / "Qwen").exists())
SETTINGS = {"temperature": 1.5, "topk": 60, "cfg": 1, "min_step": 0, "max_step": 30}
FOLDER = "text_to_audio_set/inference_rank0"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("ESPNET2_VLLM_CACHE", str(tmp_path_factory.getbasetemp() / "converted"))


def run(folder, keys, *more, **changes):
    """Decodes one prompt under several keys; the journal's records."""
    (folder / "text").write_text("".join(f"{key} hello\n" for key in keys), encoding="utf-8")
    entry = {"name": "text1", "path": str(folder / "text"), "reader": "text"}
    data = {"data_entry": [entry], "samples": list(keys)}
    (folder / "dataset.json").write_text(json.dumps(data), encoding="utf-8")
    blocks = {name: SETTINGS | changes.get(name, {}) for name in ("text", "audio")}
    config = {"dtype": "float32", "enforce_modality": changes.get("enforce", ["audio"]), **blocks}
    (folder / "inference.yaml").write_text(json.dumps(config), encoding="utf-8")
    specifier = f"text_to_audio:set:{folder / 'dataset.json'}"
    assert bagpiper(MODEL, folder / "inference.yaml", specifier, folder / "out", *more) == 0
    lines = (folder / "out" / FOLDER / ".journal" / "journal.jsonl").read_text("utf-8").splitlines()[1:]
    return {record["key"]: record for record in map(json.loads, lines)}


def test_audio_cut_by_length_is_returned_and_flagged(tmp_path, caplog):
    hop = 320
    record = run(tmp_path, "a", audio={"min_step": 30})["a"]
    assert (record["outcome"], record["ends"]) == ("length", ["max_rows"])
    assert "segment 0 (audio) was cut after 30 rows, the most that" in record["reason"]
    layout = ensure_converted(MODEL / "train.yaml", MODEL / "mp_rank_00_model_states.pt").layout
    (wav,) = (tmp_path / "out" / FOLDER).glob("*.wav")
    info = soundfile.info(wav)
    assert info.frames % hop == 0 and info.frames // hop == 30 - (layout.num_streams - 1)
    assert record["audio_seconds"] == pytest.approx(info.frames / info.samplerate, abs=1e-3)
    results = json.loads((tmp_path / "out" / FOLDER / "results.json").read_text("utf-8"))
    assert results == {"a": [["assistant", "audio", str(wav)]]}
    assert any(r.levelno == logging.WARNING and r.message.startswith("a: length: ") for r in caplog.records)


def test_a_text_only_answer_to_an_audio_request_says_so(tmp_path, caplog):
    """Both segments are asked for, the context is full after the first one."""
    record = run(
        tmp_path,
        "a",
        "--engine-option",
        "max_rows=60",
        enforce=["text", "audio"],
        text={"min_step": 90, "max_step": 90},
    )["a"]
    assert (record["outcome"], record["ends"]) == ("no_audio", ["context"])
    assert any(message.startswith("a: no_audio: enforce_modality asks for audio") for message in caplog.messages)
    ((text,),) = json.loads((tmp_path / "out" / FOLDER / "results.json").read_text("utf-8")).values()
    assert text[:2] == ["assistant", "text"]


def outside(layout, rows):
    """Ids of a segment that are no code of their stream; none if its first row, or the one behind a bridge, announces text."""
    start = int(rows[0, 0] == layout.specials["assistant"])
    if rows[start, 0] != layout.specials["audio"]:
        return 0
    frames = delay.undo(rows[start + 1 : len(rows) - (rows[-1, 0] in layout.end_tokens)])
    spans = np.array(layout.code_spans)
    return int(((frames < spans[:, 0]) | (frames >= spans[:, 1])).sum())


def test_codes_out_of_range_are_counted_and_reported(tmp_path, caplog):
    """The model may emit a stream's pad in mid-audio (ESPnet's mask lets it); the codec gets the nearest code."""
    keys = [f"k{i}" for i in range(12)]
    records = run(tmp_path, keys, "--write-scores")
    layout = ensure_converted(MODEL / "train.yaml", MODEL / "mp_rank_00_model_states.pt").layout
    counts = {}
    for key in keys:
        with np.load(tmp_path / "out" / FOLDER / ".scores" / f"{key}.npz") as file:
            ids, segments = file["ids"], file["segment"]
        counts[key] = sum(outside(layout, ids[segments == segment]) for segment in set(segments))
    assert sum(counts.values()) > 0, "the draws hold no such id: take others"
    assert {key: record["outside"] for key, record in records.items()} == counts
    said = [message for message in caplog.messages if "audio ids were no code of their stream" in message]
    assert sorted(said) == sorted(
        [
            f"{key}: {count} audio ids were no code of their stream and became the nearest one"
            for key, count in counts.items()
            if count
        ]
        + [f"{sum(counts.values())} audio ids were no code of their stream and became the nearest one"]
    )
