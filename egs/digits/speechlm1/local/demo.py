"""The small models, shown: they speak, hear what they said, and answer spoken questions. ``demo.py bagpiper|opuslm OUTPUT``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from lm_data import ANSWER
from logmel_units import read_centres
from systems import RATE, codes_of

from espnet2_vllm import Decoding, SpeechLM
from espnet2_vllm.io.keyed import read_keyed

RECIPE = Path(__file__).resolve().parent.parent
SPOKEN = "three one four"
SEED = 8
# What is taught as text is said as the most probable; sound is sampled.
SPEAK = Decoding(source=RECIPE / "conf" / "inference_speak.yaml")
LISTEN = Decoding(source=RECIPE / "conf" / "inference_listen.yaml")
REPLY = Decoding(source=RECIPE / "conf" / "inference_answer.yaml")


class Shown:
    """Prints what happens and keeps the wavs. ``mistakes`` are the model's own, ``silent`` what gave no sound."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.wavs: list[Path] = []
        self.mistakes: list[str] = []
        self.silent: list[str] = []
        output.mkdir(parents=True, exist_ok=True)

    def keep(self, name: str, audio: tuple[np.ndarray, int] | None) -> Path | None:
        if audio is None:
            self.silent.append(name)
            return None
        path = self.output / f"{name}.wav"
        soundfile.write(path, *audio)
        self.wavs.append(path)
        print(f"    {len(audio[0]) / audio[1]:.1f} s of speech: {path}")
        return path

    def compare(self, name: str, said: str, heard: str) -> None:
        right = said == heard
        print(f"    it hears: {heard!r}" + ("" if right else f"  (said was {said!r})"))
        if not right:
            self.mistakes.append(f"{name}: {heard!r} in place of {said!r}")


# -- the model of the new style ----------------------------------------------------------------------------------------
def show_bagpiper(model: SpeechLM, shown: Shown, transcripts: dict[str, str]) -> None:
    print(f"\n1. It speaks: {SPOKEN!r}, with guidance (conf/inference_speak.yaml)")
    spoken = shown.keep(SPOKEN.replace(" ", "_"), model.generate([["user", "text", SPOKEN]], SPEAK, seed=SEED).audio)
    if spoken:
        print("\n2. It listens: the same wav in, its words out")
        shown.compare(spoken.stem, SPOKEN, model.generate([["user", "audio", str(spoken)]], LISTEN, seed=SEED).text)
    converse(model, shown, sorted((RECIPE / "recordings").glob("question*.flac")))
    if transcripts:
        print("\n4. AN4's transcripts, spoken together in one batch; some of their words it was never taught")
        say_transcripts(model, shown, transcripts)


def converse(model: SpeechLM, shown: Shown, questions: Sequence[Path]) -> None:
    """A question, then another one: what was said before stays, as sound."""
    print("\n3. Two turns of spoken questions, answered in text and in speech; the model itself chooses to speak")
    texts = read_keyed(RECIPE / "recordings" / "text")
    answers = read_keyed(RECIPE / "recordings" / "answer")
    messages: list[list[Any]] = [["system", "text", ANSWER]]
    for number, question in enumerate(questions, 1):
        print(f"  user:      {texts[question.stem]!r}  {question}")
        messages.append(["user", "audio", str(question)])
        answer = model.generate(messages, REPLY, seed=SEED)
        messages += map(list, answer.messages)
        print(f"  assistant: {answer.text!r}")
        if answer.text != answers[question.stem]:
            shown.mistakes.append(f"turn {number}: {answer.text!r} in place of {answers[question.stem]!r}")
        shown.keep(f"turn{number}", answer.audio)


def say_transcripts(model: SpeechLM, shown: Shown, transcripts: dict[str, str]) -> None:
    answers = model.generate([[["user", "text", text]] for text in transcripts.values()], SPEAK, seed=SEED)
    for key, answer in zip(transcripts, answers, strict=True):
        print(f"  {key}: {transcripts[key]}")
        shown.keep(key, answer.audio)


# -- the model of the OpusLM kind --------------------------------------------------------------------------------------
def show_opuslm(model: SpeechLM, shown: Shown, folder: Path) -> None:
    texts, answers = (read_keyed(RECIPE / "recordings" / name) for name in ("text", "answer"))
    centres = read_centres(folder / "logmel_centres.npy")
    print(
        "\nThe model of the OpusLM kind (9 streams: log-mel units and codes) hears the same questions, answers and says it"
    )
    for question in sorted((RECIPE / "recordings").glob("question*.flac")):
        wav, rate = soundfile.read(question, dtype="int16")
        assert rate == RATE, f"{question}: {rate} Hz"
        codes = codes_of(wav, model.speech.codec, centres, model.checkpoint.layout)
        answer = model.generate([["user", "audio", codes]], seed=SEED, answer=("text", "audio"))
        print(f"  user:      {texts[question.stem]!r}\n  assistant: {answer.text!r}")
        if answer.text != answers[question.stem]:
            shown.mistakes.append(f"{question.stem}: {answer.text!r} in place of {answers[question.stem]!r}")
        shown.keep(f"opuslm_{question.stem}", answer.audio)


def main() -> int:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", choices=["bagpiper", "opuslm"])
    parser.add_argument("output", type=Path, help="where the wavs go")
    parser.add_argument("--models", type=Path, default=RECIPE / "models")
    parser.add_argument("--transcripts", type=Path, help="AN4's transcripts (a Kaldi text file), to be said as well")
    parser.add_argument("--backend", choices=["vllm", "pytorch"], default="vllm")
    args = parser.parse_args()
    shown = Shown(args.output)
    folder = args.models / args.family
    with SpeechLM.from_pretrained(folder, backend=args.backend) as model:
        if args.family == "bagpiper":
            show_bagpiper(model, shown, read_keyed(args.transcripts) if args.transcripts else {})
        else:
            show_opuslm(model, shown, folder)
    for mistake in shown.mistakes:
        print(f"a mistake of the model: {mistake}")
    for name in shown.silent:
        print(f"demo.py: no sound came of {name}", file=sys.stderr)
    if shown.wavs:
        print(f"{len(shown.wavs)} wavs in {args.output.absolute()}")
    return 1 if shown.silent else 0


if __name__ == "__main__":
    sys.exit(main())
