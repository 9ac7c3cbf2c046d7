"""ESPnet's GAN codec against the recordings of AudioCoding and CodecTokenizer."""

import logging
import shutil

import numpy as np
import pytest
import yaml
from conftest import golden_files, golden_models

from espnet2_vllm.codec import SILENT_FRAMES, Codec, CodecDescription, codec_from_yaml, decode_speech, load_codec
from espnet2_vllm.errors import CheckpointError

WAV_TOLERANCE = 1e-5
RECORDED = {path.stem.removeprefix("codec_"): path for path in golden_files("opuslm/functions/codec_*.npz")}
MODELS = [model for model in golden_models("opuslm") if model.name in RECORDED]


def description_of(model_dir):
    decoding = yaml.safe_load((model_dir / "decode_default.yaml").read_text(encoding="utf-8"))
    return codec_from_yaml(decoding["codec_ssl"]["tokenizer"])


@pytest.fixture
def model_dir():
    return MODELS[0]


@pytest.fixture
def codec(model_dir):
    return load_codec(description_of(model_dir), base_dir=model_dir)


@pytest.fixture
def arrays(model_dir):
    return np.load(RECORDED[model_dir.name])


@pytest.fixture
def copy(model_dir, tmp_path):
    """A writable copy of the codec's files, as ``tmp_path/codec``."""
    shutil.copytree(model_dir / "codec", tmp_path / "codec")
    for path in (tmp_path / "codec").iterdir():
        path.chmod(0o644)
    (tmp_path / "codec").chmod(0o755)
    return tmp_path / "codec"


@pytest.mark.parametrize("model_dir", MODELS, ids=lambda path: path.name)
def test_decoding_is_espnets(codec, arrays):
    assert isinstance(codec, Codec)
    lengths = sorted(int(name[1:].partition(".")[0]) for name in arrays if name.endswith(".wav_audio_coding"))
    assert SILENT_FRAMES in lengths and SILENT_FRAMES + 1 in lengths
    for length in lengths:
        codes = arrays[f"T{length}.codes"]
        sound, speech = codec.decode(codes), decode_speech(codec, codes)
        assert sound.shape == speech.shape == (length * codec.hop,)
        np.testing.assert_allclose(sound, arrays[f"T{length}.wav_audio_coding"], rtol=0, atol=WAV_TOLERANCE)
        np.testing.assert_allclose(speech, arrays[f"T{length}.wav_codec_tokenizer"], rtol=0, atol=WAV_TOLERANCE)
        assert speech.any() == (length > SILENT_FRAMES)
    batch = codec.decode_batch(list(arrays["batch2.codes"]))
    np.testing.assert_allclose(np.stack(batch), arrays["batch2.wav"], rtol=0, atol=WAV_TOLERANCE)


@pytest.mark.parametrize("model_dir", MODELS, ids=lambda path: path.name)
def test_encoding_is_espnets(codec, arrays):
    wav, codes = arrays["encode.wav"], arrays["encode.codes"][0]
    np.testing.assert_array_equal(codec.encode(wav), codes)
    np.testing.assert_array_equal(codec.encode_uncut(wav), codes)
    np.testing.assert_allclose(codec.decode(codes), arrays["encode.resynth"], rtol=0, atol=WAV_TOLERANCE)
    # 5000 samples are 15.6 frames: CodecTokenizer leaves the rest to the codec, which makes a sixteenth frame of it.
    np.testing.assert_array_equal(codec.encode_uncut(wav[:5000]), arrays["encode5000.codes"][0])
    np.testing.assert_array_equal(codec.encode(wav[:5000]), codec.encode_uncut(wav[:4800]))


