"""Decoding settings: what is read from each dialect, limits and overrides."""

import copy
import json
import pickle
import random
import subprocess
import sys

import pytest
import yaml
from conftest import REPO, golden_files
from decoding_samples import BAGPIPER, CHAT, FAMILIES, FLAT, changed, without, write

from espnet2_vllm import decoding_rules
from espnet2_vllm.decoding import SegmentConfig, load_decoding
from espnet2_vllm.drive import sampling_of
from espnet2_vllm.errors import ConfigError
from espnet2_vllm.protocol import EVERY, Sampling

TREES = [*golden_files("bagpiper/*/trees/*/inference.yaml"), *golden_files("opuslm/*/trees/*/decode.yaml")]
TREES += golden_files("opuslm/*/decode_default.yaml")


def test_bagpiper():
    config = load_decoding(BAGPIPER, "bagpiper")
    assert (config.dialect, config.family, config.source, config.dtype) == ("bagpiper", "bagpiper", "<dict>", "float32")
    assert config.enforce_modality == ("text", "audio")
    assert config.audio == SegmentConfig("topk", 0.8, 20, 50, 2048, None, None, cfg=3.0)
    assert config.text == SegmentConfig("greedy", 1.0, 1, 1, 1024, None, None)
    assert config.text.greedy and not config.audio.greedy
    assert config.audio.guided and not config.text.guided
    assert config.audio.rows_limits(77) == (50, 2048)
    assert (config.nbest, config.nproc, config.seed, config.cli) == (None, 1, None, {})


def test_bagpiper_defaults():
    config = load_decoding({"text": {"temperature": 1, "topk": 1, "max_step": 5}}, "bagpiper")
    assert config.dtype == "bfloat16"
    assert config.text == SegmentConfig("topk", 1.0, 1, 1, 5, None, None)
    assert config.text.greedy and config.enforce_modality == ()
    assert isinstance(config.text.temperature, float)


@pytest.mark.parametrize("scale", [0, 0.5, 1, 1.0])
def test_a_cfg_of_at_most_one_is_no_guidance(scale):
    assert not load_decoding(changed(BAGPIPER, "audio.cfg", scale), "bagpiper").audio.guided


def test_bagpiper_min_step_above_max_step_is_allowed():
    assert load_decoding(changed(BAGPIPER, "text.min_step", 9999), "bagpiper").text.rows_limits(1) == (9999, 1024)


def test_enforced_names_that_espnet_does_not_enforce_keep_their_place():
    names = ["video", "text", "image", "toolcall"]
    assert load_decoding(changed(BAGPIPER, "enforce_modality", names), "bagpiper").enforce_modality == tuple(names)
    assert load_decoding(changed(BAGPIPER, "enforce_modality", []), "bagpiper").enforce_modality == ()


def test_num_hypo_counts_in_a_block_only(caplog):
    config = load_decoding({**changed(BAGPIPER, "audio.num_hypo", 4), "num_hypo": 3}, "bagpiper")
    assert (config.audio.num_hypo, config.text.num_hypo) == (4, 1)
    assert "num_hypo" in caplog.text
    caplog.clear()
    load_decoding({**BAGPIPER, "num_hypo": 1}, "bagpiper")
    assert not caplog.text


def test_chat():
    config = load_decoding({**CHAT, "nbest": 3, "inference_last_segment": True, "seed": 7, "ngpu": 1}, "opuslm")
    assert (config.dialect, config.family, config.dtype, config.nproc) == ("chat", "opuslm", "bfloat16", 2)
    assert (config.nbest, config.inference_last_segment, config.seed) == (3, True, 7)
    assert config.audio == SegmentConfig("topk", 0.8, 30, 3, 2048, None, None, tokenizer=CHAT["codec_ssl"]["tokenizer"])
    assert config.text == SegmentConfig("greedy", 1.0, 1, 1, 512, None, None)
    assert config.cli == {
        "nproc": 2,
        "dtype": "bfloat16",
        "nbest": 3,
        "inference_last_segment": True,
        "seed": 7,
        "ngpu": 1,
    }
    assert not config.audio.greedy
    assert load_decoding(changed(CHAT, "codec_ssl.topk", 1), "opuslm").audio.greedy


