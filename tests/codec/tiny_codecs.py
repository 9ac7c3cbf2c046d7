"""Tiny codecs of every kind with random weights: the recorded ones, and ESPnet's other GAN codecs."""

import functools
import pathlib
import tempfile

import numpy as np
import torch
import yaml
from conftest import golden_models

from espnet2_vllm.codec import CodecDescription, codec_from_yaml, load_codec

_GENERATOR = {
    "hidden_dim": 8,
    "encdec_n_filters": 2,
    "encdec_n_residual_layers": 2,
    "encdec_ratios": [4, 2],
    "quantizer_n_q": 4,
    "quantizer_bins": 16,
    "quantizer_target_bandwidth": [8, 16],
}
# ESPnet's default discriminators do not all fit their own classes.
_STFT = {"filters": 2, "norm": "weight_norm", "n_ffts": [64], "hop_lengths": [16], "win_lengths": [64]}
_DISCRIMINATOR = {"encodec": {"discriminator_params": {"msstft_discriminator_params": _STFT}}}
_KINDS = {
    "encodec": {},
    "soundstream": {},
    "funcodec": {
        "encdec_channels": 3,
        "encdec_ratios": [[4, 1], [4, 2]],
        "codec_domain": ["mag_phase", "mag_phase"],
        "domain_conf": {"n_fft": 32, "hop_length": 4},
    },
    "soundstream without lstm": {"encdec_lstm": 0},
}
RECORDED = {"dac": "opuslm", "xcodec": "bagpiper"}
NAMES = (*RECORDED, *_KINDS)


@functools.cache
def recorded(kind):
    """``dac`` (with an LSTM) or ``xcodec``."""
    model = golden_models(RECORDED[kind])[0]
    if kind == "dac":
        block = yaml.safe_load((model / "decode_default.yaml").read_text(encoding="utf-8"))["codec_ssl"]["tokenizer"]
    else:
        block = yaml.safe_load((model / "train.yaml").read_text(encoding="utf-8"))["multimodal_io"]["discrete_audio"]
    return load_codec(codec_from_yaml(block), base_dir=model)


def write_espnet_codec(directory, name, seed=11):
    """Files of an ESPnet GAN codec of this kind with random weights; the description that names them."""
    from espnet2.tasks.gan_codec import GANCodecTask, codec_choices

    kind = name.split()[0]
    conf = {"sampling_rate": 8000, "generator_params": {**_GENERATOR, **_KINDS[name]}, **_DISCRIMINATOR.get(kind, {})}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        generator = codec_choices.get_class(kind)(**conf).generator
        weights = {f"codec.generator.{key}": value.clone() for key, value in generator.state_dict().items()}
        for key, value in weights.items():
            if key.endswith("embed"):
                value.normal_()
    directory.mkdir(parents=True, exist_ok=True)
    config, checkpoint = directory / "config.yaml", directory / "model.pth"
    arguments = {**GANCodecTask.get_default_config(), "codec": kind, "codec_conf": conf}
    config.write_text(yaml.safe_dump(arguments), encoding="utf-8")
    torch.save(weights, checkpoint)
    return CodecDescription("espnet", config_path=str(config), checkpoint_path=str(checkpoint))


_loaded = {}


def tiny_codec(name):
    """Each is made once."""
    if name in RECORDED:
        return recorded(name)
    if name not in _loaded:
        with tempfile.TemporaryDirectory() as folder:
            _loaded[name] = load_codec(write_espnet_codec(pathlib.Path(folder), name))
    return _loaded[name]


def random_codes(codec, frames, seed=0):
    return np.random.default_rng(seed).integers(0, codec.codebook_size, (frames, codec.num_codebooks))
