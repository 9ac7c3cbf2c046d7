"""--backend espnet: ESPnet gets its options and nothing else, and what it lost is said.

Bagpiper models are decoded by the installed ESPnet. It has no decoder of OpusLM models any more: a stand-in shows what its options
would be, and how it may fail.
"""

import json
import stat

import pytest
from commands import bagpiper, chat_arguments, edited_yaml
from conftest import REPO, golden_models
from trees import result_files

from espnet2_vllm.bin import compare_trees, speechlm_inference, speechlm_inference_chat

FAKE = REPO / "tests" / "bin" / "fake_espnet.py"
MODEL = golden_models("opuslm")[0]
BAGPIPER = REPO / "tests" / "golden" / "bagpiper" / "qwen3-s8-cb64"  # without weights of its backbone


@pytest.fixture
def espnet(tmp_path, monkeypatch):
    """ESPnet's Python, and what it was called with."""
    script = tmp_path / "python"
    script.write_text(FAKE.read_text(encoding="utf-8"), encoding="utf-8")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("ESPNET_PYTHON", str(script))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "called.json"))
    monkeypatch.chdir(MODEL)
    return lambda: json.loads((tmp_path / "called.json").read_text(encoding="utf-8"))


def chat(task, out, *more):
    data = MODEL / "data" / task / "data.json"
    return speechlm_inference_chat.main(
        chat_arguments(MODEL, MODEL / "decode_default.yaml", data, out, *more, backend="espnet")
    )


@pytest.mark.parametrize("task", ["codec_ssl_asr", "audio_dialogue"])
def test_espnet_decodes_the_set(task, tmp_path, espnet):
    assert chat(task, tmp_path / "out", "--nbest", 1, "--inference_last_segment", "true") == 0
    module, *words = espnet()
    assert module == "espnet2.bin.speechlm_inference_chat"
    assert dict(zip(words[::2], words[1::2], strict=True)) == {
        "--train_config": str(MODEL / "config.yaml"),
        "--model_file": str(MODEL / "model.pth"),
        "--inference_config_file": str(MODEL / "decode_default.yaml"),
        "--output_dir": str(tmp_path / "out"),
        "--data_path_and_name_and_type": f"{MODEL / 'data' / task / 'data.json'},_,dataset_json",
        "--nbest": "1",
        "--inference_last_segment": "true",
    }


@pytest.mark.parametrize("task", ["codec_ssl_asr", "audio_dialogue"])
def test_what_espnet_lost_is_named_though_it_ended_well(task, tmp_path, monkeypatch, caplog, espnet):
    uid = json.loads((MODEL / "data" / task / "data.json").read_text(encoding="utf-8"))["examples"][0]
    monkeypatch.setenv("FAKE_LOSE", uid)
    assert chat(task, tmp_path / "out") == 1
    assert f"no result for {task}_{uid}: ESPnet wrote none" in caplog.text


def test_its_exit_code_counts(tmp_path, monkeypatch, caplog, espnet):
    monkeypatch.setenv("FAKE_CODE", "3")
    assert chat("codec_ssl_asr", tmp_path / "out") == 1
    assert "ESPnet ended with exit code 3" in caplog.text


@pytest.mark.parametrize("more", [["--write_scores"], ["--max_num_seqs", "4"], ["--overwrite"], ["--seed", "random"]])
def test_what_espnet_does_not_have_is_refused(tmp_path, caplog, more, espnet):
    assert chat("codec_ssl_asr", tmp_path / "out", *more) == 2
    assert "--backend espnet: " in caplog.text and not (tmp_path / "out").exists()


def test_the_older_decoder(tmp_path, espnet):
    data = f"{MODEL / 'data' / 'codec_ssl_asr' / 'data.json'},_,dataset_json"
    words = ["--output_dir", str(tmp_path / "out"), "--data_path_and_name_and_type", data, "--backend", "espnet"]
    assert speechlm_inference.main([*words, "--top_k", "5", "--codec_conf", "codec_fs=16000"]) == 0
    module, *called = espnet()
    assert module == "espnet2.bin.speechlm_inference" and called[-4:] == [
        "--top_k",
        "5",
        "--codec_conf",
        "codec_fs=16000",
    ]


