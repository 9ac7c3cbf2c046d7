"""espnet2-vllm bench --codec: a codec beside the engine, on the CPU."""

import functools
import json

import pytest
from bench_models import converted_model

from espnet2_vllm.bench import speech, systems
from espnet2_vllm.bin import bench


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Short bursts, and the device of other tests' engines is left alone."""
    monkeypatch.setattr(systems, "free_device", lambda: 0)
    monkeypatch.setattr(speech, "_BURST", 4)
    monkeypatch.setattr(speech, "_BESIDE_S", 0.2)
    settings = functools.partial(speech.SpeechSettings, clip_seconds=0.6, bursts=1, steps=12)
    monkeypatch.setattr(speech, "SpeechSettings", settings)


def test_figures_of_a_codec_beside_the_engine(tmp_path, capfd):
    path = tmp_path / "speech.json"
    arguments = [
        str(converted_model("opuslm", "tiny-llama")), "--codec", "own", "--dtype", "float32", "--device", "cpu",
        "--in-flight", "1,3", "--lengths", "16:30", "--clips", "10", "--codec-share", "1,0.5", "--json", str(path),
    ]  # fmt: skip
    assert bench.main(arguments) == 0
    (entry,) = json.loads(path.read_text(encoding="utf-8"))["speech"]
    figures = entry["figures"]
    shared = ["stall, share 0.5", "stream 3, share 0.5"]
    assert list(figures) == ["codec", "memory", "stall", shared[0], "stream 1", "stream 3", shared[1]]
    assert (entry["graphs"], entry["device_bytes"]) == (0, 0)
    assert figures["codec"]["largest_difference"] < 1e-4
    assert figures["codec"]["rtf"] == pytest.approx(
        figures["codec"]["together_s"] / figures["codec"]["together_sound_s"]
    )
    assert figures["memory"]["clips"] == 10
    for name, share in (("stall", "1"), (shared[0], "0.5")):
        stall = figures[name]
        assert (stall["in_flight"], stall["share"]) == (3, share)
        assert stall["clean"]["steps"] >= 12
        assert stall["all"]["steps"] == stall["clean"]["steps"] + stall["busy"]["steps"]
        assert stall["sound_per_s"] > 0
    for count in (1, 3):
        one = figures[f"stream {count}"]
        assert one["sound_s"] == pytest.approx(count * 30 * entry["hop"] / entry["sample_rate"])
        assert 0 < one["first_p50_s"] <= one["first_p99_s"] <= one["seconds"]
        assert one["rows_until_first"] == 18
    shown = capfd.readouterr().out
    assert "### own beside" in shown
    assert figures["codec"]["streamed_difference"] < 1e-4
    assert bench.main(["--plot-from", str(path)]) == 0
    assert capfd.readouterr().out.rstrip().endswith(shown[shown.index("## Speech on") :].rstrip())
    assert "while 4 clips are decoded with share 1:" in shown
    assert "| 3, share 0.5 | 18 |" in shown


def test_unknown_codecs_and_several_models_are_refused(caplog):
    assert bench.main(["opuslm-7b", "--codec", "dac-larg"]) == 2
    assert "codec 'dac-larg' is unknown" in caplog.text
    assert "did you mean dac-large?" in caplog.text
    assert bench.main(["opuslm-7b", "bagpiper-8b", "--codec", "xcodec"]) == 2
    assert "--codec measures one model" in caplog.text
