"""Prompts against ESPnet's preprocessor, before and after its codec."""

import functools
import json

import numpy as np
import pytest
import soundfile
from conftest import golden_files, golden_models
from golden_layouts import QWEN3_OMNI, bagpiper_model_layout

from espnet2_vllm.codec import CodecDescription, load_codec
from espnet2_vllm.errors import DataError
from espnet2_vllm.layout import Layout
from espnet2_vllm.plan import Given, Wanted
from espnet2_vllm.prompt.bagpiper import bagpiper_prompt, bagpiper_utterance, codec_encoder
from espnet2_vllm.text import TextTokenizer

MODELS = golden_models("bagpiper")
HOP = 320


@functools.cache
def tokenizer_of(model):
    return TextTokenizer(model / "backbone")


@functools.cache
def encoder_of(model):
    layout = bagpiper_model_layout(model)
    description = CodecDescription("xcodec", path="codec", num_codebooks=layout.num_streams)
    return codec_encoder(layout, load_codec(description, base_dir=model))


def placeholders(layout: Layout):
    """Rows of pads, as many as the codec would give: what ESPnet's preprocessor leaves for it."""

    def encode(clips):
        return [
            np.zeros((wav.shape[-1] // HOP + layout.num_streams - 1, layout.num_streams), np.int32) for wav, _ in clips
        ]

    return encode


def with_audio(messages, arrays) -> list:
    return [
        [role, modality, (arrays[content["npz_key"]], content["sample_rate"]) if modality == "audio" else content]
        for role, modality, content in messages
    ]


def is_continuous(model) -> bool:
    return model.name.endswith("contaudio")


def options_of(model) -> dict:
    return {"listening": QWEN3_OMNI if is_continuous(model) else None}


@pytest.mark.parametrize("model", MODELS, ids=lambda p: p.name)
def test_prompts_are_espnets(model):
    layout, tokenizer = bagpiper_model_layout(model), tokenizer_of(model)
    (path,) = golden_files(f"bagpiper/functions/preprocess_{model.name}.json")
    conversations = json.loads(path.read_text(encoding="utf-8"))["conversations"]
    assert len(conversations) > 20
    with np.load(path.with_suffix(".npz")) as arrays:
        for case in conversations:
            messages, upto = with_audio(case["messages"], arrays), case["layout"] == "inference"
            build = functools.partial(
                bagpiper_prompt, layout, tokenizer, messages, upto_assistant=upto, **options_of(model)
            )
            given = build(encode_audio=placeholders(layout))
            rows = given.rows
            places = [p for p in case["continuous"] if p["io"] == "continuous_audio"]
            assert [(p.start, p.count) for p in given.continuous] == [(p["start"], p["length"]) for p in places]
            assert rows.dtype == np.int32 and len(rows) == case["find_length"]
            np.testing.assert_array_equal(rows, arrays[f"{case['key']}_ids"], err_msg=case["key"])


@pytest.mark.parametrize("model", MODELS, ids=lambda p: p.name)
def test_encoded_prompts_are_espnets(model):
    layout, tokenizer = bagpiper_model_layout(model), tokenizer_of(model)
    (path,) = golden_files(f"bagpiper/functions/preprocess_{model.name}.json")
    conversations = {
        c["conversation"]: c["messages"] for c in json.loads(path.read_text(encoding="utf-8"))["conversations"]
    }
    checked = 0
    with np.load(path.with_suffix(".npz")) as arrays:
        for key in arrays:
            if not (key.startswith("encoded_train_") and key.endswith("_ids")):
                continue
            messages = with_audio(conversations[key.removeprefix("encoded_train_").removesuffix("_ids")], arrays)
            rows = bagpiper_prompt(
                layout, tokenizer, messages, encode_audio=encoder_of(model), upto_assistant=False, **options_of(model)
            ).rows
            np.testing.assert_array_equal(rows, arrays[key], err_msg=key)
            checked += 1
    assert checked


@pytest.mark.parametrize(
    ("model", "path"),
    [
        pytest.param(model, path, id=f"{model.name}-{path.stem}")
        for model in MODELS
        for path in golden_files(f"bagpiper/{model.name}/cases/*.json")
    ],
)
def test_prompts_of_the_cases(model, path):
    case = json.loads(path.read_text(encoding="utf-8"))
    layout, upto = bagpiper_model_layout(model), case.get("prompt_layout", "inference") == "inference"
    with np.load(path.with_suffix(".npz")) as arrays:
        messages = with_audio(case["messages"], arrays)
        build = functools.partial(
            bagpiper_utterance,
            layout,
            tokenizer_of(model),
            messages,
            key="k",
            encode_audio=encoder_of(model) if any(m[1] == "audio" for m in messages) else None,
            upto_assistant=upto,
            **options_of(model),
        )
        given, wanted = build().parts
        assert isinstance(given, Given) and isinstance(wanted, Wanted)
        np.testing.assert_array_equal(given.rows, arrays["prefill_ids"])
        assert wanted.header.tolist() == [[layout.specials["assistant"]] + [0] * (layout.num_streams - 1)]
        if "fed_ids" in arrays:
            joined = np.concatenate([given.rows, wanted.header])
            np.testing.assert_array_equal(joined, arrays["fed_ids"][: len(joined)])


# -- errors and corners ------------------------------------------------------------------------------------------------
LAYOUT = Layout.bagpiper(200, [9] * 3)


class Letters:
    """A letter a token; ``a`` is 0."""

    def encode_bagpiper(self, text):
        return [ord(c) - ord("a") for c in text]


def test_token_zero_becomes_the_pad():
    rows = bagpiper_prompt(LAYOUT, Letters(), [["user", "text", "abac"]]).rows
    names = [LAYOUT.specials[n] for n in ("bos", "user", "text")]
    assert rows[:, 0].tolist() == [*names, 0, 257, 0, 258, LAYOUT.specials["eos"]]
    assert (rows[:, 1:] == 0).all()


def test_turns_end_with_eot_before_the_same_role():
    messages = [["system", "text", "b"], ["user", "text", "b"], ["user", "text", "b"], ["assistant", "text", "b"]]
    rows = bagpiper_prompt(LAYOUT, Letters(), messages).rows
    assert rows[[4, 8, 12], 0].tolist() == [LAYOUT.specials[n] for n in ("eos", "eot", "eos")] and len(rows) == 13
    assert bagpiper_prompt(LAYOUT, Letters(), messages[3:]).rows[:, 0].tolist() == [LAYOUT.specials["bos"]]
    assert len(bagpiper_prompt(LAYOUT, Letters(), messages, upto_assistant=False).rows) == 17


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "no messages"),
        ([["user", "text"]], r"message 0 is \['user', 'text'\], expected \[role, modality, content\]"),
        (["hi!"], "message 0 is 'hi!'"),
        ([3], "message 0 is 3"),
        ([["user", "text", "b"], ["tool", "text", "b"]], "message 1: role 'tool' is unknown"),
        ([["user", "image", "x.png"]], "message 0: modality 'image' cannot be prompted"),
        ([["user", "text", None]], "message 0: a text must be a string, got NoneType"),
        ([["user", "audio", 3]], "message 0: audio must be a path"),
        ([["user", "audio", "nowhere.wav"]], "nowhere.wav: no such file"),
    ],
)
def test_messages_that_cannot_be_prompted(messages, message):
    with pytest.raises(DataError, match=message):
        bagpiper_prompt(LAYOUT, Letters(), messages, encode_audio=placeholders(LAYOUT))


