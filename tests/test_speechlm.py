"""The Python interface: messages in, texts and sounds out, the same as ESPnet's recorded ones."""

import asyncio
import base64
import dataclasses
import html
import io
import itertools
import json
import re
import subprocess
import sys
import threading
from concurrent.futures import Future

import numpy as np
import pytest
import soundfile
from conftest import golden_files

from espnet2_vllm import UNDERSTAND_SYSTEM, Decoding, SpeechLM, split_thinking
from espnet2_vllm.decoding import load_decoding
from espnet2_vllm.decoding_choice import settings_of
from espnet2_vllm.errors import CheckpointError, ConfigError, DataError
from espnet2_vllm.generation import Generation
from espnet2_vllm.prompt.conversation import checked_messages

CASES = golden_files("bagpiper/qwen3-s4-cb32-contaudio/cases/*cont_audio*.json")
GREEDY = Decoding(temperature=0.0, max_step=12, min_step=2)


def contaudio():
    (config,) = golden_files("bagpiper/qwen3-s4-cb32-contaudio/train.yaml")
    return config.parent


@pytest.fixture(scope="module", params=["pytorch", "vllm"])
def model(request):
    pytest.importorskip(request.param if request.param == "vllm" else "torch")
    options = {"max_num_seqs": 8} if request.param == "vllm" else {}
    options["clean_up_text"] = True  # as when the answers were recorded
    with SpeechLM.from_pretrained(contaudio(), backend=request.param, **options) as opened:
        yield opened


def load(path):
    case = json.loads(path.read_text(encoding="utf-8"))
    with np.load(path.with_suffix(".npz")) as arrays:
        arrays = dict(arrays)
    messages = [
        [role, kind, (arrays[content["npz_key"]], content["sample_rate"]) if kind == "audio" else content]
        for role, kind, content in case["messages"]
    ]
    return case, arrays, messages


def sound(path, seconds=0.7, rate=16000, channels=1):
    wav = np.random.default_rng(5).standard_normal((round(seconds * rate), channels)) * 0.1
    soundfile.write(path, wav, rate)
    return path


# -- recorded answers --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_answers_are_espnets(model, path):
    case, arrays, messages = load(path)
    answer = model.generate(messages, case["inference_config"])
    assert len(answer.messages) == len(case["output_messages"])
    for mine, (role, modality, theirs) in zip(answer.messages, case["output_messages"], strict=True):
        assert mine[:2] == (role, modality)
        if modality == "text":
            assert mine[2] == theirs
        else:
            np.testing.assert_allclose(mine[2][0], arrays[theirs["npz_key"]].reshape(-1), atol=2.4e-5)
            assert mine[2][1] == theirs["sample_rate"]


def test_sound_while_it_is_generated_is_that_of_the_whole_answer(model):
    messages, decoding = [["user", "text", "hello"]], Decoding(enforce_modality=("audio",), max_step=40, min_step=40)
    answer = model.generate(messages, decoding, seed=3)

    async def heard():
        return [item async for item in model.stream(messages, decoding, seed=3)]

    *chunks, result = asyncio.run(heard())
    assert result.outcome == answer.outcome
    samples = np.concatenate([chunk.samples for chunk in chunks])
    np.testing.assert_allclose(samples, answer.audio[0], rtol=0, atol=1e-4)
    assert len(chunks) > 1
    assert {chunk.sample_rate for chunk in chunks} == {answer.audio[1]}


def test_a_batch_and_coroutines_answer_as_one_by_one(model):
    loaded = [load(path) for path in CASES]
    conversations = [messages for _, _, messages in loaded] + [[["user", "text", "hello"]]]
    alone = [model.generate(messages, GREEDY).messages for messages in conversations]
    together = model.generate(conversations, GREEDY)

    async def at_once():
        return await asyncio.gather(*(model.generate_async(messages, GREEDY) for messages in conversations))

    for found in (together, asyncio.run(at_once())):
        for mine, theirs in zip(found, alone, strict=True):
            assert [m[:2] for m in mine.messages] == [m[:2] for m in theirs]
            assert [m[2] for m in mine.messages if m[1] == "text"] == [m[2] for m in theirs if m[1] == "text"]


def test_a_seed_gives_the_same_sample(model):
    messages = [["user", "text", "say anything"]]
    settings = Decoding(temperature=1.5, topk=20, max_step=15, enforce_modality=("text",))
    first, second, other = (model.generate(messages, settings, seed=seed).text for seed in (1, 1, 2))
    assert first == second != other


