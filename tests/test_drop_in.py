"""``espnet2_vllm`` in place of ``espnet2.bin.speechlm_inference``: messages, rows, settings, files, refusals and answers."""

import contextlib
import io
import os
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from release_folders import BASE, SFT, TTS, cached, make_hub

import espnet2_vllm
from espnet2_vllm import Decoding, SpeechLM, from_pretrained, split_thinking
from espnet2_vllm.audio import read_audio
from espnet2_vllm.errors import CheckpointError
from espnet2_vllm.generation import Generation
from espnet2_vllm.releases import PAPER_DECODING

HERE = Path(__file__).resolve().parent
GREEDY = {"text_temperature": 0.0, "audio_temperature": 0.0, "max_steps": 16}
pytest.importorskip("espnet2.bin.speechlm_inference", reason="the interface is ESPnet's from 202609 on")


def calls(sounds):
    """(method, arguments, options, decoding): every way to ask."""
    mono, stereo = (str(path) for path in sounds)
    scene = "A bell rings twice, and a voice says: 'come in'."
    plain = [
        ("describe", (mono,), {}),
        ("describe", (mono, "Who speaks?", "Choose one of four."), {}),
        ("describe", (stereo,), {"system": None, "prompt": ""}),
        ("render", (scene,), {}),
        ("render", (scene, None), {}),
        ("render", (scene,), {"system": "Be short."}),
        ("ask", ("Name three drums.",), {}),
        ("ask", ("Name three drums.", "Be short."), {}),
    ]
    sampled = [None, {}, {"cfg": 1.5, "topk": 3}, {"text_temperature": 0.3, "max_steps": 9, "max_tokens": 5}]
    return [(*call, decoding) for call in plain for decoding in (GREEDY, sampled[len(call[1]) + len(call[2])])]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    return make_hub(tmp_path_factory.mktemp("hub"), weights=True)


