"""The digits recipe's codec: what lies in the repository, and its training."""

import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("espnet2.tasks.gan_codec")
for need in ("espeakng_loader", "pocketsphinx", "soxr"):
    pytest.importorskip(need)

RECIPE = pathlib.Path(__file__).resolve().parents[2] / "egs" / "digits" / "speechlm1"
RELEASED = RECIPE / "models" / "codec"


def python(code, *arguments):
    """In a process of its own: espeak-ng has one global state, and the recipe's modules have common names."""
    run = subprocess.run(
        [sys.executable, *([] if code is None else ["-c", code]), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=RECIPE / "local",
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


SPEAK = """
import sys, pathlib, numpy as np
sys.path.insert(0, ".")
from codec_of import codec_of
from espeak import Espeak
from recognise import DigitRecogniser
from synthesise import TTS_VOICES
codec, espeak, recogniser = codec_of(pathlib.Path(sys.argv[1])), Espeak(), DigitRecogniser()
assert (codec.sample_rate, codec.hop, codec.num_codebooks, codec.codebook_size) == (16000, 320, 8, 256)
for text in ("three one zero two", "seven eight two", "zero three three nine six two"):
    wav = codec.decode(codec.encode(espeak.say(text, TTS_VOICES[sys.argv[2]]).astype(np.float32) / 32768))
    print(recogniser((np.clip(wav, -1, 1) * 32767).astype(np.int16)))
"""


def test_digits_are_understood_through_the_released_codec():
    heard = python(SPEAK, RELEASED, "tts1").splitlines()[-3:]
    assert heard == ["three one zero two", "seven eight two", "zero three three nine six two"]


def test_training_goes_on_with_the_decoder_and_leaves_the_codes_alone(tmp_path):
    python(None, "synthesise.py", tmp_path / "data", "--train", 50, "--test", 50, "--jobs", 1)
    common = [tmp_path / "data", tmp_path / "codec", "--threads", 1, "--seed", 3, "--device", "cpu", "--minutes", 5]
    printed = python(None, "train_codec.py", *common, "--steps", 2, "--unquantised", 1, "--log-every", 2)
    assert "seed 3" in printed
    assert "perplexity of books" in printed
    assert sorted(path.name for path in (tmp_path / "codec").iterdir()) == ["1epoch.pth", "config.yaml"]
    before = torch.load(tmp_path / "codec" / "1epoch.pth")
    python(None, "train_codec.py", *common, "--resume", "--joint", 0, "--steps", 1)
    after = torch.load(tmp_path / "codec" / "1epoch.pth")
    assert before.keys() == after.keys()
    moved = {name.split(".")[2] for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"decoder"}