# -- verbs of the demo -------------------------------------------------------------------------------------------------
def test_describe_render_and_ask(model, tmp_path):
    """The turns are compared with ESPnet's in test_drop_in.py; here both engines answer them as ``generate`` does."""
    path = sound(tmp_path / "a.wav")
    system = ["system", "text", UNDERSTAND_SYSTEM]
    text = model.describe(path, prompt="what is it?", decoding=GREEDY)
    settings = Decoding(temperature=0.0, max_step=12, min_step=2, enforce_modality=("text",), audio={"cfg": 3})
    asked = [system, ["user", "audio", str(path)], ["user", "text", "what is it?"]]
    assert text == model.generate(asked, settings).text
    assert model.describe(soundfile.read(path, dtype="float32"), prompt="what is it?", decoding=GREEDY) == text
    assert (
        model.ask("hello", "be brief", GREEDY)
        == model.generate([["system", "text", "be brief"], ["user", "text", "hello"]], settings).text
    )
    wav, thought = model.render("rain on a roof", decoding=GREEDY)
    samples, rate = soundfile.read(io.BytesIO(wav))
    assert rate == 16000 and len(samples) and isinstance(thought, str)
    assert soundfile.info(io.BytesIO(wav)).subtype == "PCM_16"


def test_thinking():
    assert split_thinking("<think> a b </think> c ") == ("a b", "c")
    assert split_thinking("a b</think>c") == ("a b", "c")
    assert split_thinking(" just this ") == ("", " just this ")
    assert split_thinking("<think>cut in the mid") == ("", "<think>cut in the mid")


# -- history and errors ------------------------------------------------------------------------------------------------
def test_the_assistants_turns_are_history(model):
    first = [["user", "text", "hello"]]
    said = model.generate(first, Decoding.over(GREEDY, enforce_modality=("text",)))
    again = [*first, *said.messages, ["user", "text", "and then?"]]
    result = model.generate(again, GREEDY).result
    assert len(result.utterance.parts[0].rows) > len(said.result.utterance.parts[0].rows)


def test_of_many_the_bad_ones_are_refused(model, tmp_path):
    good = [["user", "text", "hello"]]
    bad = [
        [["user", "audio", str(tmp_path / "none.wav")]],
        [["nobody", "text", "x"]],
        [["user", "text"]],
        [["user", "audio", (np.zeros(100, np.float32), 16000)]],
        [],
    ]
    found = model.generate([good, *bad, good], GREEDY)
    assert [answer.outcome for answer in found[1:-1]] == ["refused"] * len(bad)
    for answer, reason in zip(
        found[1:-1], ("none.wav: no such file", "role 'nobody'", r"\[role, modality", "100 samples", "expected a list"),
        strict=True,
    ):  # fmt: skip
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(answer.reason)
    assert found[0].text == found[-1].text and found[0].outcome in ("ok", "length")
    long = [["user", "text", "hello " * 20_000]]
    for other in ("hello", good[0], {"role": "user"}, None, 3, long, *bad):
        for asked in ([good, other], [other, good]):
            found = dict(zip(map(id, asked), model.generate(asked, GREEDY), strict=True))
            assert (found[id(good)].outcome != "refused", found[id(other)].outcome) == (True, "refused"), other
    with pytest.raises(DataError, match="no such file"):
        model.generate(bad[0], GREEDY)


def test_changes_of_recordings_are_counted(model, tmp_path):
    path = sound(tmp_path / "a.wav", seconds=11, rate=48000, channels=2)
    model.describe(path, decoding=GREEDY)
    assert model.listening.notes["recordings of 2 channels, of which the first was taken"] >= 1
    assert model.listening.notes["recordings resampled from 48000 to 16000 Hz"] >= 1
    assert not any("cut to their first" in note for note in model.listening.notes)


def test_what_cannot_be_opened():
    with pytest.raises(CheckpointError, match="no-such/model: there is no such folder, and the hub"):
        SpeechLM.from_pretrained("no-such/model")
    for name in (None, 3, b"exp", ["exp"]):
        with pytest.raises(CheckpointError, match="expected the folder of a checkpoint"):
            SpeechLM.from_pretrained(name)
    for name in ("/no/such/dir", "./exp/none", "exp/speechlm/none", "~/none", contaudio() / "none"):
        with pytest.raises(FileNotFoundError, match="there is no such folder, and this is no tag"):
            SpeechLM.from_pretrained(name)
    with pytest.raises(CheckpointError, match="there is no such folder"):
        SpeechLM.from_pretrained("x" * 300)