@pytest.fixture(scope="module")
def sounds(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("sounds"), np.random.default_rng(5)
    soundfile.write(folder / "mono.wav", rng.standard_normal(12_000) * 0.1, 16_000)
    soundfile.write(folder / "stereo.flac", rng.standard_normal((30_000, 2)) * 0.1, 44_100)
    return folder / "mono.wav", folder / "stereo.flac"


@pytest.fixture
def here(hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    return hub


@pytest.fixture(scope="module")
def folder(hub, tmp_path_factory):
    """A downloaded release, by its folder: ESPnet knows no release of that name."""
    place = tmp_path_factory.mktemp("release") / "mine"
    place.symlink_to(cached(hub, TTS), target_is_directory=True)
    return str(place)


@pytest.fixture(scope="module")
def theirs(hub, folder, sounds, tmp_path_factory):
    """What ESPnet did, by release: its dtype and what each call came to."""
    work = tmp_path_factory.mktemp("espnet")
    base = {"allow_base": True, "dtype": "float32", "attn_implementation": "eager"}
    releases = [(SFT, {}), (TTS, {"attn_implementation": "sdpa"}), (folder, {}), (BASE, base)]
    (work / "questions").write_bytes(pickle.dumps((releases, calls(sounds))))
    environment = os.environ | {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(HERE / "espnet_asked.py"), str(work / "questions"), str(work / "answers")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = pickle.loads((work / "answers").read_bytes())
    return {kind: found[name] for kind, name in (("sft", SFT), ("tts", TTS), ("folder", folder), ("base", BASE))}


class EnoughError(Exception):
    """Settings are seen; what would be sampled is not compared."""


class Spy:
    """What reaches the engine of ours: messages, rows of the prompt and settings."""

    def __init__(self, monkeypatch):
        from espnet2_vllm.prompt import bagpiper

        make = bagpiper.bagpiper_utterance

        def utterance(layout, tokenizer, messages, **options):
            self.messages = [tuple(message) for message in messages]
            return make(layout, tokenizer, messages, **options)

        def generation(thread, utterance, config, seed):
            self.rows, self.config = utterance.parts[0].rows, config  # the assistant's row comes apart, in ESPnet too
            if config.text.search != "greedy":
                raise EnoughError
            return Generation(thread, utterance, config, seed)

        monkeypatch.setattr(bagpiper, "bagpiper_utterance", utterance)
        monkeypatch.setattr("espnet2_vllm.speechlm.Generation", generation)


def in_espnets_words(config):
    """Our settings as its dict has them."""
    found = {"enforce_modality": list(config.enforce_modality)}
    for name in ("text", "audio"):
        block = getattr(config, name)
        greedy = block.search == "greedy"
        found[name] = {
            "temperature": 0 if greedy else block.temperature,
            "cfg": block.cfg,
            "max_step": block.max_rows,
            "min_step": block.min_rows,
        } | ({} if greedy else {"topk": block.topk})
    return found


def compare_settings(ours, theirs):
    assert ours["enforce_modality"] == theirs["enforce_modality"]
    for name in ("text", "audio"):
        wanted = dict(theirs[name])
        if wanted["temperature"] == 0:
            del wanted["topk"]
        assert ours[name] == wanted, name


def compare_messages(ours, theirs):
    assert [message[:2] for message in ours] == [tuple(message[:2]) for message in theirs]
    for (_, modality, mine), (_, _, their) in zip(ours, theirs, strict=True):
        if modality == "text":
            assert mine == their
        else:
            (samples, rate), (wanted, their_rate) = read_audio(mine), their
            np.testing.assert_array_equal(samples, wanted)
            assert rate == their_rate


@pytest.mark.parametrize("kind", ["sft", "tts", "folder", "base"])
def test_what_reaches_the_model_and_what_is_answered_is_espnets(kind, here, folder, theirs, sounds, monkeypatch):
    name = {"sft": SFT, "tts": TTS, "folder": folder, "base": BASE}[kind]
    dtype, asked = theirs[kind]
    spy, spoken = Spy(monkeypatch), 0
    options = {"allow_base": True, "attn_implementation": "eager"} if kind == "base" else {}
    with from_pretrained(name, device="cpu", backend="pytorch", **options) as model:
        assert model.dtype == dtype
        for (method, args, options, decoding), their in zip(calls(sounds), asked, strict=True):
            given = {} if decoding is None else {"decoding": Decoding(**decoding)}
            answer = None
            with contextlib.suppress(EnoughError):
                answer = getattr(model, method)(*args, **options, **given)
            compare_messages(spy.messages, their["messages"])
            np.testing.assert_array_equal(spy.rows, their["rows"])
            compare_settings(in_espnets_words(spy.config), their["config"])
            if decoding is not GREEDY:
                continue
            if method != "render":
                assert answer == their["answer"]
                continue
            (mine, text), (wav, their_text) = answer, their["answer"]
            assert text == their_text and (mine is None) == (wav is None)
            spoken += wav is not None
            (found, rate), (wanted, their_rate) = (soundfile.read(io.BytesIO(x), dtype="int16") for x in (mine, wav))
            assert rate == their_rate and found.shape == wanted.shape
            assert np.abs(found.astype(int) - wanted).max() <= 2
    assert spoken == 3


def test_constants_are_espnets():
    from espnet2.bin import speechlm_inference as espnet

    for name in ("TTS_SYSTEM", "UNDERSTAND_SYSTEM", "UNDERSTAND_PROMPT", "RELEASES", "PAPER_DECODING", "AUTO"):
        assert getattr(espnet2_vllm, name) == getattr(espnet, name), name
    assert {"from_pretrained", "from_server", "Decoding", "split_thinking"} <= {*espnet2_vllm.__all__}


def test_signatures_are_espnets():
    """The same names at the same places; what is ours stands behind them, by keyword."""
    import dataclasses
    import inspect

    from espnet2.bin import speechlm_inference as espnet

    from espnet2_vllm.served import ServedBagpiper

    pairs = [
        (SpeechLM.from_pretrained, espnet.LocalBagpiper.from_pretrained),
        (SpeechLM.describe, espnet.Bagpiper.describe),
        (SpeechLM.render, espnet.Bagpiper.render),
        (SpeechLM.ask, espnet.Bagpiper.ask),
        (espnet2_vllm.from_pretrained, espnet.from_pretrained),
        (espnet2_vllm.from_server, espnet.from_server),
        (ServedBagpiper.__init__, espnet.ServedBagpiper.__init__),
        (Decoding.tokens, espnet.Decoding.tokens),
    ]
    positional = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
    for ours, theirs in pairs:
        mine, wanted = (
            [p.name for p in inspect.signature(call).parameters.values() if p.kind in positional]
            for call in (ours, theirs)
        )
        assert mine == wanted, ours
    fields = [field.name for field in dataclasses.fields(Decoding) if not field.kw_only]
    assert fields == [field.name for field in dataclasses.fields(espnet.Decoding)]
    assert Decoding(0.1, 0.2, 3, 4.0, 5, 6).cfg == 4.0 and Decoding().tokens(True) == espnet.Decoding().tokens(True)


def test_thinking_is_split_as_espnet_does():
    from espnet2.bin import speechlm_inference as espnet

    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    pieces = ["<think>", "</think>", " ", "\n", "a b", "<", "think>", "é"]
    for text in ["", *("".join(rng.choices(pieces, k=rng.randrange(9))) for _ in range(2000))]:
        assert split_thinking(text) == espnet.split_thinking(text), repr(text)


# -- which files, and what is refused ----------------------------------------------------------------------------------
def test_the_base_is_refused_before_anything_is_fetched(monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    with pytest.raises(ValueError, match="never tuned to answer.*allow_base=True"):
        from_pretrained(BASE)


def test_a_release_folder_has_one_yaml_and_one_checkpoint(hub, here, tmp_path):
    from espnet2.bin import speechlm_inference as espnet

    release = tmp_path / "release"
    release.mkdir()
    for path in cached(hub, TTS).iterdir():
        (release / path.name).symlink_to(path.resolve())
    for name, argument in (("other.yaml", "train_config"), ("other.pt", "checkpoint")):
        (release / name).symlink_to(release / ("train.yaml" if argument == "train_config" else "model.pt"))
        for interface in (espnet, espnet2_vllm):
            with pytest.raises(FileNotFoundError, match=f"{name}.*{argument}="):
                interface.from_pretrained(release)
        model = from_pretrained(release, **{argument: release / name})
        assert model.checkpoint.layout.num_streams == 4
        (release / name).unlink()
    (release / "train.yaml").unlink()
    for interface in (espnet, espnet2_vllm):
        with pytest.raises(FileNotFoundError, match="train_config="):
            interface.from_pretrained(release)


def test_a_release_without_decoding_yamls_takes_the_papers_table(here):
    model = from_pretrained(BASE, allow_base=True, backend="pytorch")
    assert model.release.text == model.release.audio == PAPER_DECODING
    assert (PAPER_DECODING["audio"]["cfg"], PAPER_DECODING["audio"]["min_step"]) == (3, 50)


def test_a_converted_directory_says_what_its_release_says(hub, here, tmp_path):
    from espnet2_vllm.bin import convert

    release = tmp_path / "release"
    shutil.copytree(cached(hub, SFT), release)
    card = (
        '{"system": null, "describe": {"system": "Hear.", "prompt": null}, "render": {"enforce_modality": ["audio"]}}'
    )
    (release / "release.json").write_text(card)
    assert convert.main([str(release), str(tmp_path / "converted")]) == 0
    one, other = (from_pretrained(tmp_path / name, backend="pytorch") for name in ("release", "converted"))
    for name in ("system", "describe_system", "describe_prompt", "render_modalities", "dtype"):
        assert getattr(one.release, name) == getattr(other.release, name)
    assert (one.release.system, one.release.describe_system, one.release.render_modalities) == (
        None,
        "Hear.",
        ("audio",),
    )
    for name in ("text", "audio"):
        assert getattr(one.release, name).read_bytes() == getattr(other.release, name).read_bytes()
        assert getattr(other.release, name).parent == tmp_path / "converted"


def test_a_release_json_with_a_mistake_is_named(hub, here, tmp_path):
    release = tmp_path / "release"
    shutil.copytree(cached(hub, TTS), release)
    for content, message in (
        ("{", "cannot read .*release.json"),
        ("[]", "the top level is .*expected an object"),
        ('{"sytem": null}', "key sytem is unknown; did you mean system"),
        ('{"system": 3}', "system is 3, expected a text or null"),
        ('{"describe": {"promt": ""}}', r"key describe.promt is unknown; did you mean describe.prompt"),
        ('{"render": {"enforce_modality": "audio"}}', "render.enforce_modality is 'audio', expected a list"),
    ):
        (release / "release.json").write_text(content)
        with pytest.raises(CheckpointError, match=message):
            from_pretrained(release, backend="pytorch")


def test_a_missing_recording_is_said_first(here, tmp_path):
    with from_pretrained(TTS, backend="pytorch") as model:
        for name in (tmp_path / "none.wav", str(tmp_path / "none.wav"), "touch x |", ""):
            with pytest.raises(FileNotFoundError, match="no such audio file"):
                model.describe(name)
        assert model._thread is None


def test_a_recording_whose_name_reads_like_a_command_is_a_file(here, tmp_path, sounds):
    greedy = Decoding(**GREEDY)
    with from_pretrained(SFT, device="cpu", backend="pytorch") as model:
        wanted = model.describe(sounds[0], decoding=greedy)
        for name in ("touch stolen |", "a.wav:12", " b.wav "):
            path = tmp_path / name
            path.write_bytes(sounds[0].read_bytes())
            assert model.describe(path, decoding=greedy) == wanted
        assert not (tmp_path / "stolen").exists() and not Path("stolen").exists()