def test_audio_needs_a_codec():
    with pytest.raises(DataError, match="message 0 is audio, but the checkpoint has no codec"):
        bagpiper_prompt(LAYOUT, Letters(), [["user", "audio", (np.zeros(999, np.float32), 16000)]])


class Counting:
    """A codec that encodes each frame to its number."""

    sample_rate, hop, num_codebooks, codebook_size = 8000, 100, 3, 8

    def encode_batch(self, wavs):
        frames = max(map(len, wavs)) // self.hop
        return [np.tile(np.arange(frames)[:, None] % 8, (1, 3)) for _ in wavs]


def test_clips_of_one_prompt_are_encoded_together():
    encode = codec_encoder(LAYOUT, Counting())
    stereo = np.zeros((2, 450), np.float32)
    short, long = encode([(np.zeros(250, np.float32), 8000), (stereo, 8000)])
    assert (len(short), len(long)) == (2 + 2, 4 + 2)
    np.testing.assert_array_equal(short, long[:4])
    (alone,) = encode([(np.zeros(250, np.float32), 8000)])
    assert len(alone) == 4 and (alone != short).any()
    (half,) = encode([(np.zeros(500, np.float32), 16000)])
    assert len(half) == 2 + 2
    with pytest.raises(DataError, match="99 samples at 8000 Hz, but the codec needs 100"):
        encode([(np.zeros(99, np.float32), 8000), (stereo, 8000)])


def test_recordings_are_found_from_the_working_directory_first(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, samples in ((here, 300), (there, 500)):
        folder.mkdir()
        soundfile.write(folder / "x.wav", np.zeros(samples), 8000)
    soundfile.write(there / "y.wav", np.zeros(700), 8000)
    monkeypatch.chdir(here)
    for name, frames in (("x.wav", 3), ("y.wav", 7), (str(there / "x.wav"), 5)):
        rows = bagpiper_prompt(
            LAYOUT,
            Letters(),
            [["user", "audio", name]],
            encode_audio=codec_encoder(LAYOUT, Counting()),
            base_dir=there,
        ).rows
        assert len(rows) == 1 + 2 + frames + 2 + 1