@pytest.mark.parametrize("backend", ["pytorch", "vllm"])
def test_options_that_an_engine_does_not_have_are_refused_at_once(backend):
    pytest.importorskip(backend if backend == "vllm" else "torch")
    cases = {
        "pytorch": (("max_num_seqs", ""), ("atention", "did you mean 'attention'")),
        "vllm": (("max_num_seq", "did you mean 'max_num_seqs'"), ("scheduler_cls", "")),
    }
    for wrong, near in cases[backend]:
        with pytest.raises(ConfigError, match=f"option of the {backend} backend '{wrong}' is unknown.*{near}"):
            SpeechLM.from_pretrained(contaudio(), backend=backend, **{wrong: 1})


def test_what_cannot_be_set():
    with pytest.raises(ConfigError, match="units: expected an audio.units.UnitsDescription, got 3"):
        SpeechLM.from_pretrained(contaudio(), units=3)
    with pytest.raises(ConfigError, match="long_audio 'cuts'"):
        SpeechLM.from_pretrained(contaudio(), long_audio="cuts")
    with pytest.raises(ConfigError, match="the codec's share 2 is not above 0 and up to 1"):
        SpeechLM.from_pretrained(contaudio(), codec_share=2)
    with pytest.raises(ConfigError, match="temprature"):
        SpeechLM.from_pretrained(contaudio(), decoding={"text": {"temprature": 1, "topk": 2, "max_step": 3}})


def test_settings_and_messages_of_the_wrong_kind_are_named(tmp_path):
    binary = tmp_path / "inference.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    hello = [["user", "text", "hello"]]
    with SpeechLM.from_pretrained(contaudio(), backend="pytorch") as opened:
        with pytest.raises(ConfigError, match="is for OpusLM checkpoints"):
            opened.generate(hello, answer=("text", "audio"))
        for wrong in (
            3, binary, Decoding(text="x"), Decoding(enforce_modality=3), Decoding(enforce_modality="text"),
            Decoding(cfg="3"), Decoding(cfg=float("nan")), Decoding(temperature=float("nan")),
        ):  # fmt: skip
            with pytest.raises(ConfigError):
                opened.generate(hello, wrong)
        for seed in ("x", 1.5, float("nan")):
            with pytest.raises(ConfigError, match="seed: expected a whole number"):
                opened.generate(hello, seed=seed)
        for messages in (None, "hello", 3):
            with pytest.raises(DataError, match="expected a list"):
                opened.generate(messages)
        sounds = [np.zeros(16000, np.float32), "16k"], [np.zeros(16000), float("nan")], [np.zeros((16000, 2)), 16000]
        found = opened.generate([[["user", "audio", clip]] for clip in sounds] + [hello], GREEDY)
        assert [answer.outcome for answer in found[:-1]] == ["refused"] * 3 and found[-1].outcome != "refused"
        assert "'16k'" in found[0].reason and "nan" in found[1].reason and "transpose" in found[2].reason
    for options in ({"backend": "vlm"}, {"backend": "pytorch", "dtype": "float31"}):
        with pytest.raises(ConfigError, match="did you mean"):
            SpeechLM.from_pretrained(contaudio(), **options)


def test_settings_of_a_call_may_be_a_mapping():
    whole = {"temperature": 0.5, "topk": 9, "max_step": 30}
    own = {"text": {**whole, "min_step": 4}, "audio": {**whole, "cfg": 2, "min_step": 5}}
    opened = SpeechLM.from_pretrained(contaudio(), backend="pytorch", decoding=own)
    base = opened.config(None)
    assert (base.text.min_rows, base.audio.cfg) == (4, 2)
    # parts of them lie over the model's own ...
    config = opened.config({"temperature": 0.7, "cfg": 3, "text": {"topk": 2}})
    assert config.text == dataclasses.replace(base.text, temperature=0.7, topk=2)
    assert config.audio == dataclasses.replace(base.audio, temperature=0.7, cfg=3)
    assert opened.config({"enforce_modality": ["text"]}).enforce_modality == ("text",)
    assert opened.config({"audio": {"cfg": 1}}).audio.min_rows == 5
    # ... and what a yaml could hold is a yaml, with ESPnet's defaults for what it leaves out
    assert opened.config({"text": whole, "audio": whole}).audio.min_rows == 1
    for wrong, message in (
        ({"temprature": 1}, "'temprature' is no setting of a call; did you mean temperature"),
        ({"text": {"temprature": 1}}, "temprature"),
        ({"max_step": 3, "max_steps": 4}, "one setting"),
        ({"codec_ssl": {}}, "OpusLM"),
    ):
        with pytest.raises(ConfigError, match=message):
            opened.config(wrong)
    assert opened.config({"max_step": 3, "max_steps": 3}).text.max_rows == 3


