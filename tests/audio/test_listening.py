"""What a continuous encoder hears of a recording, and how many rows of the prompt that takes."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import golden_files

from espnet2_vllm.audio.listening import QWEN25_OMNI, Listening
from espnet2_vllm.checkpoint import ensure_converted
from espnet2_vllm.errors import CheckpointError, DataError

QWEN3_OMNI = {"rate": 16000, "hop": 160, "window": 400, "limit": 480000, "half_chunk": 50}
# Rows by seconds of sound: 13 for each second, the rest by three halvings; the older way hears nothing behind 30 s.
ROWS = {0.1: 2, 0.5: 7, 1.0: 13, 1.01: 14, 29.99: 390, 30.0: 390, 30.01: 391, 60.0: 780, 600.0: 7800}


def listening(**changes) -> Listening:
    return Listening(**{**QWEN3_OMNI, **changes})


def noise(seconds: float, rate: int = 16000, channels: int | None = None) -> np.ndarray:
    shape = (round(seconds * rate),) if channels is None else (channels, round(seconds * rate))
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32) * 0.1


@pytest.mark.parametrize(("seconds", "rows"), ROWS.items())
def test_rows_by_duration(seconds, rows):
    ear = listening()
    wav = ear.prepare(noise(seconds), 16000)
    assert len(wav) == round(seconds * 16000)
    assert ear.rows(len(wav)) == rows
    assert not ear.notes
    older = listening(long_audio="cut")
    assert older.rows(len(older.prepare(noise(seconds), 16000))) == min(rows, 390)
    assert bool(older.notes) == (seconds > 30)


@pytest.mark.parametrize(("seconds", "rows"), {0.03: 1, 0.05: 1, 1.0: 25, 2.01: 50, 30.01: 750, 60.0: 1500}.items())
def test_rows_of_the_other_encoder(seconds, rows):
    """Qwen2.5-Omni's: a halving and pairs, 25 rows a second; below three frames it gives none."""
    ear = listening(encoder=QWEN25_OMNI, half_chunk=100)
    assert ear.rows(len(ear.prepare(noise(seconds), 16000))) == rows
    with pytest.raises(DataError, match=r"has 479 samples at 16000 Hz.* at least 480 \(30.0 ms\)"):
        ear.prepare(np.zeros(479, np.float32), 16000)


@pytest.mark.parametrize("samples", [0, 1, 160, 200])
def test_too_short_to_be_heard(samples):
    """0.01 s is 160 samples: torch cannot reflect the edges of a spectrogram of so few, so ESPnet fails as well."""
    with pytest.raises(DataError, match=rf"has {samples} samples at 16000 Hz.* at least 201 \(12.6 ms\)"):
        listening().prepare(np.zeros(samples, np.float32), 16000)
    assert listening().rows(len(listening().prepare(np.zeros(201, np.float32), 16000))) == 1


@pytest.mark.parametrize("seconds", [60.0, 600.0])
def test_long_audio_as_chosen(seconds):
    wav = noise(seconds)
    whole = listening()
    assert np.array_equal(whole.prepare(wav, 16000), wav) and not whole.notes
    assert whole.rows(len(wav)) == 13 * seconds
    with pytest.raises(DataError, match=rf"{len(wav)} samples \({seconds:.1f} s\), more than the 480000 .*long_audio"):
        listening(long_audio="refuse").prepare(wav, 16000)
    cut = listening(long_audio="cut")
    assert np.array_equal(cut.prepare(wav, 16000), wav[:480000])
    assert cut.notes == {"recordings cut to their first 480000 samples (30.0 s at 16000 Hz), as older ESPnet did": 1}


def test_cut_before_resampling():
    """Older ESPnet counted 480000 samples at the recording's own rate: 10 s at 48 kHz."""
    ear = listening(long_audio="cut")
    assert len(ear.prepare(noise(12.0, 48000), 48000)) == 160000
    assert set(ear.notes) == {
        "recordings cut to their first 480000 samples (10.0 s at 48000 Hz), as older ESPnet did",
        "recordings resampled from 48000 to 16000 Hz",
    }


@pytest.mark.parametrize("rate", [8000, 11025, 16000, 22050, 44100, 48000])
def test_first_channel_at_the_encoders_rate(rate):
    ear, wav = listening(), noise(0.5, rate, channels=2)
    heard = ear.prepare(wav, rate)
    assert heard.dtype == np.float32 and abs(len(heard) - 8000) <= 1
    assert np.array_equal(heard, listening().prepare(wav[0], rate))
    ear.prepare(wav, rate)
    assert ear.notes["recordings of 2 channels, of which the first was taken"] == 2
    assert ear.notes[f"recordings resampled from {rate} to 16000 Hz"] == (0 if rate == 16000 else 2)


def test_settings_are_the_checkpoints_own():
    (config,) = golden_files("bagpiper/qwen3-s4-cb32-contaudio/train.yaml")
    ear = Listening.of(ensure_converted(config.parent), "refuse")
    assert ear == listening(long_audio="refuse")


def test_checkpoints_that_cannot_hear(tmp_path):
    facts = {"encoder": "Qwen/X", "config": "config.json", "preprocessor_config": None}
    with pytest.raises(CheckpointError, match="no continuous audio encoder"):
        Listening.of(SimpleNamespace(path=tmp_path, continuous_audio=None))
    with pytest.raises(CheckpointError, match="hf download Qwen/X config.json"):
        Listening.of(SimpleNamespace(path=tmp_path, continuous_audio=facts))
    facts["preprocessor_config"] = "preprocessor_config.json"
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"sampling_rate": 16000}), encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps({"audio_config": {"model_type": "other"}}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="type 'other'; only qwen3_omni_moe_audio_encoder and qwen2_5_omni_audio"):
        Listening.of(SimpleNamespace(path=tmp_path, continuous_audio=facts))
    audio = {"model_type": "qwen3_omni_moe_audio_encoder", "n_window": 50}
    (tmp_path / "config.json").write_text(json.dumps({"audio_config": audio}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="lacks 'hop_length'"):
        Listening.of(SimpleNamespace(path=tmp_path, continuous_audio=facts))
