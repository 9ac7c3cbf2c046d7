"""ESPnet's GAN codecs besides DAC: counts, subsets of streams, and the waveforms of ESPnet's own model."""

import dataclasses

import numpy as np
import pytest
import torch
from tiny_codecs import random_codes, write_espnet_codec

from espnet2_vllm.codec import Codec, load_codec

KINDS = ["encodec", "soundstream", "funcodec", "soundstream without lstm"]


@pytest.fixture(params=KINDS)
def described(request, tmp_path):
    return request.param, write_espnet_codec(tmp_path, request.param)


def test_rate_hop_and_codebooks_come_from_the_codec(described):
    _, description = described
    codec = load_codec(description)
    assert isinstance(codec, Codec)
    assert (codec.sample_rate, codec.hop, codec.num_codebooks, codec.codebook_size) == (8000, 8, 4, 16)
    wav = np.random.default_rng(1).normal(0, 0.1, 805).astype(np.float32)
    codes = codec.encode(wav)
    assert codes.shape == (100, 4)
    assert codec.decode(codes).shape == (800,)


def test_waveforms_are_those_of_espnets_model(described):
    name, description = described
    codec = load_codec(description)
    codes = random_codes(codec, 40, seed=2)
    with torch.inference_mode():
        theirs = codec._model.decode(torch.from_numpy(codes.T[:, None]))[0, 0].numpy()
    mine = codec.decode(codes)
    assert len(mine) == 40 * codec.hop
    np.testing.assert_array_equal(mine[: len(theirs)], theirs)
    # An inverse STFT ends in the middle of its last window; only there is ESPnet shorter.
    missing = len(mine) - len(theirs)
    assert missing == (4 if name == "funcodec" else 0)
    assert not mine[len(theirs) :].any()


def test_fewer_codebooks_are_kept_as_asked(described):
    _, description = described
    whole, part = load_codec(description), load_codec(dataclasses.replace(description, num_codebooks=2))
    assert part.num_codebooks == 2
    wav = np.random.default_rng(1).normal(0, 0.1, 400).astype(np.float32)
    np.testing.assert_array_equal(part.encode(wav), whole.encode(wav)[:, :2])
    codes = random_codes(part, 30)
    with torch.inference_mode():
        theirs = whole._model.decode(torch.from_numpy(codes.T[:, None]))[0, 0].numpy()
    np.testing.assert_array_equal(part.decode(codes)[: len(theirs)], theirs)
