"""Xcodec against the recordings of ESPnet's DiscreteAudioIO."""

import json
import shutil

import numpy as np
import pytest
import yaml
from conftest import golden_files, golden_models

from espnet2_vllm.codec import Codec, CodecDescription, codec_from_yaml, load_codec
from espnet2_vllm.errors import CheckpointError, DataError

PREFIX = "multimodal_io_dict.discrete_audio.codec_model."
WAV_TOLERANCE = 2.4e-5  # tests/golden/README.md
MODELS = golden_models("bagpiper")
TWO_CLIPS = golden_files("bagpiper/*/cases/sys_two_audio_in_text_out.json")


def description_of(model_dir):
    train = yaml.safe_load((model_dir / "train.yaml").read_text(encoding="utf-8"))
    return codec_from_yaml(train["multimodal_io"]["discrete_audio"])


def own_weights(model_dir):
    import torch

    module = torch.load(model_dir / "mp_rank_00_model_states.pt", weights_only=True)["module"]
    return {name.removeprefix(PREFIX): tensor for name, tensor in module.items() if name.startswith(PREFIX)}


def recorded(model_dir):
    (path,) = golden_files(f"bagpiper/functions/codec_{model_dir.name}.npz")
    return np.load(path)


@pytest.fixture
def model_dir():
    return MODELS[0]


@pytest.fixture
def codec(model_dir):
    return load_codec(description_of(model_dir), base_dir=model_dir)