def test_chat_teacher_force():
    text = load_decoding(changed(CHAT, "text_bpe.search_algo", "teacher_force"), "opuslm").text
    assert (text.search, text.temperature, text.topk) == ("teacher_force", 1.0, 1)


def test_chat_codec_block_is_audio():
    config = load_decoding({"codec": CHAT["codec_ssl"]}, "opuslm")
    assert config.audio.topk == 30 and config.text is None


def test_chat_blocks_of_other_modalities_are_named_and_not_used(caplog):
    config = load_decoding({**CHAT, "ssl": CHAT["text_bpe"], "image": CHAT["text_bpe"]}, "opuslm")
    assert config.replace(source="x") == load_decoding(CHAT, "opuslm").replace(source="x")
    assert "image, ssl" in caplog.text


def test_flat():
    config = load_decoding({**FLAT, "codec_conf": {"codec_fs": 16000}, "seed": 0}, "opuslm")
    assert (config.dialect, config.family, config.dtype, config.nproc) == ("flat", "opuslm", "float32", 10)
    assert config.text == SegmentConfig("topk", 0.7, 30, 0, None, 0.05, 10.0)
    assert config.audio.tokenizer == {"codec_fs": 16000}
    assert config.seed == 0 and config.cli == {"nproc": 10, "seed": 0}


def test_top_p():
    """ESPnet's older decoder has a default for it and looks at no top-k; a block of the chat dialect has to say."""
    config = load_decoding({**FLAT, "search_algo": "topp_sampling"}, "opuslm")
    assert config.text == SegmentConfig("topp", 0.7, EVERY, 0, None, 0.05, 10.0, top_p=0.8)
    assert sampling_of(config.audio) == Sampling(0.7, EVERY, 0.8)
    config.check_vocabulary(10)
    chat = changed(CHAT, "codec_ssl.search_algo", "topp_sampling")
    with pytest.raises(ConfigError, match=r"codec_ssl\.top_p: is missing; topp_sampling needs it"):
        load_decoding(chat, "opuslm")
    config = load_decoding(changed(chat, "codec_ssl.top_p", 0.95), "opuslm")
    assert sampling_of(config.audio) == Sampling(0.8, EVERY, 0.95) and config.text.search == "greedy"
    assert sampling_of(load_decoding(changed(chat, "codec_ssl.top_p", 0), "opuslm").audio) == Sampling()
    with pytest.raises(ConfigError, match=r"sampling_temperature: is 0.*write search_algo: greedy_search$"):
        load_decoding({**FLAT, "search_algo": "topp_sampling", "sampling_temperature": 0}, "opuslm")
    other = load_decoding({**FLAT, "top_p": 0.3}, "opuslm")
    assert other.text == load_decoding(FLAT, "opuslm").text, "of another algorithm"


def test_beam_search_is_refused_with_espnets_reason():
    with pytest.raises(
        ConfigError, match="is beam_search, which is not supported: ESPnet has it for models of one stream"
    ):
        load_decoding({**FLAT, "search_algo": "beam_search"}, "opuslm")


def test_settings_are_plain_values_that_can_be_sent_to_another_process():
    for family, base in FAMILIES:
        config = load_decoding(base, family)
        assert pickle.loads(pickle.dumps(config)) == config
        with pytest.raises(AttributeError):
            config.dtype = "float16"


def test_the_source_is_not_changed_and_not_shared():
    before = copy.deepcopy(CHAT)
    config = load_decoding(CHAT, "opuslm", overrides={"codec_ssl": {"topk": 5}})
    config.audio.tokenizer["nested"]["any"].append("mine")
    assert before == CHAT
    assert load_decoding(CHAT, "opuslm").audio.tokenizer == before["codec_ssl"]["tokenizer"]


