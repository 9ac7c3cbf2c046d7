"""The continuous encoder against transformers' own forward pass, whatever is encoded together."""

import random

import numpy as np
import pytest
import torch
from checkpoint_samples import copy_of, take_other_encoder
from conftest import golden_files
from todays_espnet import continuous_audio_io, heard
from transformers import WhisperFeatureExtractor

from espnet2_vllm.audio.tower import AudioTower, _has_flash_attention
from espnet2_vllm.checkpoint import ensure_converted
from espnet2_vllm.errors import CheckpointError, DataError

TOLERANCE = 1e-4  # vectors of this model reach 8
SECONDS = (0.0126, 0.1, 0.3, 0.99, 1.0, 1.01, 2.5, 7.99, 8.0, 8.01, 17.3)


def checkpoint():
    (config,) = golden_files("bagpiper/qwen3-s4-cb32-contaudio/train.yaml")
    return ensure_converted(config.parent)


@pytest.fixture(scope="module")
def tower():
    return AudioTower(checkpoint())


@pytest.fixture(scope="module")
def plain():
    """transformers' own tower with the same weights, which attends window by window."""
    made = AudioTower(checkpoint())
    other = type(made._tower)._from_config(made._tower.config)
    names = {name.replace(".self_attn.", ".self_attn."): value for name, value in made._tower.state_dict().items()}
    other.load_state_dict(names)
    return other.eval()


def clip(rng: random.Random, seconds: float) -> np.ndarray:
    samples = max(round(seconds * 16000), 201)
    return np.random.default_rng(rng.getrandbits(32)).standard_normal(samples).astype(np.float32)


