"""Recordings by path, in arks and from commands, whole and damaged."""

import io
import shlex
import struct
from pathlib import Path

import kaldiio
import numpy as np
import pytest
import soundfile
from conftest import golden_files

from espnet2_vllm.audio import first_channel, read_audio, resample
from espnet2_vllm.audio.resampling import resample_by_sample
from espnet2_vllm.errors import DataError

SEED = 611
ARKS = golden_files("bagpiper/*/trees/*/input/audio1.scp")


@pytest.fixture
def noise():
    """[2, 8000] in [-0.5, 0.5], on the grid of 16-bit samples."""
    print("seed", SEED)
    return np.random.default_rng(SEED).integers(-16384, 16384, (2, 8000)).astype(np.float32) / 32768


def write(path, wav, rate=16000, **kwargs):
    soundfile.write(path, wav.T, rate, **kwargs)
    return str(path)


@pytest.mark.parametrize("rate", [8000, 16000, 44100])
@pytest.mark.parametrize(
    ("name", "subtype", "tolerance"),
    [
        ("a.wav", "PCM_16", 0),
        ("a.wav", "PCM_24", 0),
        ("a.wav", "PCM_32", 0),
        ("a.flac", "PCM_24", 0),
        ("a.wav", "FLOAT", 0),
        ("a.wav", "PCM_U8", 1 / 127),
        ("a.flac", "PCM_16", 0),
        ("a.sph", "PCM_16", 0),
    ],
)
def test_files_give_all_channels_as_floats(tmp_path, noise, name, subtype, tolerance, rate):
    kwargs = {"format": "NIST"} if name.endswith("sph") else {}
    wav, found = read_audio(write(tmp_path / name, noise, rate, subtype=subtype, **kwargs))
    assert found == rate and wav.dtype == np.float32 and wav.flags.c_contiguous and wav.shape == noise.shape
    np.testing.assert_allclose(wav, noise, rtol=0, atol=tolerance)
    assert first_channel(wav).shape == (8000,)


def test_mp3(tmp_path):
    tone = 0.3 * np.sin(2 * np.pi * 440 * np.arange(16000) / 16000, dtype=np.float32)[None]
    wav, rate = read_audio(write(tmp_path / "a.mp3", tone))
    assert rate == 16000 and wav.shape[0] == 1 and abs(wav.shape[1] - 16000) <= 2304
    assert 0.25 < np.abs(wav[0, 4000:12000]).max() < 0.35


def test_relative_paths_are_looked_up_under_base_dir_first(tmp_path, noise, monkeypatch):
    for place, scale in (("base", 1), ("work", 0.5)):
        (tmp_path / place).mkdir()
        write(tmp_path / place / "a:1.wav", noise * scale, subtype="FLOAT")
    write(tmp_path / "work" / "b.wav", noise * 0.5, subtype="FLOAT")
    monkeypatch.chdir(tmp_path / "work")
    np.testing.assert_array_equal(read_audio("a:1.wav", base_dir=tmp_path / "base")[0], noise)
    np.testing.assert_array_equal(read_audio("a:1.wav")[0], noise * 0.5)
    np.testing.assert_array_equal(read_audio("b.wav", base_dir=tmp_path / "base")[0], noise * 0.5)


@pytest.mark.parametrize("scp", ARKS, ids=lambda path: f"{path.parents[3].name}-{path.parents[1].name}")
def test_wav_arks_are_read_as_kaldiio_reads_them(scp):
    model_dir = scp.parents[3]
    lines = scp.read_text(encoding="utf-8").split("\n")[:-1]
    assert lines
    for line in lines:
        key, spec = line.split(maxsplit=1)
        wav, rate = read_audio(spec, base_dir=model_dir)
        if (model_dir / "trees/asr_lhotse").is_dir():  # the same recordings, as files
            plain, plain_rate = read_audio(f"trees/asr_lhotse/input/wav/{key}.wav", base_dir=model_dir)
            assert rate == plain_rate
            np.testing.assert_array_equal(wav, plain)
        # kaldiio itself gives the integers that ESPnet's reader hands on.
        np.testing.assert_array_equal(
            wav[0] * 32768, kaldiio.load_mat(str(model_dir / spec.split(":")[0]) + ":" + spec.split(":")[1])[1]
        )


