"""ESPnet's older OpusLM command line: options and yaml, and the tree that it writes."""

import json
import logging

import kaldiio
import numpy as np
import pytest
import soundfile
import yaml
from commands import chat, help_of, writable
from conftest import golden_models

from espnet2_vllm.bin import inference, speechlm_inference, speechlm_inference_chat

ASR, TTS = "codec_ssl_asr", "codec_ssl_tts"
GREEDY = ("--search_algo", "greedy_search", "--maxlenratio", "0.4")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The working directory, with the codec's settings in a flat yaml."""
    copy = writable(golden_models("opuslm")[0], tmp_path_factory.mktemp("legacy") / "model")
    decode = yaml.safe_load((copy / "decode_default.yaml").read_text(encoding="utf-8"))
    flat = {
        "search_algo": "greedy_search",
        "maxlenratio": 0.4,
        "nproc": 1,
        "codec_conf": decode["codec_ssl"]["tokenizer"],
    }
    (copy / "flat.yaml").write_text(json.dumps(flat), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(copy)
        yield copy


def run(model, task, examples, out, *more, config="flat.yaml"):
    data = json.loads((model / "data" / task / "data.json").read_text(encoding="utf-8"))
    path = model / f"{task}.json"
    path.write_text(json.dumps({**data, "examples": list(examples)}), encoding="utf-8")
    words = [
        "--train_config",
        "config.yaml",
        "--model_file",
        "model.pth",
        "--output_dir",
        str(out),
        "--backend",
        "pytorch",
    ]
    words += ["--data_path_and_name_and_type", f"{path},_,dataset_json"]
    words += ["--config", config] if config else []
    return speechlm_inference.main([*words, *map(str, more)])


def lines(path):
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def test_the_tree(model, tmp_path):
    """Bare ids of conditions, samples of answers, and token files with the older name and the older counting."""
    out = tmp_path / "out"
    assert run(model, TTS, ["u00", "u01"], out, "--nbest", 2) == 0
    names = [f"{TTS}_{uid}_sample{k}" for uid in ("u00", "u01") for k in (0, 1)]
    assert [line.split(" ", 1)[0] for line in lines(out / "wav.scp" / "wav.scp")] == names
    assert [line.split(" ", 1)[0] for line in lines(out / "text" / "text")] == ["u00", "u01"]
    for entry in ("text", "utt2spk", "wav.scp"):
        assert {path.name for path in (out / entry).iterdir() if path.suffix != ".wav"} == {
            entry, f"rank0_{entry}", f"token_{entry}.scp", f"rank0_token_{entry}.scp", f"rank0_token_{entry}.ark"
        }  # fmt: skip
    facts = json.loads((out / ".journal" / "report.json").read_text(encoding="utf-8"))
    assert facts["utterances"] == 2 and facts["audio_seconds"] > 0 and "--nbest 2" in facts["commands"][0]
    assert (out / ".journal" / "report.html").read_text(encoding="utf-8").count("<audio") > 2
    tokens = kaldiio.load_scp(str(out / "wav.scp" / "token_wav.scp.scp"))
    for line in lines(out / "wav.scp" / "wav.scp"):
        name, path = line.split(" ", 1)
        assert tokens[name].dtype == np.int32 and len(tokens[name]) % 8 == 0  # 8 codebooks, no SSL unit
        frames = tokens[name].reshape(-1, 8)
        assert ((frames >= 0) & (frames < 8 * 32)).all() and (frames // 32 == np.arange(8)).all()
        assert soundfile.info(path).frames == len(frames) * 320
    texts = kaldiio.load_scp(str(out / "text" / "token_text.scp"))
    assert all((texts[uid] >= 256).all() for uid in ("u00", "u01")), "ids of the joint vocabulary"


@pytest.mark.parametrize(("task", "uid"), [(ASR, "u01"), ("codec_ssl_plain_tts", "u00"), ("codec_ssl_se", None)])
def test_both_command_lines_decode_alike(model, task, uid, tmp_path):
    """The same settings in the chat dialect: the same texts and the same waveforms."""
    uid = uid or json.loads((model / "data" / task / "data.json").read_text(encoding="utf-8"))["examples"][0]
    flat = json.loads((model / "flat.yaml").read_text("utf-8"))
    block = {"search_algo": "greedy_search", "length_method": "relative", "minlenratio": 0.0, "maxlenratio": 0.4}
    decode = {"codec_ssl": {**block, "tokenizer": flat["codec_conf"]}, "text_bpe": block}
    (tmp_path / "decode.yaml").write_text(json.dumps(decode), encoding="utf-8")
    old, new = tmp_path / "old", tmp_path / "new"
    assert run(model, task, [uid], old) == 0
    assert chat(model, tmp_path / "decode.yaml", model / f"{task}.json", new) == 0
    entries = sorted(path.name for path in new.iterdir() if not path.name.startswith("."))
    assert entries == sorted(path.name for path in old.iterdir() if not path.name.startswith("."))
    for entry in entries:
        assert (old / entry / entry).read_text("utf-8") == (new / entry / entry).read_text("utf-8").replace(
            str(new), str(old)
        )
        for wav in (new / entry).glob("*.wav"):
            assert (old / entry / wav.name).read_bytes() == wav.read_bytes()


def test_a_rank_file_of_an_earlier_run_with_more_ranks_goes(model, tmp_path):
    out = tmp_path / "out"
    assert run(model, ASR, ["u00", "u01"], out, "--nproc", 2) == 0
    assert (out / "text" / "rank1_text").is_file()
    assert run(model, ASR, ["u00", "u01"], out, "--nproc", 1) == 0
    assert not list(out.glob("*/rank1_*")) and len(lines(out / "text" / "rank0_text")) == 2


def test_the_command_line_wins_over_the_yaml(model, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    (model / "two.yaml").write_text(
        (model / "flat.yaml").read_text("utf-8").replace('"nproc": 1', '"nproc": 2'), "utf-8"
    )
    assert run(model, ASR, ["u00"], tmp_path / "a", config="two.yaml") == 0
    assert (tmp_path / "a" / "text" / "rank1_text").is_file()
    assert run(model, ASR, ["u00"], tmp_path / "b", "--nproc", 1, config="two.yaml") == 0
    assert "--nproc 1 wins over 2" in caplog.text and not (tmp_path / "b" / "text" / "rank1_text").exists()


def test_without_a_yaml_all_options_stand_on_the_command_line(model, tmp_path):
    codec = json.loads((model / "flat.yaml").read_text("utf-8"))["codec_conf"]
    nested = ["--codec_conf", json.dumps({k: v for k, v in codec.items() if k != "codec_config"})]
    for name, value in codec.get("codec_config", {}).items():
        nested += ["--codec_conf", f"codec_config.{name}={json.dumps(value)}"]
    a, b = tmp_path / "a", tmp_path / "b"
    assert run(model, ASR, ["u00"], a, *GREEDY, *nested, config=None) == 0
    assert run(model, ASR, ["u00"], b) == 0
    assert (a / "text" / "text").read_bytes() == (b / "text" / "text").read_bytes()


def frames_of(path):
    """By name of a token file."""
    return {name: len(tokens) // 8 for name, tokens in kaldiio.load_scp(str(path)).items()}


@pytest.mark.parametrize("task", ["codec_ssl_se", "codec_ssl_tse"])
def test_a_fixed_length_is_that_of_the_mixture(model, task, tmp_path):
    """By every search that draws, from the command line or from the yaml, whatever the ratios say."""
    flat = json.loads((model / "flat.yaml").read_text("utf-8"))
    (model / "fixed.yaml").write_text(json.dumps({**flat, "fixed_length": True}), "utf-8")
    uids, searches = ["u01", "u06"], [("greedy_search", "fixed.yaml"), ("topp_sampling", "flat.yaml")]
    for search, config in searches:
        out = tmp_path / search
        more = ["--search_algo", search, "--maxlenratio", "0.1", "--seed", "3"]
        more += ["--fixed_length", "true"] if config == "flat.yaml" else []
        assert run(model, task, uids, out, *more, config=config) == 0
        mixed = frames_of(out / "mix.scp" / "token_mix.scp.scp")
        answers = frames_of(out / "wav.scp" / "token_wav.scp.scp")
        assert answers == {f"{task}_{uid}_sample0": mixed[uid] for uid in uids} and len(set(mixed.values())) == 2
        facts = json.loads((out / ".journal" / "report.json").read_text(encoding="utf-8"))
        assert facts["outcomes"]["ok"] == 2, "a length that was asked for is no cut"
    assert chat(model, model / "fixed.yaml", model / f"{task}.json", tmp_path / "new", "--seed", 3) == 0
    for wav in (tmp_path / "new" / "wav.scp").glob("*.wav"):
        assert (tmp_path / "greedy_search" / "wav.scp" / wav.name).read_bytes() == wav.read_bytes()


def test_top_p_is_drawn_alike_by_both_command_lines_and_none_of_it_is_greedy(model, tmp_path):
    """The same seed, the same settings in the chat dialect: the same texts."""
    texts = {}
    for name, top_p, more in [("old", 0.9, ()), ("again", 0.9, ()), ("other", 0.9, ("--seed", 1)), ("best", 0.0, ())]:
        sampling = ["--search_algo", "topp_sampling", "--sampling_temperature", 2.0, "--top_p", top_p]
        assert run(model, ASR, ["u00", "u01"], tmp_path / name, *sampling, *more) == 0
        texts[name] = lines(tmp_path / name / "text" / "text")
    assert run(model, ASR, ["u00", "u01"], tmp_path / "greedy") == 0
    limits = {"length_method": "relative", "minlenratio": 0.0, "maxlenratio": 0.4}
    block = {"search_algo": "topp_sampling", "sampling_temperature": 2.0, "top_p": 0.9, **limits}
    tokenizer = json.loads((model / "flat.yaml").read_text("utf-8"))["codec_conf"]
    decode = {"codec_ssl": {**block, "tokenizer": tokenizer}, "text_bpe": block}
    (tmp_path / "decode.yaml").write_text(json.dumps(decode), encoding="utf-8")
    assert chat(model, tmp_path / "decode.yaml", model / f"{ASR}.json", tmp_path / "new") == 0
    assert texts["old"] == texts["again"] == lines(tmp_path / "new" / "text" / "text")
    assert texts["best"] == lines(tmp_path / "greedy" / "text" / "text")
    assert texts["old"] != texts["other"] and texts["old"] != texts["best"]


def test_a_key_file_chooses_and_the_set_orders(model, tmp_path, caplog):
    """As ESPnet's make_example_list_speechlm.py writes it; the same with both command lines."""
    keys, uids = tmp_path / "keys.1", ["u00", "u01", "u02"]
    keys.write_text(f"{ASR}_u02 and what else stands there\n\n{ASR}_u00\n", encoding="utf-8")
    assert run(model, ASR, uids, tmp_path / "all") == 0
    assert run(model, ASR, uids, tmp_path / "old", "--key_file", keys) == 0
    kept = [line for line in lines(tmp_path / "all" / "text" / "text") if "_u01_" not in line]
    assert lines(tmp_path / "old" / "text" / "text") == kept and len(kept) == 2
    decode = yaml.safe_load((model / "decode_default.yaml").read_text(encoding="utf-8"))
    (tmp_path / "decode.yaml").write_text(json.dumps(decode), encoding="utf-8")
    assert chat(model, tmp_path / "decode.yaml", model / f"{ASR}.json", tmp_path / "new", "--key-file", keys) == 0
    assert [line.split()[0] for line in lines(tmp_path / "new" / "text" / "text")] == [line.split()[0] for line in kept]
    for text, message in (
        (f"{ASR}_u00\nu01\n", f"1 of its keys are none of {model / ASR}.json, such as u01; expected <task>_<id>"),
        ("\n", "holds no key"),
        (f"{ASR}_u00\n{ASR}_u00\n", "keys.1:2: key"),
    ):
        keys.write_text(text, encoding="utf-8")
        caplog.clear()
        assert run(model, ASR, uids, tmp_path / "bad", "--key_file", keys) == 1 and message in caplog.text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--search_algo", "beam_search"],
            "beam_search, which is not supported: ESPnet has it for models of one stream",
        ),
        (["--fixed_length", "true"], f"fixed_length: task {ASR} has no fixed_length_key"),
        (["--search_algo", "topp_sampling", "--top_p", "1.5"], "top_p: is 1.5; expected a number from 0 to 1"),
        (["--run_asr", "true"], "run_asr"),
        (["--inference_nq", "4"], "inference_nq"),
        (["--data_path_and_name_and_type", "x/data.json,_,dataset_json"], "given 2 times; expected one data.json"),
        (["--sampling_temperature", "0", "--search_algo", "topk_sampling"], "sampling_temperature"),
        (["--config", "decode_default.yaml"], "espnet2_vllm.bin.speechlm_inference_chat takes"),
        (["--ngpu", "2"], "--ngpu 2"),
    ],
)
def test_what_cannot_be_used_is_said(model, tmp_path, caplog, more, message):
    assert run(model, ASR, ["u00"], tmp_path / "out", *more) == 2
    assert message in caplog.text


def test_a_codec_key_cannot_be_a_value_and_hold_others(capsys):
    with pytest.raises(SystemExit) as stop:
        speechlm_inference.main(["--codec_conf", "a=1", "--codec_conf", "a.b=2"])
    assert stop.value.code == 2 and "'a.b=2': a is 1, given before, and holds no b" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["nan", "1.5", "-0.1", "inf"])
