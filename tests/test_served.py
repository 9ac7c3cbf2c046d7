"""A model behind a server: the requests are those of ESPnet's own client, byte for byte, and so is what comes of the answers."""

import base64
import io
import json
import subprocess
import sys

import numpy as np
import pytest
import soundfile
from recorder import SPOKEN, WAV, WRITTEN, Recorder

import espnet2_vllm
from espnet2_vllm import Decoding, from_server
from espnet2_vllm.errors import ConfigError, DataError, ServerError


@pytest.fixture
def recorder():
    made = Recorder()
    yield made
    made.close()


@pytest.fixture
def sound(tmp_path):
    soundfile.write(tmp_path / "a.FLAC", np.zeros(1000), 16000, format="FLAC")
    return tmp_path / "a.FLAC"


CALLS = [
    ("describe", (), {}, None),
    ("describe", ("Who speaks?", "Choose."), {}, {"text_temperature": 0.2, "topk": 4, "max_tokens": 77, "cfg": 2}),
    ("describe", (), {"system": None}, {"max_steps": 9}),
    ("render", ("A bell.",), {}, None),
    ("render", ("A bell.", None), {}, {"cfg": 2.5, "text_temperature": 0.1, "audio_temperature": 0.2, "topk": 3}),
    ("render", ("Eine Glocke, häufig.",), {"system": "Be short."}, {"cfg": 1, "max_tokens": 5}),
    ("ask", ("Name a drum.",), {}, None),
    ("ask", ("Name a drum.", "Be short."), {}, {"audio_temperature": 0.5}),
]
SERVED = [{}, {"model": "bagpiper-TTS-sft"}, {"model": "mine", "tts_system": "Speak."}, {"tts_system": None}]


@pytest.mark.parametrize("options", SERVED, ids=str)
@pytest.mark.parametrize("answer", [WRITTEN, SPOKEN], ids=["written", "spoken"])
def test_requests_and_what_comes_of_them_are_espnets(options, answer, recorder, sound):
    espnet = pytest.importorskip("espnet2.bin.speechlm_inference")
    recorder.answer = (200, answer)
    for method, args, more, decoding in CALLS:
        found = []
        for interface in (espnet, espnet2_vllm):
            model = interface.from_server(recorder.url + "/", **options)
            chosen = {} if decoding is None else {"decoding": interface.Decoding(**decoding)}
            audio = (str(sound),) if method == "describe" else ()
            found.append((repr(model), getattr(model, method)(*audio, *args, **more, **chosen)))
        assert found[1] == found[0]
        assert (method == "render" and answer is SPOKEN) == (found[0][1][0] == WAV)
        (path, kind, theirs), ours = recorder.requests
        assert ours[:2] == (path, kind) and path == "/v1/chat/completions"
        assert json.loads(ours[2]) == json.loads(theirs)
        recorder.requests.clear()


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"ESPNET_BAGPIPER_URL": "http://10.0.0.1:1/v1/", "ESPNET_BAGPIPER_MODEL": "my-tts"},
        {"ESPNET_BAGPIPER_TTS_SYSTEM": ""},
        {"ESPNET_BAGPIPER_TTS_SYSTEM": "Speak.", "ESPNET_BAGPIPER_MODEL": "my-tts"},
    ],
)
def test_the_environment_is_read_as_espnet_reads_it(variables, monkeypatch):
    import importlib

    espnet = pytest.importorskip("espnet2.bin.speechlm_inference")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    try:
        theirs, ours = importlib.reload(espnet).from_server(), from_server()
        assert (ours.url, ours.model, ours.tts_system) == (theirs.url, theirs.model, theirs.tts_system)
    finally:
        monkeypatch.undo()
        importlib.reload(espnet)


def test_what_is_ours_alone(recorder):
    model = from_server(recorder.url)
    samples = np.stack([np.linspace(-0.5, 0.5, 900), np.zeros(900)]).astype(np.float32)
    model.describe((samples, 8000), prompt=None, seed=7, decoding={"temperature": 0.5})
    ((_, _, body),) = recorder.requests
    body = json.loads(body)
    assert (body["seed"], body["temperature"]) == (7, 0.5)
    (part,) = body["messages"][1]["content"]
    heard, rate = soundfile.read(io.BytesIO(base64.b64decode(part["input_audio"]["data"])))
    np.testing.assert_allclose(heard.T, samples, atol=2**-15)
    assert rate == 8000 and part["input_audio"]["format"] == "wav" and len(body["messages"]) == 2
    for setting in ({"min_step": 3}, {"enforce_modality": ("text",)}, "inference.yaml", {"text": {"topk": 2}}):
        with pytest.raises(ConfigError, match="cannot be set for a model behind a server"):
            model.ask("hello", decoding=setting)
    with pytest.raises(DataError, match="swap them"):
        model.describe((8000, samples))
    with pytest.raises(FileNotFoundError, match="no such audio file"):
        model.describe("/none.wav")
    assert len(recorder.requests) == 1


def test_a_server_that_fails_is_named(recorder):
    model = from_server(recorder.url, timeout=30)
    for answer, message in (
        ((500, b"out of " + b"memory" * 1000), "HTTP 500: out of memory"),
        ((404, {"error": "no such model"}), "HTTP 404"),
        ((200, b"<html>"), "no JSON"),
        ((200, b"[]"), "not the answer of a Bagpiper"),
        ((200, b'{"choices": []}'), "not the answer of a Bagpiper"),
        ((200, {"content": "x", "audio": {"data": base64.b64encode(b"MP3").decode()}}), "not the answer of a Bagpiper"),
        ((200, {"content": "x", "audio": {"data": "!"}}), "not the answer of a Bagpiper"),
    ):
        recorder.answer = answer
        with pytest.raises(RuntimeError, match=message) as caught:
            model.render("A bell.")
        assert (
            isinstance(caught.value, ServerError)
            and len(str(caught.value)) < 2300
            and recorder.url in str(caught.value)
        )
    recorder.delay = 5
    with pytest.raises(RuntimeError, match="no answer within 0.2 s"):
        from_server(recorder.url, timeout=0.2).ask("hello")
    recorder.delay = 0
    with pytest.raises(RuntimeError, match="no server at http://127.0.0.1:9/v1"):
        from_server("http://127.0.0.1:9/v1").ask("hello")
    with pytest.raises(ConfigError, match="expected an address"):
        from_server("localhost:9811")


def test_a_caller_needs_the_standard_library_only(recorder):
    code = (
        "import sys; from espnet2_vllm import Decoding, from_server, split_thinking\n"
        f"print(from_server({recorder.url!r}).ask('hello', decoding=Decoding(topk=3)))\n"
        "print(sorted({'numpy', 'torch', 'yaml', 'vllm', 'soundfile'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["Two bells.", "[]"], done.stderr
    assert Decoding(cfg=2, topk=None).cfg == 2
