"""--backend espnet: the user's own ESPnet gets its options and nothing else, and what it lost is said."""

import json
import stat

import pytest
from commands import bagpiper_arguments, chat_arguments
from conftest import REPO, golden_models

from espnet2_vllm.bin import inference, speechlm_inference, speechlm_inference_chat

FAKE = REPO / "tests" / "bin" / "fake_espnet.py"
MODEL = golden_models("opuslm")[0]
BAGPIPER = golden_models("bagpiper")[0]


@pytest.fixture(autouse=True)
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
def test_what_espnet_lost_is_named_though_it_ended_well(task, tmp_path, monkeypatch, caplog):
    uid = json.loads((MODEL / "data" / task / "data.json").read_text(encoding="utf-8"))["examples"][0]
    monkeypatch.setenv("FAKE_LOSE", uid)
    assert chat(task, tmp_path / "out") == 1
    assert f"no result for {task}_{uid}: ESPnet wrote none" in caplog.text


def test_its_exit_code_counts(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("FAKE_CODE", "3")
    assert chat("codec_ssl_asr", tmp_path / "out") == 1
    assert "ESPnet ended with exit code 3" in caplog.text


@pytest.mark.parametrize("more", [["--write_scores"], ["--max_num_seqs", "4"], ["--overwrite"], ["--seed", "random"]])
def test_what_espnet_does_not_have_is_refused(tmp_path, caplog, more):
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


def test_bagpiper(tmp_path, espnet, monkeypatch, caplog):
    (tmp_path / "text").write_text("a one\nb two\n", encoding="utf-8")
    entry = {"name": "text1", "path": str(tmp_path / "text"), "reader": "text"}
    (tmp_path / "dataset.json").write_text(json.dumps({"data_entry": [entry], "samples": ["a", "b"]}), encoding="utf-8")
    specifier = f"text_to_audio:set:{tmp_path / 'dataset.json'}"
    config = tmp_path / "inference.yaml"
    assert inference.main(bagpiper_arguments(BAGPIPER, config, specifier, tmp_path / "out", backend="espnet")) == 0
    module, *words = espnet()
    assert (
        module == "espnet2.speechlm.bin.inference"
        and words[words.index("--test-unregistered-specifier") + 1] == specifier
    )
    assert "--backend" not in words
    monkeypatch.setenv("FAKE_LOSE", "b")
    assert inference.main(bagpiper_arguments(BAGPIPER, config, specifier, tmp_path / "other", backend="espnet")) == 1
    assert "no result for set: b: ESPnet wrote none" in caplog.text