def test_counts_of_frames(codec):
    for samples in (0, 1, codec.hop - 1, codec.hop, 2 * codec.hop + 1):
        silence = np.zeros(samples, dtype=np.float32)
        assert codec.encode(silence).shape == (samples // codec.hop, codec.num_codebooks)
        assert codec.encode_uncut(silence).shape == (-(-samples // codec.hop), codec.num_codebooks)


def test_first_codebooks_only(model_dir, codec, arrays):
    description = CodecDescription("espnet", None, "codec/config.yaml", "codec/360epoch.pth", num_codebooks=3)
    few = load_codec(description, base_dir=model_dir)
    assert few.num_codebooks == 3
    np.testing.assert_array_equal(few.encode(arrays["encode.wav"]), codec.encode(arrays["encode.wav"])[:, :3])
    assert few.decode(arrays["T12.codes"][:, :3]).shape == (12 * few.hop,)


def test_loading_leaves_logging_random_stream_and_threads_alone(model_dir, monkeypatch):
    import torch

    root = logging.getLogger()
    for handlers in (list(root.handlers), []):
        monkeypatch.setattr(root, "handlers", handlers)
        level, state, threads = root.level, torch.get_rng_state(), torch.get_num_threads()
        before = list(handlers)
        load_codec(description_of(model_dir), base_dir=model_dir)
        assert (root.handlers, root.level) == (before, level)
        assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads


def test_a_directory_with_or_without_meta_yaml(copy, codec, arrays):
    codes = arrays["T12.codes"]
    alone = load_codec(CodecDescription("espnet", path="codec"), base_dir=copy.parent)
    np.testing.assert_array_equal(alone.decode(codes), codec.decode(codes))
    (copy / "exp").mkdir()
    (copy / "config.yaml").rename(copy / "exp" / "config.yaml")
    (copy / "360epoch.pth").rename(copy / "exp" / "360epoch.pth")
    meta = {"files": {"model_file": "exp/360epoch.pth"}, "yaml_files": {"train_config": "exp/config.yaml"}}
    (copy / "meta.yaml").write_text(yaml.safe_dump(meta), encoding="utf-8")
    shutil.copy(copy / "exp" / "360epoch.pth", copy / "exp" / "other.pth")
    packed = load_codec(CodecDescription("espnet", path=str(copy)))
    np.testing.assert_array_equal(packed.decode(codes), codec.decode(codes))
    (copy / "meta.yaml").unlink()
    with pytest.raises(CheckpointError, match=r"no meta\.yaml, and 2 files \*\.pth"):
        load_codec(CodecDescription("espnet", path=str(copy)))
    (copy / "meta.yaml").write_text("files: {}", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"expected yaml_files\.train_config"):
        load_codec(CodecDescription("espnet", path=str(copy)))
    meta["files"]["model_file"] = "exp/gone.pth"
    (copy / "meta.yaml").write_text(yaml.safe_dump(meta), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"exp/gone\.pth, named in .*meta\.yaml, is missing"):
        load_codec(CodecDescription("espnet", path=str(copy)))


def test_own_weights_win(copy, codec, arrays):
    import torch

    weights = torch.load(copy / "360epoch.pth", weights_only=True)
    name = next(name for name in weights if name.startswith("codec.generator.decoder") and name.endswith("bias"))
    (copy / "360epoch.pth").unlink()
    description = CodecDescription("espnet", path="codec")
    same = load_codec(description, base_dir=copy.parent, state_dict=weights)
    tuned = load_codec(description, base_dir=copy.parent, state_dict={**weights, name: weights[name] + 0.5})
    codes = arrays["T12.codes"]
    np.testing.assert_array_equal(same.decode(codes), codec.decode(codes))
    assert np.abs(tuned.decode(codes) - same.decode(codes)).max() > 1e-3


def test_snake_alphas_are_ones_where_weights_predate_them_and_otherwise_all_needed(copy, codec, arrays):
    import torch

    weights = torch.load(copy / "360epoch.pth", weights_only=True)
    assert not any(name.endswith(".alpha") for name in weights), "the recorded weights predate the parameter"
    alphas = {n: t for n, t in codec._model.state_dict().items() if n.endswith(".alpha")}
    assert alphas and all((tensor == 1).all() for tensor in alphas.values())
    description = CodecDescription("espnet", path="codec")
    other = {name: tensor * 2 for name, tensor in alphas.items()}
    trained = load_codec(description, base_dir=copy.parent, state_dict={**weights, **other})
    assert np.abs(trained.decode(arrays["T12.codes"]) - codec.decode(arrays["T12.codes"])).max() > 1e-3
    missing = other.popitem()[0]
    with pytest.raises(CheckpointError, match=f"lacks 1 tensors.*{missing}"):
        load_codec(description, base_dir=copy.parent, state_dict={**weights, **other})


def test_files_that_are_missing_damaged_or_foreign(copy):
    def load(config="codec/config.yaml", checkpoint="codec/360epoch.pth"):
        return load_codec(CodecDescription("espnet", None, config, checkpoint), base_dir=copy.parent)

    import torch

    with pytest.raises(
        CheckpointError, match=r"config_path 'no\.yaml' not found: looked for a file at .*/no\.yaml and"
    ):
        load(config="no.yaml")
    with pytest.raises(CheckpointError, match=r"checkpoint_path 'no\.pth' not found"):
        load(checkpoint="no.pth")
    with pytest.raises(CheckpointError, match="comes without weights"):
        load(checkpoint=None)
    with pytest.raises(
        CheckpointError, match=r"hub tag 'nobody/no-dac' in the local cache at .*hf download nobody/no-dac"
    ):
        load_codec(CodecDescription("espnet", path="nobody/no-dac"))

    weights = torch.load(copy / "360epoch.pth", weights_only=True)
    names = sorted(name for name in weights if name.startswith("codec.generator."))
    for change, said in (
        ({names[0]: None}, f"lacks 1 tensors.*{names[0]}"),
        ({"codec.generator.more": weights[names[0]]}, r"has unknown 1 tensors.*codec\.generator\.more"),
        ({names[0]: torch.zeros(2, 3, 5, 7)}, r"has shape \[2, 3, 5, 7\]"),
    ):
        changed = {name: tensor for name, tensor in {**weights, **change}.items() if tensor is not None}
        torch.save({"module": changed}, copy / "changed.pth")
        with pytest.raises(CheckpointError, match=said):
            load(checkpoint="codec/changed.pth")
    torch.save([1], copy / "changed.pth")
    with pytest.raises(CheckpointError, match="expected a mapping of tensors, got list"):
        load(checkpoint="codec/changed.pth")
    (copy / "changed.pth").write_bytes((copy / "360epoch.pth").read_bytes()[:-5000])
    with pytest.raises(CheckpointError, match=r"cannot read codec weights .*changed\.pth"):
        load(checkpoint="codec/changed.pth")

    config = yaml.safe_load((copy / "config.yaml").read_text(encoding="utf-8"))
    config["codec_conf"]["generator_params"]["no_such_option"] = 1
    for text, said in (
        ("a: [", "cannot read"),
        ("encoder: conformer", "not the config.yaml of an ESPnet GAN codec"),
        (yaml.safe_dump(config), "cannot build the codec.*no_such_option"),
    ):
        (copy / "bad.yaml").write_text(text, encoding="utf-8")
        with pytest.raises(CheckpointError, match=said):
            load(config="codec/bad.yaml")
