"""What the digits recipe says and hears: its texts, espeak-ng, and the independent recogniser."""

import importlib
import pathlib
import random
import sys

import numpy as np
import pytest

LOCAL = pathlib.Path(__file__).resolve().parents[2] / "egs" / "digits" / "speechlm1" / "local"
SEED = 5


@pytest.fixture(autouse=True)
def _recipe_modules(monkeypatch):
    monkeypatch.syspath_prepend(str(LOCAL))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if (LOCAL / f"{name}.py").is_file():
            del sys.modules[name]


def load(name, *needs):
    for need in needs:
        pytest.importorskip(need)
    return importlib.import_module(name)


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("count from two to five", "two three four five"),
        ("count from five to two", "five four three two"),
        ("what comes after three", "four"),
        ("what comes before three", "two"),
        ("repeat three one four", "three one four"),
        ("spell cat", "c a t"),
    ],
)
def test_questions_have_one_answer(question, expected):
    assert load("texts").answer(question) == expected


@pytest.mark.parametrize(
    "text", ["what comes after nine", "what comes before zero", "three one four", "repeat", "spell two words"]
)
def test_what_is_no_question_is_refused(text):
    with pytest.raises(ValueError, match="no question"):
        load("texts").answer(text)


def test_training_and_test_texts_are_disjoint_and_answers_are_texts_too():
    texts = load("texts")
    rng = random.Random(SEED)
    drawn = {
        (kind, test): {texts.draw(kind, rng, test=test) for _ in range(400)}
        for kind in texts.KINDS
        for test in (False, True)
    }
    for kind in ("date", "spell"):
        assert not drawn[kind, True] & drawn[kind, False]
    long = {test: {text for text in drawn["digits", test] if len(text.split()) >= 3} for test in (True, False)}
    assert min(map(len, long.values())) > 100
    assert not long[True] & long[False]
    for test in (True, False):
        for question in drawn["question", test]:
            answer = texts.answer(question)
            assert set(answer.split()) <= set(texts.DIGITS) or all(len(letter) == 1 for letter in answer.split())
            if question.startswith("repeat ") and len(answer.split()) >= 3:
                assert texts.is_test(answer) == test


def test_espeak_says_what_the_recogniser_hears(capsys):
    espeak = load("espeak", "espeakng_loader", "soxr")
    recogniser = load("recognise", "pocketsphinx").DigitRecogniser()
    voices = load("synthesise").TTS_VOICES
    speaker = espeak.Espeak()
    with capsys.disabled():  # pocketsphinx writes past Python
        for voice in voices.values():
            wav = speaker.say("three one four", voice)
            assert wav.dtype == np.int16
            assert 0.8 < len(wav) / espeak.SAMPLE_RATE < 2.5
            assert not wav[:1000].any()
            assert recogniser(wav) == "three one four"
    # A sentence and letters: "a" alone would be the article.
    assert len(speaker.say("c a t", voices["tts1"], spelled=True)) > 8000
    with pytest.raises(ValueError, match="no voice"):
        speaker.say("one", espeak.Voice("nobody"))


def test_kaldi_directory_is_the_same_from_the_same_seed(tmp_path):
    synthesise = load("synthesise", "espeakng_loader", "soxr")
    kaldiio = pytest.importorskip("kaldiio")
    planned = synthesise.plan(20, {"digits": 50, "spell": 50}, test=True, seed=SEED)
    assert planned == synthesise.plan(20, {"digits": 50, "spell": 50}, test=True, seed=SEED)
    seconds = synthesise.synthesise(planned, tmp_path, 1)
    uids = [line.split()[0] for line in (tmp_path / "text").read_text(encoding="utf-8").splitlines()]
    speakers = dict(line.split() for line in (tmp_path / "utt2spk").read_text(encoding="utf-8").splitlines())
    wavs = kaldiio.load_scp(str(tmp_path / "wav.scp"))
    assert uids == sorted(uids) == sorted(wavs) == sorted(speakers)
    assert len(uids) == 20
    assert all(uid.startswith(speaker) for uid, speaker in speakers.items())
    assert sum(len(wavs[uid][1]) for uid in uids) / 16000 == pytest.approx(seconds)
