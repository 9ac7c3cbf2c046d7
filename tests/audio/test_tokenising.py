"""Recordings to units and codes: ESPnet's classes, one clip or many, and what ends up in the arks."""

import argparse
import dataclasses
import pathlib
import subprocess
import sys

import kaldiio
import numpy as np
import pytest
import soundfile
import torch
import yaml
from conftest import REPO, golden_files

from espnet2_vllm import SpeechLM
from espnet2_vllm.audio.tokenising import SpeechTokeniser
from espnet2_vllm.audio.units import SpeechUnits, UnitsDescription
from espnet2_vllm.bin import tokenize_audio
from espnet2_vllm.checkpoint import ensure_converted
from espnet2_vllm.codec import codec_from_yaml, load_codec
from espnet2_vllm.errors import CheckpointError, DataError

pytest.importorskip("espnet2")
LAYER = 2


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A tiny SSL model and its k-means, as the recipe makes them."""
    folder = tmp_path_factory.mktemp("ssl")
    script = REPO / "egs" / "mini_an4" / "speechlm1" / "local" / "make_tiny_ssl.py"
    subprocess.run([sys.executable, str(script), str(folder)], check=True, capture_output=True)
    return UnitsDescription(folder / "config.yaml", folder / "model.pth", folder / "kmeans.npy", LAYER)


@pytest.fixture(scope="module")
def units(files):
    return SpeechUnits(files, clusters=50)


@pytest.fixture(scope="module")
def opuslm():
    (config,) = golden_files("opuslm/tiny-llama/config.yaml")
    return config.parent


@pytest.fixture(scope="module")
def tokeniser(opuslm, units):
    decoding = yaml.safe_load((opuslm / "decode_default.yaml").read_text(encoding="utf-8"))
    codec = load_codec(codec_from_yaml(decoding["codec_ssl"]["tokenizer"]), base_dir=opuslm)
    return SpeechTokeniser(ensure_converted(opuslm).layout, codec, units)


def noise(samples: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(samples) * 0.1).astype(np.float32)


def test_units_are_those_of_espnets_own_classes(units, files):
    from espnet2.tasks.ssl import SSLTask

    config = yaml.safe_load(pathlib.Path(files.config).read_text(encoding="utf-8"))
    model = SSLTask.build_model(argparse.Namespace(**config)).eval()
    model.load_state_dict(torch.load(files.checkpoint, weights_only=True))
    centres = np.load(files.kmeans)
    clips = [noise(9000), noise(16000, 1), noise(9000, 2)]
    for clip, found in zip(clips, units(clips), strict=True):
        with torch.inference_mode():
            lengths = torch.tensor([len(clip)])
            _, layers, _ = model.inference_encode(torch.from_numpy(clip)[None], lengths, use_final_output=False)
        hidden = layers[LAYER][0].numpy().astype(np.float64)
        distances = ((hidden[:, None] - centres[None]) ** 2).sum(-1)
        best = np.sort(distances, axis=1)
        clear = best[:, 1] - best[:, 0] > 1e-4
        assert clear.mean() > 0.9
        np.testing.assert_array_equal(found[clear], distances.argmin(1)[clear])


def test_clips_together_as_alone(units):
    clips = [noise(n, i) for i, n in enumerate((5000, 7000, 5000, 16000, 7000))]
    for clip, together in zip(clips, units(clips), strict=True):
        np.testing.assert_array_equal(units([clip])[0], together)


def test_rows_are_unit_and_codes_of_one_frame(tokeniser, units):
    """Counted from the first unit: 50 of them, then 8 books of 32."""
    (found,) = tokeniser([(noise(16000), 16000)])
    assert found.dtype == np.int32 and found.shape == (49, 9)
    np.testing.assert_array_equal(found[:, 0], units([noise(16000)])[0][:49])
    codes = tokeniser.codec.encode_uncut(noise(16000))
    np.testing.assert_array_equal(found[:, 1:], codes[:49] + 50 + 32 * np.arange(8))


def test_channels_and_rates_are_counted(tokeniser):
    wav = noise(24000)
    (found,) = tokeniser([(np.stack([wav, wav * 0]), 48000)])
    assert found.shape[1] == 9
    assert tokeniser.notes["recordings resampled from 48000 to 16000 Hz"] == 1
    assert tokeniser.notes["recordings of 2 channels, of which the first was taken"] == 1


class Scripted:
    """Units of a given number."""

    def __init__(self, frames):
        self.frames = frames

    def __call__(self, wavs):
        return [np.arange(self.frames) % 50 for _ in wavs]


@pytest.mark.parametrize(("frames", "kept"), [(48, None), (49, 49), (50, 50), (51, 50), (52, None)])
def test_one_frame_more_or_less_is_cut(tokeniser, frames, kept):
    (found,) = SpeechTokeniser(tokeniser.layout, tokeniser.codec, Scripted(frames))([(noise(16000), 16000)])
    if kept is None:
        assert isinstance(found, DataError) and f"{frames} SSL units and 50 frames" in str(found)
    else:
        assert len(found) == kept


def test_too_short_a_clip_fails_alone(tokeniser):
    short, good = tokeniser([(noise(100), 16000), (noise(4000), 16000)])
    assert isinstance(short, DataError) and len(good) == 12


def test_what_does_not_fit(files, tmp_path):
    with pytest.raises(CheckpointError, match="50 centres, but the checkpoint knows 5000"):
        SpeechUnits(files, clusters=5000)
    with pytest.raises(CheckpointError, match="3 layers, there is no layer 18"):
        SpeechUnits(dataclasses.replace(files, layer=18), clusters=50)
    np.save(tmp_path / "other.npy", np.zeros((50, 3)))
    with pytest.raises(CheckpointError, match="centres of 3 values, but layer 2 .* gives 16"):
        SpeechUnits(dataclasses.replace(files, kmeans=tmp_path / "other.npy"), clusters=50)
    (tmp_path / "broken.mdl").write_bytes(b"no pickle")
    with pytest.raises(CheckpointError, match="broken.mdl: holds no k-means"):
        SpeechUnits(dataclasses.replace(files, kmeans=tmp_path / "broken.mdl"), clusters=50)
    weights = torch.load(files.checkpoint, weights_only=True)
    torch.save({k: v for k, v in weights.items() if not k.startswith("encoder.")}, tmp_path / "part.pth")
    with pytest.raises(CheckpointError, match=r"part.pth lacks \d+ tensors"):
        SpeechUnits(dataclasses.replace(files, checkpoint=tmp_path / "part.pth"), clusters=50)
    with pytest.raises(CheckpointError, match="no such file"):
        SpeechUnits(dataclasses.replace(files, config=tmp_path / "none.yaml"), clusters=50)


def test_command_line(tmp_path, files, opuslm, tokeniser, caplog):
    soundfile.write(tmp_path / "a.wav", noise(16000), 16000, subtype="FLOAT")
    soundfile.write(tmp_path / "b.wav", noise(8000, 1), 8000, subtype="FLOAT")
    (tmp_path / "wav.scp").write_text(
        f"a {tmp_path}/a.wav\nb {tmp_path}/b.wav\nc {tmp_path}/none.wav\n", encoding="utf-8"
    )
    (tmp_path / "text").write_text("a words\n", encoding="utf-8")
    words = ["--data-dir", tmp_path, "--output-dir", tmp_path / "out", "--train-config", opuslm, "--inference-config"]
    words += [opuslm / "decode_default.yaml", "--ssl-config", files.config, "--ssl-checkpoint", files.checkpoint]
    words += ["--ssl-kmeans", files.kmeans, "--ssl-layer", LAYER, "--device", "cpu"]
    assert tokenize_audio.main(list(map(str, words))) == 1
    found = kaldiio.load_scp(str(tmp_path / "out" / "wav.scp"))
    assert set(found) == {"a", "b"}
    (expected,) = tokeniser([(noise(16000), 16000)])
    np.testing.assert_array_equal(found["a"].reshape(-1, 9), expected)
    assert found["a"].dtype == np.int32
    assert (tmp_path / "out" / "text").read_text(encoding="utf-8") == "a words\n"
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "1 recordings resampled from 8000 to 16000 Hz" in said and "none.wav: no such file" in said


def test_opuslm_hears_recordings_from_python(tmp_path, files, opuslm, tokeniser, monkeypatch):
    monkeypatch.chdir(opuslm)  # the codec is named from here
    soundfile.write(tmp_path / "a.wav", noise(16000), 16000, subtype="FLOAT")
    (codes,) = tokeniser([(noise(16000), 16000)])
    decoding = yaml.safe_load((opuslm / "decode_default.yaml").read_text(encoding="utf-8"))
    decoding = {"text_bpe": {**decoding["text_bpe"], "maxlen": 20}, "codec_ssl": decoding["codec_ssl"]}
    with SpeechLM.from_pretrained(opuslm, backend="pytorch", units=files) as model:
        answers = [
            model.generate([["user", "audio", content]], decoding)
            for content in (str(tmp_path / "a.wav"), (noise(16000), 16000), codes)
        ]
    assert len({answer.text for answer in answers}) == 1
    rows = [answer.result.utterance.parts[0].rows for answer in answers]
    assert all(np.array_equal(rows[0], other) for other in rows[1:])
    with SpeechLM.from_pretrained(opuslm, backend="pytorch") as model, pytest.raises(DataError, match="tokenize_audio"):
        model.generate([["user", "audio", (noise(16000), 16000)]], decoding)
