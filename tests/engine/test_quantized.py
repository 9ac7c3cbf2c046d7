"""Precisions by a word: what vLLM is told, and what is refused before anything is loaded."""

import itertools
import json

import pytest
from bench_models import converted_model
from conftest import REPO

from espnet2_vllm.backends import make_engine
from espnet2_vllm.bin.compare import side
from espnet2_vllm.bin.inference import main
from espnet2_vllm.bin.job import journal_settings
from espnet2_vllm.checkpoint import open_checkpoint
from espnet2_vllm.decoding import load_decoding
from espnet2_vllm.engine.quantized import vllm_options
from espnet2_vllm.errors import CheckpointError, ConfigError


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}), encoding="utf-8")
    return tmp_path


def test_words_become_options_of_vllm(directory):
    given = {"precision": "fp8", "kv_cache_precision": "fp8", "max_num_seqs": 4}
    found = vllm_options(given, directory, cpu=False)
    assert found == {"quantization": "fp8_per_channel", "kv_cache_dtype": "fp8", "max_num_seqs": 4}
    assert vllm_options({"precision": None, "max_num_seqs": 4}, directory, cpu=True) == {"max_num_seqs": 4}


@pytest.mark.parametrize(
    ("options", "cpu", "message"),
    [
        ({"precision": "fp8"}, True, "precision fp8: vLLM has it on GPUs only"),
        ({"kv_cache_precision": "fp8"}, True, "kv_cache_precision fp8: vLLM has it on GPUs only"),
        ({"precision": "int4"}, False, "precision 'int4' is unknown; expected fp8"),
        ({"precision": "fp8", "quantization": "mxfp8"}, False, "engine option quantization=mxfp8 say the same thing"),
        ({"kv_cache_precision": "fp8", "kv_cache_dtype": "fp8_e5m2"}, False, "kv_cache_dtype=fp8_e5m2"),
    ],
)
def test_what_cannot_be_is_refused_by_name(directory, options, cpu, message):
    with pytest.raises(ConfigError, match=message):
        vllm_options(options, directory, cpu=cpu)


def test_weights_that_are_quantised_already_are_left_as_they_are(directory):
    config = {"model_type": "qwen3", "quantization_config": {"quant_method": "gptq"}}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"is quantised already \(gptq\)"):
        vllm_options({"precision": "fp8"}, directory, cpu=False)
    assert vllm_options({"kv_cache_precision": "fp8"}, directory, cpu=False) == {"kv_cache_dtype": "fp8"}
    (directory / "config.json").write_text("[", encoding="utf-8")
    with pytest.raises(CheckpointError, match="convert the checkpoint again"):
        vllm_options({"precision": "fp8"}, directory, cpu=False)


@pytest.mark.parametrize("name", ["precision", "kv_cache_precision"])
def test_engines_without_it_say_so(name, capsys):
    pytest.importorskip("vllm")
    from vllm.platforms import current_platform

    checkpoint = open_checkpoint(converted_model("bagpiper", "qwen3-s8-cb64"))
    with pytest.raises(ConfigError, match=f"option of the pytorch backend '{name}' is unknown"):
        make_engine("pytorch", checkpoint, "float32", **{name: "fp8"})
    if current_platform.is_cpu():
        with pytest.raises(ConfigError, match=f"^{name} fp8: vLLM has it on GPUs only"):
            make_engine("vllm", checkpoint, "float32", **{name: "fp8"})
    with pytest.raises(SystemExit):
        main(["--precision", "int4"])
    assert "invalid choice: 'int4'" in capsys.readouterr().err


def test_a_run_in_another_precision_does_not_go_on_with_results():
    config = load_decoding(REPO / "conf" / "inference_bagpiper_tts.yaml", "bagpiper")

    def settings(**options):
        return journal_settings(config, checkpoint={}, backend="vllm", seed=1, nbest=1, options=options)

    assert settings(max_num_seqs=4) == settings()
    found = [settings(), *(settings(**{name: "fp8"}) for name in ("precision", "kv_cache_precision", "quantization"))]
    assert all(one != other for one, other in itertools.combinations(found, 2))


def test_a_side_of_a_comparison_may_have_one():
    import argparse

    assert (
        side("vllm:bfloat16:fp8") == ("vllm", "bfloat16", "fp8")
        and str(side("vllm:bfloat16:fp8")) == "vllm bfloat16 fp8"
    )
    assert str(side("pytorch:float32")) == "pytorch float32"
    for wrong in ("vllm:bfloat16:int4", "pytorch:float32:fp8", "vllm:bfloat16:"):
        with pytest.raises(argparse.ArgumentTypeError, match="behind the dtype of vllm may come fp8"):
            side(wrong)
