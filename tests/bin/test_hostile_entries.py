"""One bad entry costs itself only, through the command lines, whatever is in it."""

import json

import numpy as np
import pytest
import soundfile
import yaml
from commands import bagpiper
from conftest import golden_models

from espnet2_vllm.errors import CheckpointError, DataError
from espnet2_vllm.io.items import item, read_item

TEXT = {
    "dtype": "float32",
    "enforce_modality": ["text"],
    "text": {"temperature": 0.0, "topk": 20, "cfg": 1, "max_step": 4},
}


def declaring(samples):
    """A FLAC of 0.5 s whose header says ``samples``."""
    import io

    file = io.BytesIO()
    soundfile.write(file, np.zeros(8000, np.int16), 16000, format="FLAC")
    data = bytearray(file.getvalue())
    data[18:26] = (int.from_bytes(data[18:26], "big") & ~(2**36 - 1) | samples).to_bytes(8, "big")
    return bytes(data)


def journal_of(folder):
    lines = (folder / ".journal" / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    records = map(json.loads, lines[1:])
    return {record["key"]: record for record in records if "key" in record}


def test_recordings(tmp_path):
    model = next(path for path in golden_models("bagpiper") if "contaudio" in path.name)
    (tmp_path / "inference.yaml").write_text(yaml.safe_dump(TEXT), encoding="utf-8")
    soundfile.write(tmp_path / "good.wav", np.random.default_rng(1).uniform(-0.2, 0.2, 8000), 16000)
    (tmp_path / "huge.flac").write_bytes(declaring(2**36 - 1))
    entries = {
        "good": f"{tmp_path}/good.wav",
        "huge": f"{tmp_path}/huge.flac",
        "digits": f"{tmp_path}/good.wav:{'9' * 5000}",
        "long": "n" * 5000,
        "deep": "/n" * 3000,
        "alsogood": f"{tmp_path}/good.wav",
    }
    (tmp_path / "wav.scp").write_text("".join(f"{k} {v}\n" for k, v in entries.items()), encoding="utf-8")
    data = {
        "data_entry": [{"name": "audio1", "path": f"{tmp_path}/wav.scp", "reader": "kaldi_audio"}],
        "samples": list(entries),
    }
    (tmp_path / "dataset.json").write_text(json.dumps(data), encoding="utf-8")
    out = tmp_path / "out"
    code = bagpiper(
        model, tmp_path / "inference.yaml", f"audio_to_text:s:{tmp_path}/dataset.json", out, "--device", "cpu"
    )
    folder = out / "audio_to_text_s" / "inference_rank0"
    results, journal = json.loads((folder / "results.json").read_text(encoding="utf-8")), journal_of(folder)
    assert code == 1 and set(results) == {"good", "alsogood"} and results["good"] == results["alsogood"]
    assert {key for key, record in journal.items() if record["outcome"] == "refused"} == set(entries) - set(results)
    assert all(key in record["reason"] for key, record in journal.items() if record["outcome"] == "refused")


def test_conversations(tmp_path):
    """Ids with half of a surrogate pair, numbers of thousands of digits, brackets within brackets, a command."""
    model = next(path for path in golden_models("bagpiper") if "contaudio" in path.name)
    (tmp_path / "inference.yaml").write_text(yaml.safe_dump(TEXT), encoding="utf-8")

    def line(uid, *messages):
        return json.dumps({"example_id": uid, "messages": [*messages, ["assistant", "text", ""]]})

    hello = ["user", "text", "hello"]
    lines = [
        line("good", hello),
        line("half\ud800", hello),
        line("digits", hello)[:-1] + ', "n": ' + "9" * 5000 + "}",
        line("nested", hello)[:-1] + ', "n": ' + "[" * 200_000 + "]" * 200_000 + "}",
        line("runs", ["user", "audio", f"touch {tmp_path}/ran; cat {tmp_path}/x |"], hello),
        line("text\ud800", ["user", "text", "a\ud800"]),
    ]
    (tmp_path / "d.jsonl").write_text("\n".join(lines), encoding="utf-8")
    keys = ["good", "half\ud800", "digits", "nested", "runs", "text\ud800"]
    data = {
        "data_entry": [{"name": "dialogue", "path": f"{tmp_path}/d.jsonl", "reader": "dialogue"}],
        "samples": keys,
    }
    (tmp_path / "dataset.json").write_text(json.dumps(data), encoding="utf-8")
    out = tmp_path / "out"
    code = bagpiper(model, tmp_path / "inference.yaml", f"dialogue:s:{tmp_path}/dataset.json", out, "--device", "cpu")
    folder = out / "dialogue_s" / "inference_rank0"
    results, journal = json.loads((folder / "results.json").read_text(encoding="utf-8")), journal_of(folder)
    assert code == 1 and set(results) == {"good", "half\ud800"}
    assert "d.jsonl:3: no JSON that can be read: ValueError" in journal["digits"]["reason"]
    assert "d.jsonl:4: no JSON that can be read: RecursionError" in journal["nested"]["reason"]
    assert "is a command, which is not run here" in journal["runs"]["reason"]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RecursionError("deep"),
        OverflowError("wide"),
        UnicodeError("odd"),
        ZeroDivisionError("0"),
        OSError(5, "io"),
    ],
)
def test_whatever_reading_an_item_raises_is_its_outcome_alone(error):
    def read(key):
        if key == "bad":
            raise error
        return key

    assert read_item("good", read) == "good"
    key, found = read_item("bad", read)
    assert key == "bad" and f"bad: cannot be read: {type(error).__name__}" in str(found)
    with pytest.raises(CheckpointError), item("x"):
        raise CheckpointError("is not of the item")
    with pytest.raises(KeyboardInterrupt), item("x"):
        raise KeyboardInterrupt
    with pytest.raises(DataError, match="^x: y$"), item("x"):
        raise DataError("y")
