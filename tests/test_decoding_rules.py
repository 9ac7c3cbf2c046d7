"""What decoding settings are refused, and what the messages say."""

import copy
import random

import pytest
from decoding_samples import BAGPIPER, CHAT, FAMILIES, FLAT, changed, without

from espnet2_vllm.decoding import load_decoding
from espnet2_vllm.errors import ConfigError

NOT_A_NUMBER = ["3", "three", True, False, None, [1], {}, float("nan"), float("inf"), -float("inf"), -1, 10**400]
NOT_WHOLE = [*NOT_A_NUMBER, 2.0, 1.5]
BAD = [
    ("bagpiper", BAGPIPER, "audio.cfg", [*NOT_A_NUMBER, 1001]),
    ("bagpiper", BAGPIPER, "audio.temperature", [*NOT_A_NUMBER, 1e-9, 1e6]),
    ("bagpiper", BAGPIPER, "text.topk", [*NOT_WHOLE, 0]),
    ("bagpiper", BAGPIPER, "text.max_step", [*NOT_WHOLE, 0]),
    ("bagpiper", BAGPIPER, "audio.min_step", NOT_WHOLE),
    ("bagpiper", BAGPIPER, "audio.num_hypo", [*NOT_WHOLE, 0]),
    ("bagpiper", BAGPIPER, "num_hypo", [*NOT_WHOLE, 0]),
    ("bagpiper", BAGPIPER, "dtype", [None, "int8", "BFloat16", 16, True]),
    ("bagpiper", BAGPIPER, "enforce_modality", [None, "audio", "text", {}, ["speech"], [None], [["text"]], [1], 3]),
    ("bagpiper", BAGPIPER, "audio", [None, [], "x", 3]),
    ("opuslm", CHAT, "codec_ssl.topk", [*NOT_WHOLE, 0]),
    ("opuslm", CHAT, "codec_ssl.sampling_temperature", [*NOT_A_NUMBER, 0, 0.0]),
    ("opuslm", CHAT, "text_bpe.maxlen", [*NOT_WHOLE, 0]),
    ("opuslm", CHAT, "text_bpe.minlen", [*NOT_WHOLE, 513]),
    ("opuslm", CHAT, "codec_ssl.search_algo", [None, "beam_search", "sampling", 1, [], {}]),
    ("opuslm", CHAT, "codec_ssl.length_method", [None, "fixed", 3]),
    ("opuslm", CHAT, "codec_ssl.tokenizer", [None, "ESPnet", [1], 3]),
    ("opuslm", CHAT, "codec_ssl", [None, [], 3]),
    ("opuslm", CHAT, "nproc", [*NOT_WHOLE, 0]),
    ("opuslm", CHAT, "nbest", [v for v in [*NOT_WHOLE, 0] if v is not None]),
    ("opuslm", CHAT, "seed", [*NOT_WHOLE, 2**32]),
    ("opuslm", CHAT, "inference_last_segment", [None, 0, 1, "true", "false"]),
    ("opuslm", FLAT, "top_k", [*NOT_WHOLE, 0]),
    ("opuslm", FLAT, "sampling_temperature", [*NOT_A_NUMBER, 0]),
    ("opuslm", FLAT, "minlenratio", [*NOT_A_NUMBER, 11]),
    ("opuslm", FLAT, "maxlenratio", NOT_A_NUMBER),
    ("opuslm", FLAT, "codec_conf", [None, "x", []]),
    ("opuslm", FLAT, "top_p", [*NOT_A_NUMBER, 1.5]),
    ("opuslm", CHAT, "codec_ssl.top_p", [*NOT_A_NUMBER, 1.5]),
    ("opuslm", FLAT, "fixed_length", ["true", 1, 0, None]),
    ("opuslm", FLAT, "run_asr", [True]),
    ("opuslm", FLAT, "search_algo", ["beam_search", None]),
]


@pytest.mark.parametrize(("family", "base", "path", "values"), BAD, ids=lambda v: v if isinstance(v, str) else "")
def test_bad_values_are_refused_by_key(family, base, path, values):
    for value in values:
        with pytest.raises(ConfigError) as caught:
            load_decoding(changed(base, path, value), family)
        assert str(caught.value).startswith(f"<dict>: {path}: "), (value, str(caught.value))
        assert len(str(caught.value)) < 400