def test_replace():
    config = load_decoding(BAGPIPER, "bagpiper")
    assert config.replace(nbest=2).nbest == 2 and config.nbest is None
    with pytest.raises(TypeError):
        config.replace(nbets=2)
    with pytest.raises(AssertionError, match="nbest 0"):
        config.replace(nbest=0)


def test_segment_names_file_and_missing_block():
    chat = load_decoding({"text_bpe": CHAT["text_bpe"]}, "opuslm")
    assert chat.segment("text") is chat.text
    with pytest.raises(ConfigError, match=r"<dict>: codec_ssl: is missing"):
        chat.segment("audio")
    bagpiper = load_decoding({"audio": BAGPIPER["audio"]}, "bagpiper")
    with pytest.raises(ConfigError, match=r"<dict>: text: is missing"):
        bagpiper.segment("text")
    with pytest.raises(ConfigError, match="'image' cannot be decoded"):
        bagpiper.segment("image")


# Recorded and published files


@pytest.mark.parametrize("path", TREES, ids=lambda p: "/".join(p.parts[-5:]))
def test_golden_trees_load(path):
    family = "opuslm" if "opuslm" in path.parts else "bagpiper"
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    config = load_decoding(path, family)
    assert config == load_decoding(raw, family).replace(source=str(path))
    assert config.text is not None and config.audio is not None
    assert config.dtype == raw["dtype"] and config.nbest == raw.get("nbest")


@pytest.mark.parametrize("path", golden_files("bagpiper/*/cases/*.json"), ids=lambda p: f"{p.parts[-3]}-{p.stem}")
def test_golden_bagpiper_cases_load(path):
    case = json.loads(path.read_text(encoding="utf-8"))
    raw = case["inference_config"]
    config = load_decoding(raw, "bagpiper")
    config.check_streams(9)
    assert config.enforce_modality == tuple(raw.get("enforce_modality", []))
    for modality in ("text", "audio"):
        block, segment = raw[modality], config.segment(modality)
        assert segment.rows_limits(10) == (block.get("min_step", 1), block["max_step"])
        assert segment.cfg == block["cfg"] and segment.num_hypo == block.get("num_hypo", 1)
        assert segment.greedy == (block["temperature"] == 0)
        if not segment.greedy:
            assert (segment.temperature, segment.topk) == (block["temperature"], block["topk"])
    for recorded in case.get("segments", []):
        least, most = config.segment(recorded["modality"]).rows_limits(10)
        assert recorded["num_steps"] <= most
        assert (recorded["stop"] == "max_step") or recorded["num_steps"] > least


@pytest.mark.parametrize("path", golden_files("opuslm/*/cases/*.json"), ids=lambda p: f"{p.parts[-3]}-{p.stem}")
def test_golden_opuslm_cases_load(path):
    case = json.loads(path.read_text(encoding="utf-8"))
    config = load_decoding(case["inference_config"], "opuslm")
    config.check_streams(9)
    generated = [s for s in case["segments"] if not s["is_prefill"]]
    assert generated
    for recorded in generated:
        segment = config.segment({"text_bpe": "text", "codec_ssl": "audio"}[recorded["modality"]])
        assert segment.search == decoding_rules.SEARCH_ALGOS[recorded["search_algo"]]
        if segment.search == "topk":
            assert (segment.topk, segment.temperature) == (recorded["topk"], recorded["temperature"])
        if segment.search != "teacher_force":
            assert segment.rows_limits(10) == (recorded["minlen"], recorded["maxlen"])


def test_golden_files_were_found():
    assert TREES and golden_files("bagpiper/*/cases/*.json") and golden_files("opuslm/*/cases/*.json")