def write_ark(path, wavs, container):
    """An ark of ``wavs`` ({key: [channels, n]}) and the spec of each entry."""
    entries = {}
    for key, wav in wavs.items():
        samples = (wav.T * 32768).astype(np.int16)
        entries[key] = (16000, samples[:, 0] if samples.shape[1] == 1 else samples)
    scp = path.with_suffix(".scp")
    if container == "RIFF":
        kaldiio.save_ark(str(path), entries, scp=str(scp))
    elif container.startswith("AUDIO"):
        options = {"format": container.split()[1]}
        kaldiio.save_ark(str(path), entries, scp=str(scp), write_function="soundfile", write_kwargs=options)
    else:
        lines = []
        with path.open("wb") as ark:
            for key, (rate, samples) in entries.items():
                ark.write(key.encode() + b" ")
                lines.append(f"{key} {path}:{ark.tell()}\n")
                buffer = io.BytesIO()
                soundfile.write(buffer, samples, rate, format="FLAC")
                ark.write(buffer.getvalue())
        scp.write_text("".join(lines), encoding="utf-8")
    return dict(line.split(maxsplit=1) for line in scp.read_text(encoding="utf-8").split("\n")[:-1])


CONTAINERS = pytest.mark.parametrize("container", ["RIFF", "AUDIO wav", "AUDIO flac", "fLaC"])


@CONTAINERS
def test_ark_entries(tmp_path, noise, container):
    wavs = {"one": noise[:1], "two": noise, "three": noise[:1, :77]}
    specs = write_ark(tmp_path / "a.ark", wavs, container)
    for key, wav in wavs.items():
        found, rate = read_audio(specs[key])
        assert rate == 16000 and found.dtype == np.float32
        np.testing.assert_array_equal(found, wav)


@pytest.mark.parametrize(
    ("subtype", "tolerance"),
    [("PCM_U8", 1 / 127), ("PCM_24", 0), ("PCM_32", 0), ("FLOAT", 0), ("DOUBLE", 0), ("ULAW", 0.02), ("ALAW", 0.02)],
)
def test_wavs_of_any_encoding_in_arks(tmp_path, noise, subtype, tolerance):
    """kaldiio refuses most of them and takes mu-law for 8-bit samples."""
    buffer = io.BytesIO()
    soundfile.write(buffer, noise.T, 16000, format="WAV", subtype=subtype)
    (tmp_path / "a.ark").write_bytes(b"one " + buffer.getvalue() + b"two " + buffer.getvalue())
    for offset in (4, 8 + len(buffer.getvalue())):
        found, rate = read_audio(f"{tmp_path}/a.ark:{offset}")
        assert rate == 16000 and found.shape == noise.shape
        np.testing.assert_allclose(found, noise, rtol=0, atol=tolerance)


@CONTAINERS
def test_ark_that_is_cut_short(tmp_path, noise, container):
    ark = tmp_path / "a.ark"
    specs = write_ark(ark, {"one": noise[:1], "two": noise[:1]}, container)
    whole = ark.read_bytes()
    start = int(specs["two"].rpartition(":")[2])
    for end in (len(whole) - 1, start + 100, start + 6, start + 2, start):
        ark.write_bytes(whole[:end])
        with pytest.raises(DataError, match=r"a\.ark:\d+: ") as caught:
            read_audio(specs["two"])
        assert str(caught.value).startswith(specs["two"])
        np.testing.assert_array_equal(read_audio(specs["one"])[0], noise[:1])


def test_ark_offsets_that_point_elsewhere(tmp_path, noise):
    ark = tmp_path / "a.ark"
    spec = write_ark(ark, {"one": noise[:1]}, "RIFF")["one"]
    with pytest.raises(DataError, match="no recording begins at this offset"):
        read_audio(f"{ark}:0")
    with pytest.raises(DataError, match="lies behind the end of the ark"):
        read_audio(f"{ark}:99999999")
    with pytest.raises(DataError, match="no such file"):
        read_audio(f"{ark}x:{spec.rpartition(':')[2]}")
    kaldiio.save_ark(str(tmp_path / "m.ark"), {"m": np.zeros((3, 2), dtype=np.float32)})
    with pytest.raises(DataError, match="no recording begins at this offset"):
        read_audio(f"{tmp_path / 'm.ark'}:2")


