"""What vLLM refuses, in whatever way it does, is a message; what it would take without effect is refused by name."""

import contextlib
import os
import tempfile

import pytest
import zmq
from conftest import golden_models

from espnet2_vllm import SpeechLM
from espnet2_vllm.backends import make_engine, spawning
from espnet2_vllm.checkpoint import convert, open_checkpoint
from espnet2_vllm.errors import ConfigError, EngineError

REFUSALS = [
    AssertionError("sizes differ"),
    AssertionError(),
    AttributeError("no such part"),
    KeyError("kind"),
    TypeError("x"),
]
WITHOUT_EFFECT = {
    "logits_processors": ["a.b.C"],
    "override_generation_config": {"temperature": 0.5},
    "generation_config": "auto",
    "structured_outputs_config": {"backend": "xgrammar"},
    "reasoning_parser": "qwen3",
    "tokenizer_mode": "slow",
    "limit_mm_per_prompt": {"audio": 1},
    "mm_processor_kwargs": {},
    "trust_remote_code": True,
    "runner": "pooling",
    "revision": "main",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("converted") / "model"
    convert(golden_models("bagpiper")[0], directory)
    return open_checkpoint(directory)


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_options_without_effect_are_refused_by_name(checkpoint, name):
    with pytest.raises(ConfigError, match=f"engine option {name} has no effect here: .*; leave it out"):
        make_engine("vllm", checkpoint, "float32", **{name: WITHOUT_EFFECT[name]})
    with pytest.raises(ConfigError, match=f"engine option {name} has no effect here"):
        SpeechLM.from_pretrained(checkpoint.path, backend="vllm", **{name: WITHOUT_EFFECT[name]})


@pytest.mark.parametrize("error", REFUSALS, ids=repr)
def test_options_that_vllm_refuses_by_any_error_are_named(checkpoint, monkeypatch, error):
    from vllm.engine.arg_utils import EngineArgs

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(EngineArgs, "create_engine_config", refuse)
    with pytest.raises(
        ConfigError, match=f"vLLM refused the engine options .*'max_num_seqs': 3.*: {type(error).__name__}"
    ):
        make_engine("vllm", checkpoint, "float32", max_num_seqs=3)


@pytest.mark.parametrize("error", [*REFUSALS, zmq.ZMQError(36), OSError(28, "No space left on device")], ids=repr)
def test_an_engine_that_does_not_start_for_any_error_says_so(checkpoint, monkeypatch, error):
    from vllm.v1.engine.llm_engine import LLMEngine

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(LLMEngine, "from_vllm_config", refuse)
    with pytest.raises(EngineError, match=f"vLLM did not start .*'max_num_seqs': 3.*: {type(error).__name__}"):
        make_engine("vllm", checkpoint, "float32", max_num_seqs=3)


@pytest.mark.parametrize("error", [*REFUSALS, ValueError("of a step")], ids=repr)
def test_an_engine_that_fails_in_a_step_by_any_error_is_dead(checkpoint, error):
    from espnet2_vllm.backends.vllm import VllmEngine

    engine = VllmEngine.__new__(VllmEngine)
    engine._requests, engine._dead = {}, False

    def fail():
        raise error

    with pytest.raises(EngineError, match="the engine died with 0 requests under way"):
        engine._ask(fail)
    with pytest.raises(EngineError, match="the engine is dead"):
        engine._ask(fail)
    engine._dead = False
    with pytest.raises(EngineError, match="vLLM refused: "):
        engine._ask(fail, refusals=(type(error),))
    assert not engine._dead, "what refuses a request goes on"


def test_a_long_folder_for_temporary_files_leaves_room_for_sockets(monkeypatch, tmp_path):
    """As batch systems set it: names of sockets have 107 bytes."""
    from vllm.utils.network_utils import get_open_zmq_ipc_path

    monkeypatch.delenv(spawning.SOCKETS, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spawning.keep_socket_names_short()
    short = len(os.fsencode(str(tmp_path))) <= 62
    assert (spawning.SOCKETS in os.environ) != short
    monkeypatch.delenv(spawning.SOCKETS, raising=False)
    long = tmp_path.joinpath(*["scratch_directory_of_the_job"] * 4)
    long.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    try:
        spawning.keep_socket_names_short()
        path = get_open_zmq_ipc_path()
        with zmq.Context() as context, context.socket(zmq.PULL) as socket:
            socket.bind(path)
    finally:
        with contextlib.suppress(KeyError):
            monkeypatch.delenv(spawning.SOCKETS)