@pytest.mark.parametrize("path", sorted((REPO / "conf").glob("*.yaml")), ids=lambda p: p.name)
def test_published_files_load(path, caplog):
    config = load_decoding(path, "bagpiper" if path.name.startswith("inference") else "opuslm")
    config.check_streams(9)
    config.check_vocabulary(10_000)
    assert config.dtype == "bfloat16" and not caplog.text


def test_published_files_say_what_they_are_for():
    conf = REPO / "conf"
    sft, pt, tts = (load_decoding(conf / f"inference_{n}.yaml", "bagpiper") for n in ("sft", "pt", "bagpiper_tts"))
    assert (sft.enforce_modality, pt.enforce_modality, tts.enforce_modality) == (
        ("text", "audio"),
        ("text",),
        ("text", "audio"),
    )
    assert sft.audio == pt.audio == SegmentConfig("topk", 0.8, 20, 50, 2048, None, None, cfg=3.0)
    assert sft.text.rows_limits(1) == (1, 8192) and tts.audio.rows_limits(1) == (1, 2048)
    general = load_decoding(conf / "decode_general.yaml", "opuslm")
    assert (general.dialect, general.audio.topk, general.text.greedy) == ("chat", 30, True)
    flat_tts, flat_asr = (load_decoding(conf / f"decode_flat_{n}.yaml", "opuslm") for n in ("tts", "asr"))
    assert (flat_tts.dialect, flat_tts.audio.temperature, flat_tts.audio.max_ratio) == ("flat", 0.7, 10.0)
    assert flat_asr.text.greedy and (flat_asr.text.min_ratio, flat_asr.text.max_ratio) == (0.05, 0.3)


# Overrides


def test_overrides_win_and_are_checked(tmp_path):
    path = write(tmp_path, yaml.safe_dump(BAGPIPER))
    config = load_decoding(
        path,
        "bagpiper",
        overrides={"audio": {"topk": 5}, "text.max_step": 7, "dtype": None, "enforce_modality": ["text"]},
    )
    assert (config.audio.topk, config.text.max_rows, config.dtype) == (5, 7, "float32")
    assert config.enforce_modality == ("text",)
    with pytest.raises(ConfigError, match=r"decode\.yaml \(overridden\): audio\.topk: is 0"):
        load_decoding(path, "bagpiper", overrides={"audio.topk": 0})
    with pytest.raises(ConfigError, match=r"\(overridden\): audio\.topkk: unknown key; did you mean 'topk'"):
        load_decoding(path, "bagpiper", overrides={"audio": {"topkk": 3}})
    flat = load_decoding(FLAT, "opuslm", overrides={"codec_conf": {"codec_fs": 8000}, "search_algo": "greedy_search"})
    assert flat.audio.tokenizer == {"codec_fs": 8000} and flat.text.greedy


# Limits


def test_opuslm_needs_more_rows_than_streams():
    for rows, fine in ((1, False), (5, False), (8, False), (9, True), (10, True)):
        config = load_decoding(changed(changed(CHAT, "codec_ssl.maxlen", rows), "codec_ssl.minlen", 0), "opuslm")
        if fine:
            config.check_streams(9)
        else:
            with pytest.raises(ConfigError, match=f"maxlen of audio: {rows} rows hold no token.*at least 10"):
                config.check_streams(9)
    text = changed(changed(CHAT, "text_bpe.maxlen", 4), "text_bpe.search_algo", "teacher_force")
    load_decoding(text, "opuslm").check_streams(9)


def test_inference_nq_must_be_all_streams():
    config = load_decoding({**FLAT, "inference_nq": 9}, "opuslm")
    config.check_streams(9)
    with pytest.raises(ConfigError, match="inference_nq: is 9, but the checkpoint has 4 streams"):
        config.check_streams(4)
    load_decoding({**FLAT, "inference_nq": None}, "opuslm").check_streams(4)