def test_without_a_yaml_it_is_the_command_line_that_is_wrong(model, tmp_path, caplog, value):
    assert (
        run(model, ASR, ["u00"], tmp_path / "out", "--search_algo", "topp_sampling", f"--top_p={value}", config="") == 2
    )
    assert f"command line (overridden): top_p: is {value}; expected a number from 0 to 1" in caplog.text


def test_dialogues_are_for_the_chat_command(model, tmp_path, caplog):
    assert run(model, "text_dialogue", ["td0"], tmp_path / "out") == 2
    assert "use espnet2_vllm.bin.speechlm_inference_chat" in caplog.text


@pytest.mark.parametrize("command", [speechlm_inference, speechlm_inference_chat, inference])
def test_overwrite_begins_anew(command):
    needed = ["--train-config", "x", "--inference-config", "x"] if command is inference else ["--output_dir", "x"]
    for words, resume in (
        ([], True),
        (["--overwrite"], False),
        (["--no_resume"], False),
        (["--resume", "false"], False),
    ):
        assert command.get_parser().parse_args([*needed, *words]).resume is resume


def test_help_is_quick_and_names_espnets_options():
    text, seconds = help_of("espnet2_vllm.bin.speechlm_inference")
    for name in ("config", "nproc", "model_tag", "maxlenratio", "top_p", "beam_size", "fixed_length", "codec_conf"):
        assert f"--{name}" in text
    assert seconds < 0.5, f"--help took {seconds:.2f} s"