@pytest.mark.parametrize("command", [speechlm_inference_chat, speechlm_inference])
def test_todays_espnet_has_no_decoder_of_opuslm_models(command, tmp_path, monkeypatch, caplog):
    """The module of the older one's name accepts any options, does nothing and ends well."""
    monkeypatch.chdir(MODEL)
    data = f"{MODEL / 'data' / 'codec_ssl_asr' / 'data.json'},_,dataset_json"
    words = ["--output_dir", str(tmp_path / "out"), "--data_path_and_name_and_type", data, "--backend", "espnet"]
    assert command.main(words) == 2
    module = command.__name__.replace("espnet2_vllm", "espnet2")
    assert f"which has no command {module}. ESPnet decodes OpusLM models in the trees" in caplog.text
    assert "ESPNET_PYTHON" in caplog.text and not (tmp_path / "out").exists()


@pytest.mark.parametrize("python", ["no/such/python", "/bin/false"])
def test_what_is_no_python_of_espnet_is_named(python, tmp_path, caplog):
    assert bagpiper(*bagpiper_set(tmp_path, "a"), "--espnet-python", python, backend="espnet") == 2
    assert f"--backend espnet: {'cannot start ' if 'no' in python else ''}{python}" in caplog.text


def bagpiper_set(folder, *keys):
    """A model, a greedy configuration, a specifier and an output directory."""
    texts = dict(zip(keys, ("read this", "Count from one to ten", "the river"), strict=False))
    (folder / "text").write_text("".join(f"{key} {text}\n" for key, text in texts.items()), encoding="utf-8")
    entries = [{"name": name, "path": str(folder / "text"), "reader": "text"} for name in ("text1", "audio1")]
    dataset = {"data_entry": entries, "samples": list(texts)}
    (folder / "a set.json").write_text(json.dumps(dataset), encoding="utf-8")

    def change(data):
        data.update(enforce_modality=["text", "audio"], text={**data["text"], "max_step": 6})
        data["audio"].update(cfg=1, max_step=14, min_step=12)

    config = edited_yaml(BAGPIPER / "trees/tts/inference.yaml", folder / "inference.yaml", change)
    return BAGPIPER, config, f"text_to_audio:set:{folder / 'a set.json'}", folder / "out"


def test_espnet_itself_decodes_a_recorded_model_and_its_tree_is_ours(tmp_path, monkeypatch, capsys):
    """On the CPU, which its own command line refuses; from a folder in which the names of the yaml are no files."""
    monkeypatch.chdir(tmp_path)
    *settings, out = bagpiper_set(tmp_path, "a", "b", "c")
    assert bagpiper(*settings, out, "--num-workers", 2, backend="espnet") == 0
    theirs = result_files(out)
    for text_format in ("string", "list"):
        ours = tmp_path / text_format
        assert bagpiper(*settings, ours, "--num-workers", 2, "--text-format", text_format) == 0
        assert result_files(ours) == theirs
        capsys.readouterr()
        assert compare_trees.main([str(out), str(ours)]) == 0
        printed = capsys.readouterr().out
        assert "text         3 of 3 equal" in printed and "wav          3 of 3 equal" in printed
    assert compare_trees.main([str(out / "text_to_audio_set/inference_rank0"), str(tmp_path / "list")]) == 1


def test_what_ends_espnet_and_what_it_then_lost_is_said(tmp_path, caplog):
    """A key with a slash ends its worker."""
    assert bagpiper(*bagpiper_set(tmp_path, "a", "b/c", "d"), backend="espnet") == 1
    assert "ESPnet ended with exit code 1" in caplog.text
    for key in ("b/c", "d"):
        assert f"no result for set: {key}: ESPnet wrote none" in caplog.text
    assert "ESPnet wrote results of 1 utterances; 2 have none" in caplog.text