def test_topk_beyond_the_vocabulary():
    config = load_decoding(BAGPIPER, "bagpiper")
    config.check_vocabulary(20)
    with pytest.raises(ConfigError, match="topk 20 for audio is larger than the vocabulary"):
        config.check_vocabulary(19)


def legacy_loop(prompt_rows, streams, low, high, context):
    """The loop of the older decoder, step by step: its first row that may end, and how many rows it keeps at most.

    It is entered at the last row before the modality row, so the first row it keeps is the modality row.
    """
    cached = prompt_rows - 2
    minlen = int(cached * low) if low > 0 else 0
    maxlen = int(cached * high) + (streams - 1) if high > 0 else context - cached
    first = next(step for step in range(1, 10**6) if step >= minlen - (streams - 1))
    return max(0, first - 2), maxlen - (streams - 1) - 1 - 1


def test_ratios_follow_the_older_decoder():
    seed = 4711
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(300):
        prompt_rows, streams = rng.randint(2, 900), rng.randint(1, 9)
        low, high = rng.choice([0.0, 0.05, rng.random()]), rng.choice([0.0, 0.3, 10.0, 1 + rng.random()])
        segment = SegmentConfig("greedy", 1.0, 1, 0, None, low, high)
        context = prompt_rows + rng.randint(30, 500)
        least, most = segment.rows_limits(prompt_rows, num_streams=streams, context=context)
        first_end, kept = legacy_loop(prompt_rows, streams, low, high, context)
        # A forced end keeps max_rows - S rows in our loop (eos at row max_rows - (S - 1), one real row is dropped).
        assert least == first_end
        assert most - streams == max(0, kept)


def test_ratios_relative_in_the_chat_dialect():
    relative = {"search_algo": "greedy_search", "length_method": "relative", "minlenratio": 0.5, "maxlenratio": 2}
    text = load_decoding({"text_bpe": relative}, "opuslm").text
    assert (text.min_rows, text.max_rows, text.min_ratio, text.max_ratio) == (0, None, 0.5, 2.0)
    assert text.rows_limits(102, num_streams=9) == (40, 207)
    with pytest.raises(TypeError, match="num_streams"):
        text.rows_limits(102)
    with pytest.raises(ConfigError, match=r"text_bpe\.maxlenratio: is missing; length_method relative needs it"):
        load_decoding({"text_bpe": without(relative, "maxlenratio")}, "opuslm")


def test_a_ratio_of_zero_reaches_to_the_end_of_the_context():
    segment = load_decoding({**FLAT, "maxlenratio": 0}, "opuslm").text
    assert segment.rows_limits(100, num_streams=9, context=500)[1] == 401
    with pytest.raises(TypeError, match="context"):
        segment.rows_limits(100, num_streams=9)


@pytest.mark.parametrize("bad", [
    {"search": "beam"}, {"temperature": 0.0}, {"topk": 0}, {"min_rows": -1}, {"max_rows": None}, {"max_rows": 0},
    {"search": "topp"}, {"top_p": 0.5}, {"search": "topp", "topk": EVERY, "top_p": 1.5},
    {"min_ratio": 0.1}, {"max_ratio": 1.0}, {"cfg": -1.0}, {"cfg": float("nan")}, {"num_hypo": 0}, {"search": "greedy"},
])  # fmt: skip
def test_a_segment_checks_itself(bad):
    good = {
        "search": "topk",
        "temperature": 0.5,
        "topk": 3,
        "min_rows": 1,
        "max_rows": 5,
        "min_ratio": None,
        "max_ratio": None,
    }
    SegmentConfig(**good)
    with pytest.raises(AssertionError):
        SegmentConfig(**{**good, **bad})


# Imports


def test_import_is_light():
    heavy = "('torch', 'vllm', 'transformers', 'numpy')"
    code = f"import sys, espnet2_vllm.decoding; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO)
    assert done.stdout.strip() == "[]"