def test_what_is_shown_is_short(model):
    answer = model.generate([["user", "text", "hello <b>"]], Decoding.over(GREEDY, enforce_modality=("text", "audio")))
    shown = repr(answer)
    assert len(shown) < 300 and " s of audio at 16000 Hz" in shown and repr(answer.text)[1:9] in shown
    assert len(repr(answer.result)) < 200 and "rows of audio" in repr(answer.result)
    for part in (model, model.checkpoint):
        assert len(repr(part)) < 400 and str(model.checkpoint.path) in repr(part)
    page = answer._repr_html_()
    assert html.escape(answer.text) in page and page.count("<audio controls") == 1
    (data,) = re.findall(r"base64,([^\"]+)", page)
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(data)))
    assert rate == 16000 and len(samples) == len(answer.audio[0])
    bad, good = model.generate([[["user", "text"]], [["user", "text", "hello"]]], GREEDY)
    assert "refused" in repr(bad) and "refused" in bad._repr_html_() and good.outcome != "refused"


WAV = np.random.default_rng(7).standard_normal(8000).astype(np.float32) * 0.1
SAME_SOUNDS = {
    "float64": WAV.astype(np.float64),
    "int16": np.round(WAV * 2**15).astype(np.int16),
    "int32": np.round(WAV * 2.0**31).astype(np.int32),
    "other byte order": WAV.astype(">f4"),
    "list": WAV.tolist(),
    "channels": np.stack([WAV, WAV]),
}
NO_SOUNDS = {
    "NaN": np.where(np.arange(8000) == 5, np.nan, WAV),
    "infinite": WAV + np.inf,
    "no samples": WAV[:0],
    "no channel": WAV[None][:0],
    "one number": np.float32(3),
    "three axes": WAV.reshape(1, 1, -1),
    "ragged": [[0.1, 0.2], [0.1]],
    "words": ["a", "b"],
    "complex": WAV.astype(complex),
    "truth values": WAV > 0,
    "int64": np.arange(8000),
}


@pytest.mark.parametrize("kind", [*SAME_SOUNDS, "tensor", "tensor with a gradient", "bfloat16"])
def test_samples_of_any_type_are_the_same_sound(kind):
    import torch

    tensor = torch.from_numpy(WAV.copy())
    tensors = {
        "tensor": tensor,
        "tensor with a gradient": tensor.clone().requires_grad_(),
        "bfloat16": tensor.bfloat16(),
    }
    ((_, _, (samples, rate)),) = checked_messages([["user", "audio", ({**SAME_SOUNDS, **tensors}[kind], 16000)]])
    assert samples.dtype == np.float32 and rate == 16000
    np.testing.assert_allclose(samples.reshape(-1)[:8000], WAV, atol=2e-3 if kind == "bfloat16" else 2e-5)


@pytest.mark.parametrize("kind", NO_SOUNDS)
def test_what_is_no_sound_is_refused_by_its_message(kind):
    with pytest.raises(DataError, match=r"^messages\[0\]: "):
        checked_messages([["user", "audio", (NO_SOUNDS[kind], 16000)]])
    with pytest.raises(DataError, match="got the rate True"):
        checked_messages([["user", "audio", (WAV, True)]])


def test_rate_and_samples_swapped_say_so():
    for rate in (16000, 16000.0, np.int64(16000)):
        for samples in (WAV, WAV.tolist(), np.stack([WAV, WAV])):
            with pytest.raises(DataError, match=r"\(rate, samples\).*expected \(samples, rate\): swap them"):
                checked_messages([["user", "audio", (rate, samples)]])


