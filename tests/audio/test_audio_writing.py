"""16-bit wav files: libsndfile's numbers, whole or not at all."""

import numpy as np
import pytest
import soundfile
from conftest import golden_files

from espnet2_vllm.audio import write_wav
from espnet2_vllm.errors import DataError

RECORDED = golden_files("opuslm/*/cases/plain_tts_eos.npz")


@pytest.mark.parametrize("case", RECORDED, ids=lambda path: f"{path.parent.parent.name}-{path.stem}")
def test_samples_are_those_of_espnets_writer(case, tmp_path):
    arrays = np.load(case)
    names = [name.removeprefix("writer.wav_float.") for name in arrays if name.startswith("writer.wav_float.")]
    assert names
    for name in names:
        wav = arrays[f"writer.wav_float.{name}"]
        clipped = write_wav(tmp_path / "out.wav", wav, 16000)
        samples, rate = soundfile.read(tmp_path / "out.wav", dtype="int16")
        assert rate == 16000 and clipped == int((np.abs(wav) > 1).sum())
        assert np.abs(samples.astype(int) - arrays[f"writer.wav_pcm16.{name}"]).max() <= 2


def test_clipping_is_counted_and_saturates(tmp_path):
    wav = np.array([0.0, 0.5, 1.0, -1.0, 1.0001, -3.0, 2.0], dtype=np.float32)
    assert write_wav(tmp_path / "a.wav", wav, 24000) == 3
    info = soundfile.info(tmp_path / "a.wav")
    assert (info.subtype, info.channels, info.samplerate, info.frames) == ("PCM_16", 1, 24000, 7)
    samples, _ = soundfile.read(tmp_path / "a.wav", dtype="int16")
    assert samples[4] == samples[6] == 32767 and samples[5] == -32768 and abs(int(samples[1]) - 16384) <= 1


def test_directories_are_made_and_nothing_unfinished_is_left(tmp_path, monkeypatch):
    path = tmp_path / "a" / "b" / ("long" * 60 + ".wav")
    write_wav(path, np.zeros(10, dtype=np.float32), 16000)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    before = path.read_bytes()
    with pytest.raises(DataError, match="2 of 3 samples are NaN"):
        write_wav(path, np.array([0.0, np.nan, np.inf]), 16000)

    def fail(file, *args, **kwargs):
        file.write(b"RIFF")
        raise OSError("disk full")

    monkeypatch.setattr(soundfile, "write", fail)
    with pytest.raises(OSError, match="disk full"):
        write_wav(path, np.ones(10, dtype=np.float32), 16000)
    assert [p.name for p in path.parent.iterdir()] == [path.name] and path.read_bytes() == before


def test_rights_follow_the_umask(tmp_path):
    write_wav(tmp_path / "a.wav", np.zeros(0, dtype=np.float32), 16000)
    (tmp_path / "plain").touch()
    assert (tmp_path / "a.wav").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert soundfile.info(tmp_path / "a.wav").frames == 0