def test_pickles_in_arks_are_not_run(tmp_path):
    """kaldiio would unpickle such an entry."""
    (tmp_path / "p.ark").write_bytes(b"key PKLcos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    with pytest.raises(DataError, match="no recording begins"):
        read_audio(f"{tmp_path / 'p.ark'}:4")
    assert not (tmp_path / "ran").exists()


def test_command_gives_a_recording(tmp_path, noise):
    write(tmp_path / "a b.wav", noise)
    quoted = shlex.quote(str(tmp_path / "a b.wav"))
    for spec, base in ((f"cat {quoted} |", None), (f"cat < {quoted} | cat|", None), ("cat 'a b.wav' |", tmp_path)):
        wav, rate = read_audio(spec, base_dir=base)
        np.testing.assert_array_equal(wav, noise)
        assert rate == 16000


@pytest.mark.parametrize("length", [0x7FFFF000, 0xFFFFFFFF])
def test_command_that_cannot_know_its_length_beforehand(tmp_path, noise, length):
    data = bytearray(Path(write(tmp_path / "a.wav", noise)).read_bytes())
    data[4:8] = struct.pack("<I", min(length + 36, 0xFFFFFFFF))
    data[40:44] = struct.pack("<I", length)
    (tmp_path / "piped.wav").write_bytes(data)
    np.testing.assert_array_equal(read_audio(f"cat {tmp_path}/piped.wav |")[0], noise)


def test_command_that_fails_says_how(tmp_path):
    with pytest.raises(
        DataError, match=r"exit status 3: echo sph2pipe: no such utterance >&2; exit 3\n.*no such utterance"
    ):
        read_audio("echo sph2pipe: no such utterance >&2; exit 3 |")
    with pytest.raises(DataError, match="exit status 127"):
        read_audio("no-such-program-here -x |")
    with pytest.raises(DataError, match=r"gave no output: true\n.*\(nothing\)"):
        read_audio("true |")
    with pytest.raises(DataError, match=r"echo hello \|: no audio"):
        read_audio("echo hello |")
    with pytest.raises(DataError, match="no command"):
        read_audio(" |")
    # A command that reads its standard input finds it empty instead of taking the caller's.
    with pytest.raises(DataError, match="gave no output: cat"):
        read_audio("cat |")


@pytest.mark.parametrize(
    ("name", "ends"), [("a.wav", (-2, 5000, 46, 30, 3)), ("a.flac", (-50, 5000, 60, 3)), ("a.mp3", (2000, 60, 3))]
)
def test_files_that_are_cut_short(tmp_path, noise, name, ends):
    path = write(tmp_path / name, noise[:1])
    whole = Path(path).read_bytes()
    for end in ends:
        Path(path).write_bytes(whole[:end])
        with pytest.raises(DataError) as caught:
            read_audio(path)
        assert str(caught.value).startswith(path), caught.value


def test_sphere_file_that_is_cut_short(tmp_path, noise):
    """libsndfile takes the samples that are there for all."""
    path = tmp_path / "a.sph"
    write(path, noise, format="NIST", subtype="PCM_16")
    assert read_audio(str(path))[0].shape == (2, 8000)
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(DataError, match=r"a\.sph: cut short, 7900 of 8000 samples"):
        read_audio(str(path))


def test_wav_with_other_chunks_before_its_samples(tmp_path, noise):
    """A chunk of odd length is followed by a byte of padding; what follows the samples does not count."""
    whole = Path(write(tmp_path / "a.wav", noise)).read_bytes()
    extra = struct.pack("<4sI", b"note", 5) + b"hello\0"
    body = whole[12:36] + extra + whole[36:] + struct.pack("<4sI", b"LIST", 4) + b"INFO"
    data = b"RIFF" + struct.pack("<I", len(body) + 4) + b"WAVE" + body
    path = tmp_path / "b.wav"
    path.write_bytes(data)
    np.testing.assert_array_equal(read_audio(str(path))[0], noise)
    path.write_bytes(data[:-100])
    with pytest.raises(DataError, match="31912 of 32000 bytes of samples"):
        read_audio(str(path))


def test_files_without_use(tmp_path, noise):
    (tmp_path / "empty.wav").touch()
    with pytest.raises(DataError, match=r"empty\.wav: the file is empty"):
        read_audio(str(tmp_path / "empty.wav"))
    with pytest.raises(DataError, match=r"none\.wav: the recording has no samples"):
        read_audio(write(tmp_path / "none.wav", noise[:, :0]))
    (tmp_path / "text.wav").write_text("not audio", encoding="utf-8")
    with pytest.raises(DataError, match=r"text\.wav: no audio"):
        read_audio(str(tmp_path / "text.wav"))
    with pytest.raises(DataError, match=f"gone.wav: no such file; looked at {tmp_path}/gone.wav and "):
        read_audio("gone.wav", base_dir=tmp_path)
    with pytest.raises(DataError, match="without a name"):
        read_audio("  ")
    noise[1, 3] = np.nan
    with pytest.raises(DataError, match=r"nan\.wav: 1 samples are NaN"):
        read_audio(write(tmp_path / "nan.wav", noise, subtype="FLOAT"))


def test_resample():
    wav = np.sin(2 * np.pi * 200 * np.arange(44100, dtype=np.float32) / 44100)[None]
    assert resample(wav, 16000, 16000) is wav
    out = resample(wav, 44100, 16000)
    assert out.shape == (1, 16000) and out.dtype == np.float32
    expected = np.sin(2 * np.pi * 200 * np.arange(16000) / 16000)
    assert np.abs(out[0, 100:-100] - expected[100:-100]).max() < 1e-3
    assert resample(wav[:, :7], 8000, 16000).shape == (1, 14)
    with pytest.raises(DataError, match="from 0 Hz to 16000 Hz"):
        resample(wav, 0, 16000)


@pytest.mark.parametrize(("rate", "target"), [(1009, 997), (997, 1009), (9000, 97), (97, 500), (7, 500)])
def test_rates_without_a_common_divisor_are_resampled_as_torchaudio_does(noise, rate, target):
    import torch
    import torchaudio

    exact = torchaudio.functional.resample(torch.from_numpy(noise).double(), rate, target).numpy()
    found = resample_by_sample(noise, rate, target)
    assert found.dtype == np.float32 and found.shape == exact.shape
    np.testing.assert_allclose(found, exact, rtol=0, atol=2e-6)


def test_a_rate_for_which_torchaudio_would_need_gigabytes_is_resampled():
    tone = np.sin(np.arange(44101) * 0.05).astype(np.float32)
    found = resample(tone, 44101, 16000)
    assert len(found) == 16000
    expected = np.sin(np.arange(16000) * 44101 / 16000 * 0.05)
    np.testing.assert_allclose(found[100:-100], expected[100:-100], atol=2e-3)


@pytest.mark.parametrize(("rate", "target"), [(1, 16000), (159, 16000), (0, 16000), (-8000, 16000)])
def test_rates_that_no_recording_has_are_refused_before_memory_is_asked_for(rate, target):
    with pytest.raises(DataError, match=f"cannot resample from {rate} Hz"):
        resample(np.zeros(480_000, np.float32), rate, target)


def test_names_too_long_for_the_file_system_are_no_files():
    for name in ("x" * 300 + ".wav", "/x" * 5000, "x" * 300 + ".ark:12"):
        with pytest.raises(DataError, match="no such file"):
            read_audio(name)


def test_an_encoding_that_cannot_be_sought_is_read_whole(tmp_path):
    tone = 0.3 * np.sin(2 * np.pi * 440 * np.arange(3200) / 8000, dtype=np.float32)[None]
    wav, rate = read_audio(write(tmp_path / "telephone.wav", tone, 8000, subtype="GSM610"))
    assert rate == 8000 and wav.shape == (1, 3200) and 0.25 < np.abs(wav).max() < 0.4


def test_samples_without_a_header_and_commands_that_cannot_be_started_are_messages(tmp_path):
    (tmp_path / "a.raw").write_bytes(bytes(3200))
    with pytest.raises(DataError, match="a.raw: no audio that libsndfile reads"):
        read_audio(str(tmp_path / "a.raw"))
    for command in ("cat a.wav #" + "x" * 200_000 + " |", "cat a\0.wav |"):
        with pytest.raises(DataError, match="command cannot be started: cat a"):
            read_audio(command)
