"""Descriptions, yaml blocks and the rules around a codec; no torch needed."""

import json

import numpy as np
import pytest

from espnet2_vllm.codec import (
    SILENT_FRAMES,
    Codec,
    CodecDescription,
    check_codec_fits,
    codec_from_discrete_audio,
    codec_from_tokenizer,
    codec_from_yaml,
    decode_speech,
    load_codec,
)
from espnet2_vllm.errors import CheckpointError, ConfigError


class ConstantCodec:
    """Decodes to ones and counts its calls."""

    sample_rate, hop, num_codebooks, codebook_size = 16000, 4, 2, 8

    def __init__(self):
        self.calls = 0

    def encode(self, wav):
        return np.zeros((len(wav) // self.hop, self.num_codebooks), dtype=np.int64)

    def encode_batch(self, wavs):
        return [self.encode(max(wavs, key=len)) for _ in wavs]

    def decode(self, codes):
        self.calls += 1
        return np.ones(len(codes) * self.hop, dtype=np.float32)

    def decode_batch(self, codes):
        return [self.decode(clip) for clip in codes]


def test_description_survives_json():
    description = CodecDescription("espnet", config_path="c.yaml", checkpoint_path="w.pth", sample_rate=16000)
    assert CodecDescription.from_dict(json.loads(json.dumps(description.to_dict()))) == description


def test_description_refuses_unknown_key_and_names_the_nearest():
    with pytest.raises(CheckpointError, match=r"'num_codebook'.*did you mean 'num_codebooks'"):
        CodecDescription.from_dict({"kind": "xcodec", "path": "codec", "num_codebook": 8})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"path": "codec"}, "'kind' is missing"),
        ({"kind": "xcodec"}, "names no files"),
        ({"kind": "", "path": "codec"}, "kind must be"),
        ({"kind": "xcodec", "path": ""}, "path must be a non-empty string"),
        ({"kind": "xcodec", "path": "codec", "num_codebooks": 0}, "num_codebooks must be a positive integer"),
        ({"kind": "xcodec", "path": "codec", "num_codebooks": True}, "num_codebooks must be a positive integer"),
        ({"kind": "xcodec", "path": "codec", "sample_rate": "16000"}, "sample_rate must be a positive integer"),
    ],
)
def test_description_is_validated(values, said):
    with pytest.raises(CheckpointError, match=said):
        CodecDescription.from_dict(values)


def test_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(CheckpointError, match=r"'dac'.*\['espnet', 'xcodec'\]"):
        load_codec(CodecDescription("dac", path="codec"))


DISCRETE_AUDIO = {
    "codec_choice": "Xcodec",
    "codec_hf_model_tag": "hf-audio/xcodec-hubert-general",
    "ssl_choice": None,
    "delay_interleave": True,
    "stream_weights": [0.5, 0.5],
}


def test_yaml_of_bagpiper():
    expected = CodecDescription("xcodec", path="hf-audio/xcodec-hubert-general", num_codebooks=8)
    assert codec_from_yaml(DISCRETE_AUDIO) == codec_from_discrete_audio(DISCRETE_AUDIO) == expected
    kept = codec_from_yaml({**DISCRETE_AUDIO, "codec_max_token_per_frame": 6, "codec_choice": "ESPnet"})
    assert (kept.kind, kept.num_codebooks) == ("espnet", 6)


FILES = {"codec_choice": "ESPnet", "codec_fs": 16000, "config_path": "c/config.yaml", "checkpoint_path": "c/1.pth"}
TAG = {"codec_choice": "ESPnet", "codec_fs": 24000, "hf_model_tag": "ftshijt/espnet_codec_dac_large_v1.4_360epoch"}


def test_yaml_of_opuslm():
    files = CodecDescription("espnet", None, "c/config.yaml", "c/1.pth", num_codebooks=8, sample_rate=16000)
    tag = CodecDescription("espnet", path=TAG["hf_model_tag"], num_codebooks=8, sample_rate=24000)
    ssl = {"ssl_config": {"hf_model_tag": "espnet/xeus"}}
    assert codec_from_yaml({"codec_config": FILES, **ssl}) == codec_from_tokenizer(FILES) == files
    assert codec_from_yaml({"codec_config": TAG}) == codec_from_yaml(TAG) == tag
    # CodecTokenizer looks at the files only where no tag is given.
    assert codec_from_yaml({**FILES, "hf_model_tag": TAG["hf_model_tag"], "codec_fs": 24000}) == tag


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (None, "expected a mapping"),
        ({"codec_config": "x"}, r"here\.codec_config: expected a mapping"),
        ({"codec_config": FILES, "ssl_confg": {}}, r"'ssl_confg'.*did you mean 'ssl_config'"),
        ({**FILES, "codec_fz": 1}, r"'codec_fz'.*did you mean 'codec_fs'"),
        ({**FILES, "codec_choice": "EnCodec"}, r"'EnCodec' is not supported.*\['ESPnet'\]"),
        ({**FILES, "codec_fs": "16k"}, "codec_fs must be a positive integer, got '16k'"),
        ({**FILES, "max_token_per_frame": 0}, "max_token_per_frame must be a positive integer"),
        ({"codec_choice": "ESPnet", "config_path": "c"}, "both config_path and checkpoint_path"),
        ({**TAG, "hf_model_tag": 3}, "hf_model_tag must be a path or a tag, got 3"),
        ({**DISCRETE_AUDIO, "codec_choice": None}, r"codec_choice None.*\['Xcodec', 'ESPnet'\]"),
        ({**DISCRETE_AUDIO, "codec_choice": ["Xcodec"]}, r"codec_choice \['Xcodec'\] is not supported"),
        ({**DISCRETE_AUDIO, "codec_hf_tag": "x"}, r"'codec_hf_tag'.*did you mean 'codec_hf_model_tag'"),
        ({**DISCRETE_AUDIO, "codec_hf_model_tag": None}, "codec_hf_model_tag is missing"),
        ({**DISCRETE_AUDIO, "codec_max_token_per_frame": 2.0}, "codec_max_token_per_frame must be a positive integer"),
    ],
)
def test_yaml_errors_name_place_key_and_remedy(block, said):
    with pytest.raises(ConfigError, match=said) as caught:
        codec_from_yaml(block, where="here")
    assert str(caught.value).startswith("here")


def test_ten_frames_are_silence_eleven_are_not():
    codec = ConstantCodec()
    assert isinstance(codec, Codec)
    silent = decode_speech(codec, np.full((SILENT_FRAMES, 2), -1))
    assert silent.shape == (40,) and silent.dtype == np.float32 and not silent.any() and codec.calls == 0
    assert decode_speech(codec, np.zeros((SILENT_FRAMES + 1, 2), dtype=int)).all() and codec.calls == 1


@pytest.mark.parametrize(("books", "size"), [(3, 8), (2, 16)])
def test_codec_that_does_not_fit_the_layout_is_refused_with_both_numbers(books, size):
    check_codec_fits(ConstantCodec(), 2, 8)
    with pytest.raises(CheckpointError, match=f"gives 2 codebooks of 8 codes.*{books} codebooks of {size}"):
        check_codec_fits(ConstantCodec(), books, size)
