"""egs/digits: the models that ship with the repository speak digits that others understand, and hear what is said to them."""

import io
import subprocess
import sys

import jiwer
import pytest
import soundfile
from conftest import REPO

from espnet2_vllm import Decoding, SpeechLM
from espnet2_vllm.io.keyed import read_keyed

RECIPE = REPO / "egs/digits/speechlm1"
MODELS = RECIPE / "models"
SEED = 3
SAID = [  # none of them is in the training set
    *("seven seven three seven", "five one five two eight", "two four seven", "five zero eight three", "six zero one"),
    *(
        "three four three nine six",
        "five six two eight",
        "six zero four six two",
        "five one eight four",
        "seven two nine five",
    ),
]
SPEAK, LISTEN, REPLY = (
    Decoding(source=RECIPE / "conf" / f"inference_{name}.yaml") for name in ("speak", "listen", "answer")
)


@pytest.fixture(scope="module", autouse=True)
def recipe():
    sys.path.insert(0, str(RECIPE / "local"))
    yield
    sys.path.remove(str(RECIPE / "local"))


@pytest.fixture(scope="module", params=["pytorch", "vllm"])
def model(request, tmp_path_factory):
    if request.param == "vllm":
        pytest.importorskip("vllm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ESPNET2_VLLM_CACHE", str(tmp_path_factory.getbasetemp() / "digits"))
        with SpeechLM.from_pretrained(MODELS / "bagpiper", backend=request.param) as model:
            yield model


def read_text(name):
    return read_keyed(RECIPE / "recordings" / name)


def error_rate(wanted, heard):
    return jiwer.wer(list(wanted), list(heard))


def test_it_says_and_hears_digits_by_the_methods_of_espnets_python_interface(model):
    """Its folder says, in release.json, that it was trained without a system turn and without a text behind the sound."""
    spoken = [model.render(text, seed=SEED) for text in SAID[:4]]
    assert [text for _, text in spoken] == [""] * 4
    heard = [model.describe(soundfile.read(io.BytesIO(wav), dtype="float32"), seed=SEED) for wav, _ in spoken]
    assert error_rate(SAID[:4], heard) < 0.1, heard
    texts = {key: text for key, text in read_text("text").items() if key.startswith("digits")}
    heard = [model.describe(RECIPE / "recordings" / f"{key}.flac", seed=SEED) for key in texts]
    assert error_rate(texts.values(), heard) < 0.1, heard


def test_what_it_says_is_understood_by_itself_and_by_an_independent_recogniser(model):
    from recognise import DigitRecogniser
    from systems import as_int16

    answers = model.generate([[["user", "text", text]] for text in SAID], SPEAK, seed=SEED)
    assert all(answer.outcome == "ok" and answer.audio for answer in answers)
    own = model.generate([[["user", "audio", answer.audio]] for answer in answers], LISTEN)
    # A word or two of 43; models/bagpiper/README.md has the rates over 500 strings.
    assert error_rate(SAID, [answer.text for answer in own]) < 0.05
    recognise = DigitRecogniser()
    heard = [recognise(as_int16(answer.audio[0])) for answer in answers]
    assert error_rate(SAID, heard) < 0.1, heard


def test_recordings_are_heard_as_what_was_said(model):
    texts = read_text("text")
    paths = [str(RECIPE / "recordings" / f"{name}.flac") for name in texts]
    answers = model.generate([[["user", "audio", path]] for path in paths], LISTEN)
    assert error_rate(texts.values(), [answer.text for answer in answers]) == 0


def test_spoken_questions_are_answered_in_text_and_then_in_speech(model):
    from lm_data import ANSWER
    from recognise import DigitRecogniser
    from systems import as_int16

    messages, heard, recognise = [["system", "text", ANSWER]], [], DigitRecogniser()
    for name, wanted in read_text("answer").items():
        messages.append(["user", "audio", str(RECIPE / "recordings" / f"{name}.flac")])
        answer = model.generate(messages, REPLY, seed=SEED)
        assert [message[1] for message in answer.messages] == ["text", "audio"], "the model chooses both by itself"
        assert answer.text == wanted
        heard.append(recognise(as_int16(answer.audio[0])))
        messages += map(list, answer.messages)
    assert error_rate(read_text("answer").values(), heard) < 0.15, heard


def test_the_opuslm_model_speaks_and_hears_through_its_command_line(tmp_path):
    """Text-to-speech with a speaker prompt, and recognition of what came out."""
    script = (
        "import sys; from pathlib import Path; from systems import OpusLMSystem; import soundfile\n"
        "folder, work, texts = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(',')\n"
        "voice = soundfile.read(sys.argv[4], dtype='int16')[0]\n"
        "system = OpusLMSystem(folder, 'pytorch', work, voice, folder / 'logmel_centres.npy')\n"
        "wavs = system.speak(texts, 'sampled', 1, 3)\n"
        "print(*system.listen(wavs), sep='\\n')\n"
    )
    voice = RECIPE / "recordings" / "voice.flac"
    command = [sys.executable, "-c", script, MODELS / "opuslm", tmp_path, ",".join(SAID), voice]
    done = subprocess.run(list(map(str, command)), cwd=RECIPE / "local", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    heard = done.stdout.splitlines()[-len(SAID) :]
    assert error_rate(SAID, heard) < 0.15, heard
