"""Sound into files: libsndfile's numbers, whole or not at all."""

from unittest import mock

import kaldiio
import numpy as np
import pytest
import soundfile
from conftest import golden_files

from espnet2_vllm.audio import append_to_ark, read_audio, write_wav
from espnet2_vllm.audio_format import AudioFormat
from espnet2_vllm.errors import ConfigError, DataError

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


# -- other formats -----------------------------------------------------------------------------------------------------
WAV = np.array([0.0, 0.5, -0.25, 1.0001, -3.0, 0.123456789], dtype=np.float32)


@pytest.mark.parametrize(
    ("name", "bits", "subtype", "step"),
    [("wav", "24", "PCM_24", 2**-23), ("wav", "float", "FLOAT", 0), ("flac", "16", "PCM_16", 2**-15)]
    + [("flac", "24", "PCM_24", 2**-23)],
)
def test_formats(tmp_path, name, bits, subtype, step):
    form = AudioFormat(name, bits)
    path = tmp_path / f"a{form.suffix}"
    assert write_wav(path, WAV, 16000, form) == (0 if bits == "float" else 2)
    info = soundfile.info(path)
    assert (info.format, info.subtype, info.samplerate, info.channels) == (name.upper(), subtype, 16000, 1)
    samples, _ = soundfile.read(path, dtype="float64")
    expected = WAV if bits == "float" else np.clip(WAV, -1, 1 - step)
    np.testing.assert_allclose(samples, expected, rtol=0, atol=2 * step)


@pytest.mark.parametrize("name", ["wav.ark", "flac.ark"])
def test_arks_are_read_by_kaldi_s_rules(tmp_path, name):
    form, path = AudioFormat(name), tmp_path / "sub" / "all.ark"
    places = {}
    for key, length in (("a", 100), ("b-long/key", 0), ("c", 7)):
        wav = np.full(length, 0.25, dtype=np.float32)
        places[key], clipped = append_to_ark(path, key, wav, 16000, form)
        assert clipped == 0
    for key, length in (("a", 100), ("c", 7)):
        wav, rate = read_audio(f"{path}:{places[key]}")
        assert (rate, wav.shape) == (16000, (1, length))
        np.testing.assert_allclose(wav, 0.25, atol=2**-15)
        assert kaldiio.load_mat(f"{path}:{places[key]}")[0] == 16000
    assert form.suffix == f".{name.removesuffix('.ark')}"


def test_an_ark_is_as_before_when_the_disk_is_full(tmp_path, monkeypatch):
    path, form = tmp_path / "all.ark", AudioFormat("wav.ark")
    append_to_ark(path, "a", WAV, 16000, form)
    before = path.read_bytes()
    real = open

    def full(name, mode="r", **options):
        file = real(name, mode, **options)
        if mode == "ab":

            def flush():
                raise OSError(28, "No space left on device")

            file = mock.Mock(wraps=file, flush=flush)
            file.__enter__ = lambda self: self
            file.__exit__ = lambda self, *_: file._mock_wraps.close()
        return file

    monkeypatch.setattr("builtins.open", full)
    with pytest.raises(OSError, match="No space"):
        append_to_ark(path, "b", WAV, 16000, form)
    monkeypatch.undo()
    assert path.read_bytes() == before
    with pytest.raises(DataError, match="b in .*all.ark: not written, 1 of 1 samples"):
        append_to_ark(path, "b", np.array([np.nan]), 16000, form)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("mp3",), "audio_format 'mp3' is unknown; expected one of wav, flac, wav.ark, flac.ark"),
        (("wav", "8"), "audio_bits '8' is unknown; expected one of 16, 24, float"),
        (("flac", "float"), "flac holds 16 or 24 bits"),
    ],
)
def test_formats_that_do_not_exist(values, message):
    with pytest.raises(ConfigError, match=message):
        AudioFormat(*values)