def by_the_extractor(wav: np.ndarray) -> np.ndarray:
    """The call of ESPnet's ``ContinuousAudioIO.preprocess``."""
    folder = checkpoint().path / "continuous_audio" / "preprocessor_config.json"
    found = WhisperFeatureExtractor.from_pretrained(folder)(
        [wav], truncation=False, return_tensors="np", do_normalize=True, max_length=len(wav), return_attention_mask=True,
        sampling_rate=16000,
    )  # fmt: skip
    return found["input_features"][0, :, : len(wav) // 160].T


@pytest.mark.parametrize("seed", range(3))
def test_features_together_are_the_extractors_own(tower, monkeypatch, seed):
    rng = random.Random(seed)
    clips = [clip(rng, rng.choice(SECONDS)) * rng.choice([1e-3, 0.1, 1.0, 30000.0]) for _ in range(9)]
    clips += [clip(rng, 1.3) * np.float32(0.1) + np.float32(0.05), np.zeros(4000, np.float32)]
    if seed:
        monkeypatch.setattr("espnet2_vllm.audio.features._SAMPLES", 40000)
    for wav, found in zip(clips, tower._log_mel(clips), strict=True):
        expected = by_the_extractor(wav)
        assert found.shape == expected.shape
        np.testing.assert_allclose(found.numpy(), expected, atol=1e-4)


@torch.inference_mode()
def by_transformers(tower: AudioTower, plain, clips: list[np.ndarray]) -> list[np.ndarray]:
    features = [by_the_extractor(wav) for wav in clips]
    frames = torch.tensor([len(mel) for mel in features])
    joined = torch.from_numpy(np.concatenate(features).T.copy())
    hidden = plain(joined, feature_lens=frames).last_hidden_state
    vectors = torch.nn.functional.linear(hidden, *tower._adaptor)
    return vectors.split([tower.listening.rows_of_frames(int(n)) for n in frames])


@pytest.mark.parametrize("seed", range(4))
def test_prompts_encoded_together_are_transformers_own(tower, plain, seed):
    """The clips of a prompt as one batch of transformers; prompts side by side do not influence each other."""
    rng = random.Random(seed)
    prompts = [[clip(rng, rng.choice(SECONDS)) for _ in range(rng.randint(1, 3))] for _ in range(5)]
    prompts += [[], [clip(rng, 0.2), clip(rng, 0.1)], [prompts[0][0]]]
    for clips, found in zip(prompts, tower.encode(prompts), strict=True):
        assert len(found) == len(clips)
        for mine, theirs in zip(found, by_transformers(tower, plain, clips) if clips else [], strict=True):
            assert mine.shape == theirs.shape
            assert (mine - theirs).abs().max() < TOLERANCE, seed


@pytest.mark.parametrize("tag", ["Qwen/Qwen3-Omni-30B-A3B-Instruct", "Qwen/Qwen2.5-Omni-7B"])
def test_recordings_of_any_length_are_heard_as_todays_espnet_hears_them(tag, tmp_path, monkeypatch):
    """Whole, one by one and as the clips of one prompt, by ESPnet's own class with the same weights."""
    pytest.importorskip("espnet2.speechlm")
    folder = copy_of("bagpiper", tmp_path, "qwen3-s4-cb32-contaudio")
    if tag.endswith("7B"):  # the default of ESPnet's class
        take_other_encoder(folder)
    io = continuous_audio_io(folder, tag, monkeypatch)
    tower = AudioTower(ensure_converted(folder))
    rng = random.Random(6)
    for seconds in (
        (47.31,),
        (30.01, 0.41),
        (61.3, 2.5, 33.33),
        (0.03, 1.99, 2.0, 2.01, 4.015),
        (0.05,),
        (0.035, 0.045),
    ):
        clips = [clip(rng, length) for length in seconds]
        prepared = [tower.listening.prepare(wav, 16000) for wav in clips]
        ((*found,),) = tower.encode([prepared])
        for mine, theirs in zip(found, heard(io, clips), strict=True):
            expected = torch.nn.functional.linear(theirs, *tower._adaptor)
            assert mine.shape == expected.shape
            assert (mine - expected).abs().max() < TOLERANCE


def test_a_short_clip_depends_on_the_longest_of_its_prompt(tower):
    """As in ESPnet: where frames do not halve evenly, the convolutions see what became of a chunk's padding."""
    rng = random.Random(1)
    short, long = clip(rng, 0.41), clip(rng, 1.5)
    ((alone,), (beside, _)) = tower.encode([[short], [short, long]])
    assert alone.shape == beside.shape
    assert (alone - beside).abs().max() > 1e-2


def test_samples_beyond_all_scale_are_refused_and_not_remembered(tower):
    loud = np.full(4000, 3e38, np.float32) * np.linspace(-1, 1, 4000, dtype=np.float32)
    for _ in range(2):
        with pytest.raises(DataError, match="NaN or infinite values in torch.float32"):
            tower.encode([[loud]])


def test_windows_and_clips_do_not_hear_each_other(tower):
    """A window is 8 s (800 mel frames, 104 rows)."""
    rng = random.Random(2)
    mel = tower.features(clip(rng, 17.0))
    (whole,) = tower.encode_features([torch.from_numpy(mel)], 100)
    changed = mel.copy()
    changed[900:] += 1.0
    (other,) = tower.encode_features([torch.from_numpy(changed)], 100)
    assert torch.allclose(whole[:104], other[:104], atol=1e-5)
    assert (whole[104:208] - other[104:208]).abs().max() > 1e-2


@pytest.mark.parametrize("seconds", [29.99, 30.0, 30.01, 60.0, 600.0])
def test_long_clips_give_the_rows_that_were_promised(tower, seconds):
    (vectors,) = tower.encode_features([torch.zeros(round(seconds * 100), 128)], 100)
    assert len(vectors) == tower.listening.rows(round(seconds * 16000))


def test_a_clip_that_comes_again_has_the_very_same_vectors(tower):
    rng = random.Random(3)
    again, others = clip(rng, 2.2), [clip(rng, 3.1) for _ in range(4)]
    ((first,),) = tower.encode([[again]])
    found = tower.encode([[other] for other in others] + [[again]])
    assert torch.equal(found[-1][0], first)


def test_bfloat16_is_the_models_dtype():
    rng = random.Random(4)
    sound = [[clip(rng, 1.2)]]
    half, full = AudioTower(checkpoint(), dtype="bfloat16"), AudioTower(checkpoint())
    ((a,),), ((b,),) = half.encode(sound), full.encode(sound)
    assert a.dtype == torch.bfloat16
    assert (a.float() - b).abs().max() < 0.05 * b.abs().max()


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "packed"),
    [
        ("cuda", "bfloat16", (9, 0), True),
        ("cuda", "float16", (8, 0), True),
        ("cuda", "float16", (7, 5), False),
        ("cuda", "float32", (9, 0), False),
        ("cuda", "float64", (9, 0), False),
        ("cpu", "bfloat16", (9, 0), False),
    ],
)
def test_windows_are_packed_where_flash_attention_takes_them(device, dtype, capability, packed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert _has_flash_attention(torch.device(device), getattr(torch, dtype)) == packed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_packed_windows_are_as_windows_side_by_side():
    """Flash attention over packed windows, as GPUs do it, against the masked form and against float32."""
    rng = random.Random(5)
    sounds = [[clip(rng, seconds)] for seconds in SECONDS]
    full = AudioTower(checkpoint())
    half = AudioTower(checkpoint(), dtype="bfloat16", device="cuda")
    packed = half.encode(sounds)
    assert half._windows.packed
    half._known.clear()
    place = half._windows.set
    half._windows.set = lambda lengths, device, packed: place(lengths, device, False)
    side_by_side = half.encode(sounds)
    for (found,), (other,), (wanted,) in zip(packed, side_by_side, full.encode(sounds), strict=True):
        assert (found.float() - other.float()).abs().max() < 0.03 * wanted.abs().max()
        assert (found.float() - wanted).abs().max() < 0.05 * wanted.abs().max()


def test_damaged_weights_are_named(tmp_path):
    import dataclasses

    opened = checkpoint()
    facts = {**opened.continuous_audio, "weights": "missing.safetensors"}
    with pytest.raises(CheckpointError, match="missing.safetensors: cannot be loaded"):
        AudioTower(dataclasses.replace(opened, continuous_audio=facts))
