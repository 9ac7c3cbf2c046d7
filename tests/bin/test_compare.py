"""espnet2-vllm compare, on tiny models."""

import json
import os
import re
import subprocess
import sys

import pytest
import yaml
from bench_models import converted_model, tiny_bagpiper, tiny_opuslm
from conftest import golden_models

from espnet2_vllm.bench import geometry, memory
from espnet2_vllm.bin import compare

SMALL = ("--lengths", "6:14", "--requests", "2", "--device", "cpu")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Other tests of this process keep engines of their own, whose device must not be freed."""
    monkeypatch.setattr(memory, "free_device", lambda: 0)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Makes the tiny geometries known by name."""
    for make in (tiny_bagpiper, tiny_opuslm):
        model = make()
        monkeypatch.setitem(geometry._RELEASED, model.name, (model.backbone, lambda model=model: model.layout))


def report(tmp_path, *arguments) -> tuple[int, dict]:
    path = tmp_path / "compare.json"
    code = compare.main([*map(str, arguments), "--json", str(path)])
    return code, json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("model", ["tiny-bagpiper", "tiny-opuslm"])
def test_two_precisions_that_hardly_differ_agree(model, tmp_path, capsys):
    sides = ("--a", "pytorch:float64", "--b", "pytorch:float32")
    more = ("--workload", "text-audio", "--topk", "5", "--temperature", "0.8", "--scratch", tmp_path / "weights")
    code, facts = report(tmp_path, model, *sides, *more, *SMALL, "--require-equal")
    assert code == 0 and facts["first_difference"] is None and facts["ids_equal"] == facts["ids"] > 0
    assert facts["rows"] == [28, 28] and facts["rows_same_history"] == 28
    assert 0 < facts["rmse"]["all_streams"]["mean"] <= facts["rmse"]["all_streams"]["max"] < 1e-4
    assert facts["margin_smallest"] <= facts["margin_median"]
    assert not list((tmp_path / "weights").iterdir())  # random weights are removed
    shown = capsys.readouterr().out
    assert "every id has a preferred successor" in shown
    assert re.search(r"first differing row +none\n", shown) and "2 random prompts of 6 rows" in shown


def test_a_coarse_precision_differs_where_it_is_said(tmp_path, capsys):
    """Recorded models are trained on nothing: their decisions are close, which bfloat16 turns over."""
    model = converted_model("opuslm", "tiny-llama")
    sides = ("--a", "pytorch:float32", "--b", "pytorch:bfloat16")
    arguments = (model, *sides, "--lengths", "8:40", "--requests", "2", "--device", "cpu")
    code, facts = report(tmp_path, *arguments, "--require-equal")
    assert code == 1 and facts["ids_equal"] < facts["ids"]
    assert facts["rmse"]["all_streams"]["mean"] > 1e-3
    first = facts["first_difference"]
    assert first["first"] == min(difference["first"] for difference in facts["differences"])
    equal = facts["requests_equal"] * 40
    assert facts["rows_same_history"] == equal + sum(d["first"] + 1 for d in facts["differences"])
    assert f"first differing row       {first['first']} ({first['request_id']}" in capsys.readouterr().out


@pytest.fixture
def data(monkeypatch):
    """A data set of an OpusLM model, which names its files from the model's folder, and the yaml that it is decoded with."""
    (model,) = [path for path in golden_models("opuslm") if path.name == "tiny-llama"]
    monkeypatch.chdir(model)
    return model / "data" / "codec_ssl_tts" / "data.json", model / "decode_default.yaml"


def test_utterances_of_a_data_set(data, tmp_path):
    model, (path, decoding) = converted_model("opuslm", "tiny-llama"), data
    config = yaml.safe_load(decoding.read_text(encoding="utf-8"))
    examples = json.loads(path.read_text(encoding="utf-8"))["examples"]
    sides = ("--a", "pytorch:float64", "--b", "pytorch:float32")
    more = ("--data", path, "--inference-config", decoding, "--requests", "2", "--device", "cpu")
    code, facts = report(tmp_path, model, *sides, *more, "--require-equal")
    assert code == 0 and facts["requests"] == facts["requests_equal"] == min(2, len(examples))
    assert 0 < max(facts["rows"]) <= 2 * config["codec_ssl"].get("maxlen", 10**6)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["bagpiper-9b"], "did you mean bagpiper-8b"),
        (["tiny-opuslm", "--a", "vllm:bfloat16", "--b", "vllm:bfloat16"], "nothing to compare"),
        (["tiny-opuslm", "--guidance", "2"], "the opuslm family has none"),
        (["tiny-opuslm", "--lengths", "8:3"], "at least 4 are needed"),
        (["tiny-opuslm", "--lengths", "500:20"], "need 522 rows, but the context of tiny-opuslm has 512"),
        (["tiny-opuslm", "--data", "x.json"], "--data and --inference-config belong together"),
        (["tiny-opuslm", "--data", "x", "--inference-config", "y"], "tiny-opuslm has random weights"),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments, message, caplog):
    assert compare.main([*arguments, "--device", "cpu"]) == 2
    assert message in caplog.text


@pytest.mark.parametrize("value", ["vllm", "vllm:int8", "jax:float32"])
def test_a_side_is_a_backend_and_a_dtype(value, capsys):
    with pytest.raises(SystemExit):
        compare.main(["bagpiper-8b", "--a", value])
    assert "is not BACKEND:DTYPE" in capsys.readouterr().err


@pytest.mark.slow
def test_the_engine_and_the_plain_backend_agree_in_float32(tmp_path):
    """As a program of its own, because the device is freed between the sides. vllm comes first by its place, pytorch in time."""
    model = converted_model("opuslm", "tiny-olmo2")
    arguments = [str(model), "--a", "vllm:float32", "--b", "pytorch:float32", *SMALL, "--topk", "5"]
    command = [sys.executable, "-m", "espnet2_vllm.bin.main", "compare", *arguments, "--require-equal"]
    command += ["--max-model-len", "128", "--json", str(tmp_path / "x.json")]
    env = os.environ | {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, encoding="utf-8", timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    facts = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    assert facts["a"] == "vllm float32" and facts["ids_equal"] == facts["ids"] > 0
    assert facts["rows_same_history"] == 28 and 0 < facts["rmse"]["all_streams"]["max"] < 1e-4