def test_a_recording_that_the_encoder_cannot_hear_refuses_nobody_else():
    loud = np.linspace(-3e38, 3e38, 8000, dtype=np.float32)
    with SpeechLM.from_pretrained(contaudio(), backend="pytorch") as opened:
        asked = [[["user", "audio", (samples, 16000)]] for samples in (WAV, loud, WAV)]
        found = opened.generate(asked, GREEDY)
        assert [answer.outcome == "refused" for answer in found] == [False, True, False]
        assert "NaN or infinite" in found[1].reason and found[0].text == found[2].text
        with pytest.raises(DataError, match="NaN or infinite"):
            opened.generate(asked[1], GREEDY)


def test_modalities_texts_and_answers_of_other_types_are_named(tmp_path):
    (config,) = golden_files("opuslm/tiny-llama/config.yaml")
    hello = [["user", "text", "hello"]]
    for folder in (contaudio(), config.parent):
        with SpeechLM.from_pretrained(folder, backend="pytorch") as opened:
            for wrong in (["user", ["text"], "x"], ["user", None, "x"], ["user", "text", tmp_path]):
                with pytest.raises(DataError, match="must be texts|a text must be|expected a text"):
                    opened.generate([*hello, wrong])
            with pytest.raises((ConfigError, DataError), match="answer"):
                opened.generate(hello, answer=(["text"],))


def test_a_clip_that_the_codec_cannot_decode_refuses_its_answer_alone(monkeypatch):
    from espnet2_vllm.codec.service import CodecService
    from espnet2_vllm.errors import CodecError

    spoken = Decoding(enforce_modality=("audio",), max_step=30, min_step=30)
    submit, count = CodecService.submit, itertools.count()

    def failing(service, codes):
        if next(count) != 1:
            return submit(service, codes)
        future = Future()
        future.set_exception(CodecError("no sound"))
        return future

    monkeypatch.setattr(CodecService, "submit", failing)
    with SpeechLM.from_pretrained(contaudio(), backend="pytorch") as opened:
        found = opened.generate([[["user", "text", "hello"]]] * 3, spoken, seed=3)
    assert [answer.outcome for answer in found] == [found[0].outcome, "refused", found[0].outcome]
    assert found[1].reason == "no sound" and found[1].audio is None
    assert found[0].audio is not None and found[2].audio is not None


def test_requests_that_were_begun_before_an_interrupt_are_dropped(monkeypatch):
    begun = []

    def begin(*args):
        if len(begun) == 2:
            raise KeyboardInterrupt
        begun.append(Generation(*args))
        return begun[-1]

    monkeypatch.setattr("espnet2_vllm.speechlm.Generation", begin)
    with SpeechLM.from_pretrained(contaudio(), backend="pytorch") as opened:
        with pytest.raises(KeyboardInterrupt):
            opened.generate([[["user", "text", "hello"]]] * 4, Decoding(max_step=200, min_step=200))
        assert [generation.future.cancelled() for generation in begun] == [True, True]


def test_close_ends_the_codecs_thread_and_a_later_call_begins_anew():
    opened = SpeechLM.from_pretrained(contaudio(), backend="pytorch")
    spoken = Decoding(enforce_modality=("audio",), max_step=30, min_step=30)
    before = threading.active_count()
    first = opened.generate([["user", "text", "hello"]], spoken, seed=3)
    assert threading.active_count() > before
    opened.close()
    assert threading.active_count() == before
    with opened:
        again = opened.generate([["user", "text", "hello"]], spoken, seed=3)
    np.testing.assert_array_equal(again.audio[0], first.audio[0])


def test_close_while_another_thread_waits_leaves_no_codec_behind(monkeypatch):
    answers = SpeechLM._answers

    def closing(opened, results):
        opened.close()
        return answers(opened, results)

    monkeypatch.setattr(SpeechLM, "_answers", closing)
    before = threading.active_count()
    opened = SpeechLM.from_pretrained(contaudio(), backend="pytorch")
    found = opened.generate(
        [[["user", "text", "hello"]]] * 2, Decoding(enforce_modality=("audio",), max_step=30), seed=3
    )
    assert {(answer.outcome, answer.reason) for answer in found} == {
        ("refused", "the model was closed before the sound was decoded")
    }
    assert threading.active_count() == before