@pytest.mark.parametrize("weights", ["codec directory", "checkpoint"])
@pytest.mark.parametrize("model_dir", MODELS, ids=lambda path: path.name)
def test_codes_and_waveforms_are_espnets(model_dir, weights):
    arrays = recorded(model_dir)
    state_dict = own_weights(model_dir) if weights == "checkpoint" else None
    codec = load_codec(description_of(model_dir), base_dir=model_dir, state_dict=state_dict)
    assert isinstance(codec, Codec)
    clips = sorted(name[3:] for name in arrays if name.startswith("wav"))
    assert clips
    for clip in clips:
        wav, codes = arrays[f"wav{clip}"][0], arrays[f"codec_codes{clip}"]
        assert codes.shape == (len(wav) // codec.hop, codec.num_codebooks)
        np.testing.assert_array_equal(codec.encode(wav), codes)
        decoded = codec.decode(codes)
        assert decoded.dtype == np.float32
        np.testing.assert_allclose(decoded, arrays[f"decoded{clip}"], rtol=0, atol=WAV_TOLERANCE)


@pytest.mark.parametrize("case", TWO_CLIPS, ids=lambda path: path.parent.parent.name)
def test_clips_of_one_prompt_are_encoded_as_one_padded_batch(case):
    """Codes, delay and cut give the rows that ESPnet prefilled."""
    model_dir = case.parent.parent
    arrays = np.load(case.with_suffix(".npz"))
    contents = [
        content
        for _, modality, content in json.loads(case.read_text(encoding="utf-8"))["messages"]
        if modality == "audio"
    ]
    wavs = [arrays[content["npz_key"]][0] for content in contents]
    codec = load_codec(description_of(model_dir), base_dir=model_dir)
    books, size = codec.num_codebooks, codec.codebook_size
    together = codec.encode_batch(wavs)
    assert {len(codes) for codes in together} == {max(map(len, wavs)) // codec.hop}
    longest = int(np.argmax([len(wav) for wav in wavs]))
    np.testing.assert_array_equal(together[longest], codec.encode(wavs[longest]))

    prefill = arrays["prefill_ids"]
    audio_rows = prefill[(prefill[:, 1:] != 0).all(axis=1)]
    first_pad = audio_rows[0, 1] - (size + 1)
    pads = first_pad + np.arange(books) * (size + 1)
    expected = []
    for wav, codes in zip(wavs, together, strict=True):
        rows = np.tile(pads, (len(codes) + books - 1, 1))
        for stream in range(books):
            rows[stream : stream + len(codes), stream] += codes[:, stream] + 1
        expected.append(rows[: len(wav) // codec.hop + books - 1])
    np.testing.assert_array_equal(audio_rows, np.concatenate(expected))


def test_counts_of_frames(codec):
    for samples in (0, 1, codec.hop - 1, codec.hop, 2 * codec.hop + 1):
        codes = codec.encode(np.zeros(samples, dtype=np.float32))
        assert codes.shape == (samples // codec.hop, codec.num_codebooks) and codes.dtype == np.int64
    assert codec.encode_batch([]) == []


def test_decode_batch_is_decode_one_by_one(codec):
    seed = 20240611
    print("seed", seed)
    rng = np.random.default_rng(seed)
    clips = [rng.integers(0, codec.codebook_size, (frames, codec.num_codebooks)) for frames in (7, 0, 1, 7, 30, 1)]
    for together, clip in zip(codec.decode_batch(clips), clips, strict=True):
        assert together.shape == (len(clip) * codec.hop,)
        np.testing.assert_allclose(together, codec.decode(clip), rtol=0, atol=WAV_TOLERANCE)


def test_samples_and_codes_that_cannot_be_used(codec):
    good = np.zeros(codec.hop, dtype=np.float32)
    with pytest.raises(DataError, match="int16"):
        codec.encode(good.astype(np.int16))
    with pytest.raises(DataError, match=r"\(1, 320\)"):
        codec.encode(good[None])
    with pytest.raises(DataError, match="1 that are NaN"):
        codec.encode(np.where(np.arange(codec.hop) == 5, np.nan, good))
    codes = np.zeros((4, codec.num_codebooks), dtype=np.int64)
    codes[2, 1] = codec.codebook_size
    with pytest.raises(DataError, match=rf"code {codec.codebook_size} at frame 2, codebook 1"):
        codec.decode(codes)
    codes[2, 1] = -1
    with pytest.raises(DataError, match="code -1 at frame 2"):
        codec.decode_batch([codes[:1], codes])
    with pytest.raises(DataError, match="integers of shape"):
        codec.decode(np.zeros((4, codec.num_codebooks + 1), dtype=np.int64))
    with pytest.raises(DataError, match="float32"):
        codec.decode(np.zeros((4, codec.num_codebooks), dtype=np.float32))


def test_checkpoints_own_weights_win_and_need_only_the_configuration(model_dir, tmp_path):
    weights = own_weights(model_dir)
    (tmp_path / "codec").mkdir()
    shutil.copy(model_dir / "codec" / "config.json", tmp_path / "codec")
    weights["fc2.bias"] = weights["fc2.bias"] + 1.0
    tuned = load_codec(CodecDescription("xcodec", path="codec"), base_dir=tmp_path, state_dict=weights)
    released = load_codec(CodecDescription("xcodec", path="codec"), base_dir=model_dir)
    codes = np.zeros((12, tuned.num_codebooks), dtype=np.int64)
    assert np.abs(tuned.decode(codes) - released.decode(codes)).max() > 1e-3
    with pytest.raises(CheckpointError, match="cannot load codec weights"):
        load_codec(CodecDescription("xcodec", path="codec"), base_dir=tmp_path)


def test_tensors_must_be_complete_and_known(model_dir):
    description, weights = description_of(model_dir), own_weights(model_dir)
    short = {name: tensor for name, tensor in weights.items() if name != "fc.weight"}
    with pytest.raises(CheckpointError, match=r"own codec weights lacks 1 tensors.*fc\.weight"):
        load_codec(description, base_dir=model_dir, state_dict=short)
    with pytest.raises(CheckpointError, match=r"has unknown 1 tensors.*fc9\.weight"):
        load_codec(description, base_dir=model_dir, state_dict={**weights, "fc9.weight": weights["fc.weight"]})
    with pytest.raises(CheckpointError, match="own codec weights"):
        load_codec(description, base_dir=model_dir, state_dict={**weights, "fc.weight": weights["fc.weight"][:3]})


def test_files_that_are_missing_damaged_or_foreign(model_dir, tmp_path):
    with pytest.raises(CheckpointError, match=f"{tmp_path}/codec and .*hf download codec"):
        load_codec(CodecDescription("xcodec", path="codec"), base_dir=tmp_path)
    with pytest.raises(CheckpointError, match=r"hub tag 'nobody/no-codec' in the local cache at .*hf download"):
        load_codec(CodecDescription("xcodec", path="nobody/no-codec"))
    with pytest.raises(CheckpointError, match="/no/such/codec' not found: looked for a directory at /no/such/codec$"):
        load_codec(CodecDescription("xcodec", path="/no/such/codec"))
    with pytest.raises(CheckpointError, match="described by path alone"):
        load_codec(CodecDescription("xcodec", config_path="a", checkpoint_path="b"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty has no config\.json"):
        load_codec(CodecDescription("xcodec", path="empty"), base_dir=tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(model_dir / "codec", copy)
    weights = copy / "model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="cannot load codec weights from Xcodec directory"):
        load_codec(CodecDescription("xcodec", path="copy"), base_dir=tmp_path)
    config = copy / "config.json"
    config.chmod(0o644)
    config.write_text(json.dumps({"model_type": "dac"}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="'dac'"):
        load_codec(CodecDescription("xcodec", path="copy"), base_dir=tmp_path)
    config.write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json"):
        load_codec(CodecDescription("xcodec", path="copy"), base_dir=tmp_path)


def test_sample_rate_of_the_yaml_is_verified(model_dir):
    load_codec(CodecDescription("xcodec", path="codec", sample_rate=16000), base_dir=model_dir)
    with pytest.raises(CheckpointError, match="runs at 16000 Hz.*states 24000 Hz"):
        load_codec(CodecDescription("xcodec", path="codec", sample_rate=24000), base_dir=model_dir)


def test_bandwidth_is_the_nearest_target():
    from types import SimpleNamespace

    from espnet2_vllm.codec.xcodec import nearest_bandwidth

    released = SimpleNamespace(codebook_size=1024, frame_rate=50, target_bandwidths=[0.5, 1, 1.5, 2, 4])
    assert [nearest_bandwidth(released, books) for books in range(1, 9)] == [0.5, 1, 1.5, 2, 2, 2, 4, 4]


def test_encoding_more_codebooks_than_the_nearest_bandwidth_has_is_refused(model_dir, tmp_path):
    """Targets of one and of all codebooks: two are nearer to the former, where ESPnet fails on the shape."""
    copy = tmp_path / "codec"
    shutil.copytree(model_dir / "codec", copy)
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    targets = config["target_bandwidths"]
    (copy / "config.json").chmod(0o644)
    (copy / "config.json").write_text(json.dumps({**config, "target_bandwidths": [targets[0], targets[-1]]}), "utf-8")
    codec = load_codec(CodecDescription("xcodec", path="codec", num_codebooks=2), base_dir=tmp_path)
    with pytest.raises(CheckpointError, match="encodes 1 codebooks at .* nearest to 2 codebooks"):
        codec.encode(np.zeros(codec.hop * 4, dtype=np.float32))
    codec.decode(np.zeros((4, 2), dtype=np.int64))


def test_loading_leaves_random_stream_and_threads_alone(model_dir):
    import torch

    state, threads = torch.get_rng_state(), torch.get_num_threads()
    load_codec(description_of(model_dir), base_dir=model_dir)
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads


def test_half_precision_weights_of_a_checkpoint_are_used_in_float32(model_dir):
    import torch

    halved = {n: t.to(torch.bfloat16) if t.is_floating_point() else t for n, t in own_weights(model_dir).items()}
    widened = {n: t.float() if t.is_floating_point() else t for n, t in halved.items()}
    codes = np.zeros((12, 4), dtype=np.int64)
    wavs = [
        load_codec(CodecDescription("xcodec", "codec", num_codebooks=4), base_dir=model_dir, state_dict=w).decode(codes)
        for w in (halved, widened)
    ]
    np.testing.assert_array_equal(*wavs)
