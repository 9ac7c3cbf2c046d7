"""Sound whose header does not say its length, or lies about it: what is there is heard, and what is not wanted takes no memory."""

import io
import logging
import struct
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import soundfile
from conftest import REPO

from espnet2_vllm.audio import Reading, read_audio
from espnet2_vllm.audio.reading import FIRST
from espnet2_vllm.audio.resampling import resample
from espnet2_vllm.errors import DataError

RATE = 16000
SECONDS = 3
TONE = (0.4 * np.sin(2 * np.pi * 300 * np.arange(SECONDS * RATE) / RATE)).astype(np.float32)
QUIET = np.concatenate([TONE, np.zeros(3 * len(TONE), np.float32)])  # what comes first has more bits a second


def packed(wav, container, **options):
    file = io.BytesIO()
    soundfile.write(file, wav.T, RATE, format=container, **options)
    return file.getvalue()


def without_length(flac):
    """As an encoder writes it into a pipe: no number of samples, no checksum."""
    header = int.from_bytes(flac[18:26], "big") & ~(2**36 - 1)
    return flac[:18] + header.to_bytes(8, "big") + bytes(16) + flac[42:]


def declaring(flac, samples):
    header = int.from_bytes(flac[18:26], "big") & ~(2**36 - 1) | samples
    return flac[:18] + header.to_bytes(8, "big") + flac[26:]


def without_count(mp3):
    """Without its first frame, which counts the others."""
    assert b"Xing" in mp3[:200] or b"Info" in mp3[:200]
    return mp3[mp3.index(mp3[:2], 4) :]


def read(tmp_path, data, name="a", **options):
    (tmp_path / name).write_bytes(data)
    return read_audio(str(tmp_path / name), **options)[0]