def test_messages_say_how_to_write_it():
    cases = [
        ("audio.cfg", "3", "is the text '3'; expected a number from 0 to 1000; write 3 without quotes"),
        ("audio.temperature", "1e-3", "takes an exponent without '.' and sign for text, write 0.001 without quotes"),
        ("audio.max_step", "2e3", "write 2000 without quotes"),
        ("text.topk", 0, "is 0; expected a whole number from 1 to"),
        ("audio.temperature", -0.5, "is -0.5; expected a number from 0 to"),
        ("audio.cfg", float("nan"), "is nan; expected a number"),
        ("audio.cfg", True, "is true; expected a number"),
        ("enforce_modality", None, "is null; expected a list such as [text, audio]"),
        ("enforce_modality", ["text", "speech"], "has 'speech' as entry 2; expected one of text, audio, image"),
    ]
    for path, value, words in cases:
        with pytest.raises(ConfigError) as caught:
            load_decoding(changed(BAGPIPER, path, value), "bagpiper")
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("family", "base", "path", "nearest"),
    [
        ("bagpiper", BAGPIPER, "audio.topkk", "topk"),
        ("bagpiper", BAGPIPER, "text.maxstep", "max_step"),
        ("bagpiper", BAGPIPER, "text.TEMPERATURE", "temperature"),
        ("bagpiper", BAGPIPER, "enforce_modalities", "enforce_modality"),
        ("bagpiper", BAGPIPER, "Audio", "audio"),
        ("opuslm", CHAT, "codec_ssl.temperature", "sampling_temperature"),
        ("opuslm", CHAT, "text_bpe.max_len", "maxlen"),
        ("opuslm", CHAT, "codec_sssl", "codec_ssl"),
        ("opuslm", FLAT, "topk", "top_k"),
        ("opuslm", FLAT, "max_lenratio", "maxlenratio"),
    ],
)
def test_an_unknown_key_names_the_nearest(family, base, path, nearest):
    with pytest.raises(ConfigError) as caught:
        load_decoding(changed(base, path, 1), family)
    assert f"<dict>: {path}: unknown key; did you mean '{nearest}'? valid keys: " in str(caught.value)
    assert caught.value.exit_code == 2


def test_every_misspelt_key_is_refused_and_its_own_name_offered():
    seed = 20261129
    print(f"seed {seed}")
    rng = random.Random(seed)
    for family, base in FAMILIES:
        paths = [
            (*p, k) for p, b in [((), base), *(((n,), v) for n, v in base.items() if isinstance(v, dict))] for k in b
        ]
        for path in (p for p in paths for _ in range(5)):
            name = path[-1]
            place = rng.randrange(len(name))
            wrong = name[:place] + rng.choice("QZ0") + name[place + 1 :]
            config = copy.deepcopy(base)
            block = config
            for part in path[:-1]:
                block = block[part]
            block[wrong] = block.pop(name)
            with pytest.raises(ConfigError) as caught:
                load_decoding(config, family)
            assert ".".join((*path[:-1], wrong)) in str(caught.value)
            if len(name) > 4:
                assert f"did you mean '{name}'" in str(caught.value)


@pytest.mark.parametrize("family_base_path", [
    ("bagpiper", BAGPIPER, "audio.topk"),
    ("bagpiper", BAGPIPER, "text.topk"),
    ("bagpiper", BAGPIPER, "text.temperature"),
    ("bagpiper", BAGPIPER, "text.max_step"),
    ("opuslm", CHAT, "codec_ssl.search_algo"),
    ("opuslm", CHAT, "codec_ssl.topk"),
    ("opuslm", CHAT, "codec_ssl.sampling_temperature"),
    ("opuslm", CHAT, "codec_ssl.length_method"),
    ("opuslm", CHAT, "text_bpe.maxlen"),
    ("opuslm", CHAT, "text_bpe.minlen"),
], ids=lambda v: v[2])  # fmt: skip
def test_a_missing_key_is_named(family_base_path):
    family, base, path = family_base_path
    with pytest.raises(ConfigError, match=f"<dict>: {path}: is missing; .*add it"):
        load_decoding(without(base, path), family)


def test_what_greedy_search_does_not_read_may_be_missing():
    text = {k: v for k, v in CHAT["text_bpe"].items() if k not in ("topk", "sampling_temperature")}
    assert load_decoding({"text_bpe": text}, "opuslm").text.greedy


def test_an_enforced_modality_needs_its_block():
    with pytest.raises(ConfigError, match="enforce_modality: names 'audio', but there is no block 'audio'"):
        load_decoding(without(BAGPIPER, "audio"), "bagpiper")


@pytest.mark.parametrize("family", ["bagpiper", "opuslm"])
def test_a_file_without_settings_is_refused(family):
    for empty in ({}, {"dtype": "float32"}):
        with pytest.raises(ConfigError, match="add one|holds no decoding settings"):
            load_decoding(empty, family)


def test_a_file_of_the_other_family_is_refused():
    for base in (CHAT, FLAT):
        with pytest.raises(ConfigError, match="is a key of an OpusLM decoding yaml.*Bagpiper"):
            load_decoding(base, "bagpiper")
    with pytest.raises(ConfigError, match="is a key of a Bagpiper inference yaml.*OpusLM"):
        load_decoding(BAGPIPER, "opuslm")
    with pytest.raises(ConfigError, match="unknown model family 'qwen'"):
        load_decoding(BAGPIPER, "qwen")


def test_two_audio_blocks_and_mixed_dialects_are_refused():
    with pytest.raises(ConfigError, match="codec: stands beside codec_ssl"):
        load_decoding({**CHAT, "codec": CHAT["codec_ssl"]}, "opuslm")
    with pytest.raises(ConfigError, match="search_algo: unknown key"):
        load_decoding({**CHAT, **FLAT}, "opuslm")
    with pytest.raises(ConfigError, match="has no block codec_ssl or text_bpe"):
        load_decoding({"ssl": CHAT["text_bpe"]}, "opuslm")


def test_keys_that_are_no_text_are_refused():
    for key in (1, True, None, 1.5):
        with pytest.raises(ConfigError, match="as a key; expected one of"):
            load_decoding({**BAGPIPER, key: 1}, "bagpiper")
