"""Recordings of every length and kind through the command line, into a checkpoint that hears."""

import json
import logging

import numpy as np
import pytest
import soundfile
from conftest import golden_files

from espnet2_vllm.bin import inference

SECONDS = {"s0": 0, "s0.01": 0.01, "s0.1": 0.1, "s29.99": 29.99, "s30": 30, "s30.01": 30.01, "s60": 60, "s600": 600}
SHORT = {"s0", "s0.01"}
CONFIG = "dtype: float32\nenforce_modality: [text]\ntext: {temperature: 0.0, topk: 20, cfg: 1, max_step: 4}\n"


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """A data set of a recording of each length, 16 kHz."""
    folder = tmp_path_factory.mktemp("sound")
    noise = (np.random.default_rng(3).standard_normal(600 * 16000) * 3000).astype(np.int16)
    for name, seconds in SECONDS.items():
        soundfile.write(folder / f"{name}.wav", noise[: round(seconds * 16000)], 16000)
    return folder


def decode(folder, tmp_path, names, *more):
    """(exit code, results, journal by key)."""
    (config,) = golden_files("bagpiper/qwen3-s4-cb32-contaudio/train.yaml")
    (tmp_path / "inference.yaml").write_text(CONFIG, encoding="utf-8")
    (tmp_path / "audio1").write_text("".join(f"{name} {folder}/{name}.wav\n" for name in names), encoding="utf-8")
    entry = {"name": "audio1", "path": str(tmp_path / "audio1"), "reader": "kaldi_audio"}
    description = {"data_entry": [entry], "samples": list(names)}
    (tmp_path / "dataset.json").write_text(json.dumps(description), encoding="utf-8")
    words = ["--train-config", config, "--model-checkpoint", config.parent / "mp_rank_00_model_states.pt"]
    words += [
        "--inference-config",
        tmp_path / "inference.yaml",
        "--output-dir",
        tmp_path / "out",
        "--backend",
        "pytorch",
    ]
    words += ["--test-unregistered-specifier", f"audio_to_text:set:{tmp_path}/dataset.json", "--device", "cpu", *more]
    code = inference.main(list(map(str, words)))
    rank = tmp_path / "out" / "audio_to_text_set" / "inference_rank0"
    lines = (rank / ".journal" / "journal.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    journal = {record["key"]: record for record in map(json.loads, lines)}
    return code, json.loads((rank / "results.json").read_text(encoding="utf-8")), journal


def test_every_length_as_older_espnet_cut_it(recordings, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    code, results, journal = decode(recordings, tmp_path, SECONDS, "--long-audio", "cut")
    assert code == 1
    assert set(results) == SECONDS.keys() - SHORT
    assert "the recording has no samples" in journal["s0"]["reason"]
    assert "160 samples at 16000 Hz" in journal["s0.01"]["reason"]
    # Of what is longer the same 30 s are heard.
    assert results["s30"] == results["s30.01"] == results["s60"] == results["s600"]
    assert "3 recordings cut to their first 480000 samples (30.0 s at 16000 Hz), as older ESPnet did" in caplog.text


@pytest.mark.parametrize("mode", [None, "refuse"])
def test_long_audio_is_heard_whole_unless_refused(recordings, tmp_path, mode):
    names = ("s30", "s30.01", "s60", "s600")
    code, results, journal = decode(recordings, tmp_path, names, *(["--long-audio", mode] if mode else []))
    assert code == 1
    if mode == "refuse":
        assert set(results) == {"s30"}
        assert all("more than the 480000 samples" in journal[name]["reason"] for name in names[1:])
    else:
        assert set(results) == {"s30", "s30.01", "s60"}
        # 600 s are 7800 rows.
        assert "leave no room in the context" in journal["s600"]["reason"]


def test_kinds_of_files(tmp_path, caplog):
    """8 to 48 kHz, stereo, 8 to 32 bits, flac and mp3: the same sound, so nearly the same rows; changes are counted."""
    caplog.set_level(logging.INFO)
    tone = np.sin(2 * np.pi * 300 * np.arange(48000) / 48000) * 0.4
    kinds = {
        "u8": ("wav", 48000, "PCM_U8"), "s24": ("wav", 48000, "PCM_24"), "f32": ("wav", 16000, "FLOAT"),
        "flac": ("flac", 8000, "PCM_16"), "mp3": ("mp3", 44100, None), "sph": ("sph", 16000, "PCM_16"),
    }  # fmt: skip
    for name, (suffix, rate, subtype) in kinds.items():
        samples = np.interp(np.arange(rate) / rate, np.arange(48000) / 48000, tone)
        options = {"format": "NIST"} if suffix == "sph" else {}
        stereo = np.stack([samples, -samples], axis=1) if name == "s24" else samples
        soundfile.write(tmp_path / f"{name}.{suffix}", stereo, rate, subtype=subtype, **options)
        if suffix != "wav":
            (tmp_path / f"{name}.{suffix}").rename(tmp_path / f"{name}.wav")  # what a file is, its content says
    code, results, _ = decode(tmp_path, tmp_path, kinds)
    assert code == 0 and set(results) == set(kinds)
    for note in (
        "1 recordings of 2 channels, of which the first was taken",
        "2 recordings resampled from 48000 to 16000 Hz",
        "1 recordings resampled from 8000 to 16000 Hz",
    ):
        assert note in caplog.text


def test_a_run_goes_on_and_hears_nothing_twice(recordings, tmp_path, monkeypatch):
    names = ("s0.1", "s29.99")
    first = decode(recordings, tmp_path, names)
    monkeypatch.setattr("espnet2_vllm.audio.tower.AudioTower.encode", None)  # whatever is encoded now fails
    assert decode(recordings, tmp_path, names) == first