def test_a_coroutine_that_leaves_takes_its_request_along(model, monkeypatch):
    from espnet2_vllm.generation import Generation

    ended = []
    monkeypatch.setattr(Generation, "_done", lambda *args: ended.append(args))
    endless = Decoding(enforce_modality=("audio",), max_step=2000, min_step=2000)

    async def leave():
        task = asyncio.create_task(model.generate_async([["user", "text", "hello"]], endless, seed=3))
        while not model.engine._tasks:
            await asyncio.sleep(0.01)
        task.cancel()
        while model.engine._tasks:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(leave(), 60))
    assert not ended, "the request ran to its end"
    monkeypatch.undo()
    assert model.generate([["user", "text", "hello"]], GREEDY).outcome != "refused"


def test_requests_of_a_coroutine_that_is_cancelled_while_they_are_prepared_are_dropped(model, monkeypatch):
    prepare, go_on, prepared = model.utterances, threading.Event(), threading.Event()

    def slowly(*args):
        prepared.set()
        assert go_on.wait(60)
        return prepare(*args)

    monkeypatch.setattr(model, "utterances", slowly)
    endless = Decoding(temperature=1.0, max_step=100_000, min_step=100_000, enforce_modality=("text",))
    begun = []
    monkeypatch.setattr("espnet2_vllm.speechlm.Generation", lambda *args: begun.append(Generation(*args)) or begun[-1])

    async def leave():
        task = asyncio.create_task(model.generate_async([["user", "text", "hello"]], endless, seed=3))
        await asyncio.to_thread(prepared.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        while not begun or model.engine._tasks:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(leave(), 60))
    assert begun[0].future.cancelled()