def test_flac_from_a_pipe(tmp_path, caplog):
    noise = np.random.default_rng(5).integers(-9000, 9000, (2, 70_000)).astype(np.float32) / 32768
    piped = without_length(packed(noise, "FLAC"))
    np.testing.assert_array_equal(read(tmp_path, piped), noise)
    np.testing.assert_array_equal(read_audio(f"cat {tmp_path}/a |")[0], noise)
    assert not caplog.records
    reading = Reading()
    cut = read(tmp_path, piped[: len(piped) // 2], reading=reading)
    assert 20_000 < cut.shape[1] < 50_000
    np.testing.assert_array_equal(cut, noise[:, : cut.shape[1]])
    assert "a: seems to end in the middle" in caplog.text and sum(reading.notes.values()) == 1


def test_mp3_of_variable_rate_without_a_count_of_frames(tmp_path):
    mp3 = packed(QUIET, "MP3", bitrate_mode="VARIABLE", compression_level=0.2)
    for data in (mp3, without_count(mp3)):
        assert abs(read(tmp_path, data).shape[1] - len(QUIET)) < 4 * 1152
    assert abs(read(tmp_path, mp3 + mp3).shape[1] - 2 * len(QUIET)) < 8 * 1152


def test_mp3_with_a_picture_in_its_tag(tmp_path):
    size = 200_000
    tag = b"ID3\x03\0\0" + bytes([size >> 21 & 127, size >> 14 & 127, size >> 7 & 127, size & 127]) + bytes(size)
    mp3 = packed(QUIET, "MP3", bitrate_mode="CONSTANT")
    for data in (mp3, without_count(mp3)):
        assert abs(read(tmp_path, tag + data).shape[1] - len(QUIET)) < 4 * 1152


@pytest.mark.parametrize("lengths", [(0, 0), (36, 0), (2**32 - 1, 0), (2**32 - 1, 2**32 - 1), (0x7FFFF024, 0x7FFFF000)])
def test_wav_whose_recorder_was_killed(tmp_path, lengths):
    data = bytearray(packed(TONE, "WAV"))
    assert data[36:40] == b"data"
    data[4:8], data[40:44] = (struct.pack("<I", length) for length in lengths)
    np.testing.assert_allclose(read(tmp_path, bytes(data))[0], TONE, atol=1e-4)
    data[4:8] = struct.pack("<I", len(data) - 8)
    if not lengths[1]:  # a header that was filled in, of a recording without samples and a chunk behind it
        with pytest.raises(DataError, match="no samples"):
            read(tmp_path, bytes(data))


@pytest.mark.parametrize("length", [0, 2**64 - 1])
def test_rf64_from_a_pipe(tmp_path, length):
    data = bytearray(packed(TONE, "RF64"))
    assert data[:4] == b"RF64" and data[12:16] == b"ds64"
    data[28:36] = length.to_bytes(8, "little")
    np.testing.assert_allclose(read(tmp_path, bytes(data))[0], TONE, atol=1e-4)


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_ogg_that_is_chained_or_cut(tmp_path, subtype, caplog):
    noise = np.random.default_rng(4).uniform(-0.5, 0.5, 6 * RATE)
    one, two = packed(TONE, "OGG", subtype=subtype), packed(noise, "OGG", subtype=subtype)
    alone = [read(tmp_path, data).shape[1] for data in (one, two)]
    assert read(tmp_path, one + two + one).shape[1] == 2 * alone[0] + alone[1]
    assert not caplog.records
    for data in (two[:-3], one + two[: 2 * len(two) // 3], one + two[:20]):
        caplog.clear()
        wav = read(tmp_path, data)
        assert 0 < wav.shape[1] < sum(alone) and "seems to end in the middle" in caplog.text
    other = io.BytesIO()
    soundfile.write(other, TONE, 24000, format="OGG", subtype=subtype)
    with pytest.raises(DataError, match="its parts differ: 16000 Hz"):
        read(tmp_path, one + other.getvalue())


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        (b"\0\0\0 ftypM4A ", "MPEG-4"),
        (b"\x1a\x45\xdf\xa3", "WebM"),
        (b"\xff\xf1\x50\x80", "AAC"),
        (b"#!AMR\n", "AMR"),
    ],
)
def test_what_libsndfile_cannot_read_says_what_to_do(tmp_path, start, kind):
    with pytest.raises(DataError, match=rf"{kind}.*`ffmpeg -i .*/a -f wav - \|`"):
        read(tmp_path, start + bytes(200))


def test_headers_that_declare_more_than_there_is_take_no_memory(tmp_path):
    with pytest.raises(DataError, match="max_audio_samples allows|cut short"):
        read(tmp_path, declaring(packed(TONE, "FLAC"), 2**36 - 1))
    with pytest.raises(DataError, match="cut short"):
        read(tmp_path, declaring(packed(TONE, "FLAC"), 2**26))
    with pytest.raises(DataError, match="no such file"):
        read_audio(f"{tmp_path}/a:" + "9" * 5000)


def test_only_what_is_wanted_is_kept(tmp_path):
    noise = np.random.default_rng(6).integers(-9000, 9000, (3, 900_000)).astype(np.float32) / 32768
    for container in ("WAV", "FLAC"):
        data, reading = packed(noise, container), Reading(channel=FIRST)
        np.testing.assert_array_equal(read(tmp_path, data, reading=reading), noise[:1])
        assert reading.notes == {"recordings of 3 channels, of which the first was taken": 1}
        np.testing.assert_array_equal(read(tmp_path, data, reading=replace(reading, channel=2)), noise[2:])
        found = read(tmp_path, data, reading=Reading(channel=1), span=lambda rate: (7 * rate + 1, 31 * rate))
        np.testing.assert_array_equal(found, noise[1:2, 7 * RATE + 1 : 31 * RATE])
        assert read(tmp_path, data, reading=Reading(enough=1000)).shape == (3, 1000)
        assert read(tmp_path, data, span=lambda rate: (900_000, None)).shape == (3, 0)
        with pytest.raises(
            DataError, match="900000 samples or more .* beyond the 899999 that max_audio_samples allows"
        ):
            read(tmp_path, data, reading=Reading(channel=0, max_audio_samples=899_999))
        with pytest.raises(DataError, match="has no channel 3: it has 3"):
            read(tmp_path, data, reading=Reading(channel=3))


def test_a_small_file_of_many_hours_and_channels_takes_little_memory(tmp_path):
    with soundfile.SoundFile(tmp_path / "bomb.flac", "w", RATE, 8, format="FLAC") as file:
        for _ in range(5 * 60):
            file.write(np.zeros((RATE, 8), np.int16))
    program = f"""
import resource
import numpy, soundfile
from espnet2_vllm.audio import Reading, blocks, read_audio
from espnet2_vllm.errors import DataError
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + 100 * 2**20,) * 2)
path = {str(tmp_path / "bomb.flac")!r}
print(read_audio(path, reading=Reading(channel="first"))[0].shape, read_audio(path, reading=Reading(enough=9))[0].shape)
try:
    read_audio(path, reading=Reading(max_audio_samples=2**20))
except DataError as error:
    print("max_audio_samples" in str(error))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPO, check=False)
    assert done.stdout.split("\n")[:2] == ["(1, 4800000) (8, 9)", "True"], done.stderr[-2000:]


def test_long_recordings_are_resampled_in_pieces_to_the_same_samples(monkeypatch):
    wav = np.random.default_rng(8).standard_normal((2, 50_001)).astype(np.float32)
    for rate, target in ((48000, 16000), (44100, 16000), (8000, 16000)):
        whole = resample(wav, rate, target)
        monkeypatch.setattr("espnet2_vllm.audio.resampling._TOGETHER", 7000)
        np.testing.assert_allclose(resample(wav, rate, target), whole, rtol=0, atol=1e-6)
        monkeypatch.undo()


def test_an_ark_entry_without_a_length_is_not_read_into_the_next(tmp_path):
    flac, wav = without_length(packed(TONE, "FLAC")), bytearray(packed(TONE, "WAV"))
    wav[4:8] = wav[40:44] = b"\xff" * 4
    for data in (flac, bytes(wav)):
        (tmp_path / "x.ark").write_bytes(b"a " + data + b"b " + packed(TONE, "WAV"))
        with pytest.raises(DataError, match=r"x\.ark:2: .* does not say how long it is"):
            read_audio(f"{tmp_path}/x.ark:2")
        assert read_audio(f"{tmp_path}/x.ark:{len(data) + 4}")[0].shape == (1, len(TONE))


def test_any_flipped_byte_is_a_message_or_a_recording(tmp_path, caplog):
    seed = np.random.SeedSequence().entropy % 2**32
    print("seed", seed)
    rng = np.random.default_rng(seed)
    caplog.set_level(logging.ERROR, logger="espnet2_vllm")
    kinds = [packed(TONE[:8000], kind) for kind in ("WAV", "FLAC", "OGG", "MP3", "AU", "AIFF", "NIST", "CAF", "W64")]
    for data in kinds:
        for _ in range(15):
            bad = bytearray(data)
            for place in rng.integers(0, min(len(bad), 400), 3):
                bad[place] = rng.integers(0, 256)
            try:
                assert read(tmp_path, bytes(bad)).dtype == np.float32
            except DataError as error:
                assert str(tmp_path) in str(error)