# -- settings ----------------------------------------------------------------------------------------------------------
def test_a_wrong_setting_is_told_by_where_it_comes_from(model, tmp_path):
    with pytest.raises(ConfigError, match=r"^decoding settings: audio\.topk: "):
        model.config(Decoding(audio={"topk": 0}))
    file = tmp_path / "inference.yaml"
    file.write_text("audio: {temperature: 0.7, topk: 5, cfg: 1, max_step: 9}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"^decoding settings \(over {file}\): audio\.temperature: "):
        model.config(Decoding(temperature=-1.0, source=file))


def test_settings_over_settings(tmp_path):
    file = tmp_path / "inference.yaml"
    file.write_text("audio: {temperature: 0.7, topk: 5, cfg: 1, max_step: 9}\n", encoding="utf-8")
    settings = settings_of(
        "bagpiper", file, Decoding(cfg=3, max_step=4, audio={"topk": 7}, enforce_modality=("audio",))
    )
    assert settings == {
        "audio": {"temperature": 0.7, "topk": 7, "cfg": 3, "max_step": 4},
        "enforce_modality": ["audio"],
    }
    cut = {"codec_ssl": {"search_algo": "topp_sampling", "sampling_temperature": 0.9, "top_p": 0.8}}
    for change, search in (
        ({}, "topp"),
        ({"topk": 5}, "topk"),
        ({"temperature": 0.0}, "topk"),
        ({"max_step": 9}, "topp"),
    ):
        assert settings_of("opuslm", cut, Decoding(**change))["codec_ssl"]["search_algo"] == f"{search}_sampling"
    assert settings_of("opuslm", None, Decoding(audio={"top_p": 0.5}))["codec_ssl"]["search_algo"] == "topp_sampling"
    settings = settings_of("opuslm", None, Decoding(temperature=0.0, max_step=30))
    assert settings["codec_ssl"]["topk"] == 1 and settings["text_bpe"]["maxlen"] == 30
    file.write_text("enforce_modality: [text, text]\n", encoding="utf-8")
    for said in (file, str(file), Decoding(source=file), {"enforce_modality": ["text", "text"]}):
        chosen = settings_of("bagpiper", Decoding.over(said, enforce_modality=("text",)))
        assert chosen["enforce_modality"] == ["text", "text"]
    with pytest.raises(ConfigError, match="for Bagpiper"):
        settings_of("opuslm", Decoding(cfg=2))
    with pytest.raises(ConfigError, match="cannot be read"):
        settings_of("bagpiper", tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="text: expected settings by their names, got 3"):
        settings_of("bagpiper", {"text": 3}, Decoding(topk=3))


def test_a_file_of_settings_is_read_as_strictly_from_python_as_on_the_command_line(tmp_path):
    file = tmp_path / "inference.yaml"
    for text, words in (
        ("text: {topk: 1, topk: 2}\n", ":1: text.topk: is given twice"),
        ("text: &a [*a]\n", "refers to itself"),
        ("text: {topk: 2001-99-99}\n", "cannot read"),
        ("", "is empty"),
    ):
        file.write_text(text, encoding="utf-8")
        for choice in (file, Decoding(source=file)):
            with pytest.raises(ConfigError, match=words):
                settings_of("bagpiper", choice)


def test_settings_are_numbers_of_any_library():
    import torch

    numbers = {"temperature": np.float32(0.5), "topk": np.int64(5), "max_step": np.uint8(9)}
    found = load_decoding(settings_of("bagpiper", Decoding(cfg=np.float16(2), **numbers)), "bagpiper").audio
    assert (found.temperature, found.topk, found.max_rows, found.cfg) == (0.5, 5, 9, 2.0)
    assert type(found.topk) is int and type(found.temperature) is float
    for wrong in (
        {"topk": np.bool_(True)},
        {"topk": np.float32(5)},
        {"temperature": np.float64("nan")},
        {"topk": torch.tensor(5)},
    ):
        with pytest.raises(ConfigError, match="expected a"):
            load_decoding(settings_of("bagpiper", Decoding(**wrong)), "bagpiper")


def test_importing_is_light():
    code = "import sys; from espnet2_vllm import SpeechLM, Decoding, split_thinking; import espnet2_vllm as e; dir(e); "
    code += "print(*[m for m in ('torch', 'vllm', 'transformers', 'soundfile', 'yaml') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("", "yaml")


# -- OpusLM ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["text_dialogue_sys", "audio_dialogue_1turn"])
def test_opuslm_dialogues_are_espnets(name, monkeypatch):
    """Up to the assistant's first answers, which come without a history of generated rows."""
    (path,) = golden_files(f"opuslm/tiny-llama/cases/{name}.json")
    case, directory = json.loads(path.read_text(encoding="utf-8")), path.parent.parent
    monkeypatch.chdir(directory)  # arks are named from here
    files = json.loads((directory / case["data_json"]).read_text(encoding="utf-8"))["data_files"]
    table = dict(line.split() for line in open(files[0].split(",")[0], encoding="utf-8"))  # noqa: SIM115
    turns = json.loads(open(table[case["uid"]], encoding="utf-8").read())[case["uid"]]  # noqa: SIM115
    asked = [turn[0] for turn in turns].index("assistant")
    answers = next((i for i, turn in enumerate(turns) if i > asked and turn[0] != "assistant"), len(turns))
    with SpeechLM.from_pretrained(directory, backend="pytorch") as model:
        answer = model.generate(
            [[role, modality, content] for role, modality, _, content in turns[:asked]],
            {key: value for key, value in case["inference_config"].items() if key not in ("nproc", "dtype")},
            answer=[modality for _, modality, *_ in turns[asked:answers]],
        )
    with np.load(path.with_suffix(".npz")) as arrays:
        generated = [s for s in answer.result.hypotheses[0].segments if s.generated]
        assert len(generated) == answers - asked
        for place, segment in enumerate(generated, asked):
            np.testing.assert_array_equal(segment.rows, arrays[f"seg{place}.segment"])
    written = case["writer"]["dialogue.json"][0] if isinstance(case["writer"].get("dialogue.json"), list) else None
    if written is not None:
        texts = [turn[3] for turn in next(iter(written.values()))[asked:answers] if turn[1] == "text_bpe"]
        assert [m[2] for m in answer.messages if m[1] == "text"] == texts


def test_opuslm_describes_renders_and_names_its_turns():
    (config,) = golden_files("opuslm/tiny-llama/config.yaml")
    with SpeechLM.from_pretrained(config.parent, backend="pytorch", decoding=Decoding(max_step=20)) as model:
        size = len(model.checkpoint.layout.streams)
        assert isinstance(model.describe(np.zeros((10, size), np.int64), seed=1), str)
        wav, text = model.render("rain", seed=1)
        assert wav[:4] == b"RIFF" and isinstance(text, str)
        for wrong in ("text", (), None):
            with pytest.raises(DataError, match="answer: expected the modalities"):
                model.generate([["user", "text", "hello"]], answer=wrong, seed=1)
