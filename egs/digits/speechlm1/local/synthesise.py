"""Make the data: texts spoken by espeak-ng, as Kaldi directories DIR/{train,answers,test}/{wav.scp,text,utt2spk} with wavs in arks.

An utterance's id is SPEAKER-KIND-NUMBER. The four speakers named tts* are each one fixed voice, the targets of text to speech; the
others vary in rate and pitch from utterance to utterance and are only listened to. ``answers`` holds what the questions of
``train`` ask for, in one voice.
"""

from __future__ import annotations

import argparse
import os
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import kaldiio
import numpy as np
from espeak import SAMPLE_RATE, Espeak, Voice
from texts import answer, draw

from espnet2_vllm.bin.options import at_least

TTS_VOICES = {
    "tts1": Voice("en-us+f2", rate=145),
    "tts2": Voice("en-us+f5", rate=150),
    "tts3": Voice("en-us+adam", rate=150),
    "tts4": Voice("en-us+f3", rate=145),
}
_OTHERS = [
    "en-us+f1",
    "en-us+f4",
    "en-us+m1",
    "en-us+m2",
    "en-us+m4",
    "en-us+m5",
    "en-us+m7",
    "en-us+m8",
    "en-us+Annie",
    "en-us+steph",
    "en-us+linda",
    "en-us+Alicia",
    "en-us+Gene",
    "en-us+Lee",
    "en-us+paul",
    "en",
    "en+f2",
    "en+m3",
    "en-gb-x-rp",
    "en-gb-x-rp+f5",
    "en-gb-scotland",
    "en-gb-scotland+f4",
    "en-029+m1",
]
_SHARES = {
    "digits": 50,
    "date": 12,
    "spell": 12,
    "command": 6,
    "question": 20,
}  # of the training utterances, in percent
_FEWEST = 100 // min(_SHARES.values()) + 1  # utterances of which there is one of every kind
_TTS_SHARE = 0.5  # of the utterances of every kind
_ANSWERING = "tts1"


@dataclass(frozen=True)
class Utterance:
    uid: str
    speaker: str
    text: str
    voice: Voice
    spelled: bool
    gain: float


def plan(count: int, shares: dict[str, int], *, test: bool, seed: int) -> list[Utterance]:
    """``count`` utterances, sorted by id: who says what, and how."""
    rng = random.Random(f"{seed} {'test' if test else 'train'}")
    planned = []
    for kind, share in shares.items():
        for number in range(count * share // 100):
            text = draw(kind, rng, test=test)
            speaker, voice, gain = _speaker(rng)
            planned.append(Utterance(f"{speaker}-{kind}-{number:05d}", speaker, text, voice, kind == "spell", gain))
    return sorted(planned, key=lambda utterance: utterance.uid)


def answers(planned: list[Utterance]) -> list[Utterance]:
    """The distinct answers to the questions among ``planned``. Letters, which are spelled, are known by their length."""
    texts = sorted({answer(one.text) for one in planned if "-question-" in one.uid})
    voice = TTS_VOICES[_ANSWERING]
    return [
        Utterance(f"{_ANSWERING}-answer-{number:05d}", _ANSWERING, text, voice, len(text.split()[0]) == 1, 1.0)
        for number, text in enumerate(texts)
    ]


def _speaker(rng: random.Random) -> tuple[str, Voice, float]:
    if rng.random() < _TTS_SHARE:
        speaker = rng.choice(sorted(TTS_VOICES))
        return speaker, TTS_VOICES[speaker], 1.0
    index = rng.randrange(len(_OTHERS))
    voice = Voice(_OTHERS[index], rate=rng.randint(120, 185), pitch=rng.randint(35, 65), range=rng.randint(30, 70))
    return f"asr{index:02d}", voice, 10 ** rng.uniform(-0.4, 0.15)


def _say(part: list[Utterance]) -> list[np.ndarray]:
    espeak = Espeak()
    wavs = []
    for one in part:
        wav = espeak.say(one.text, one.voice, spelled=one.spelled)
        wavs.append(np.clip(wav * one.gain, -32767, 32767).astype(np.int16))
    return wavs


def synthesise(planned: list[Utterance], directory: Path, jobs: int) -> float:
    """Write one Kaldi directory; the seconds of speech in it."""
    directory.mkdir(parents=True, exist_ok=True)
    size = -(-len(planned) // (4 * jobs))
    parts = [planned[start : start + size] for start in range(0, len(planned), size)]
    seconds = 0.0
    scp, ark = directory / "wav.scp", directory / "wav.ark"
    with ProcessPoolExecutor(jobs) as pool, kaldiio.WriteHelper(f"ark,scp:{ark},{scp}") as writer:
        for part, wavs in zip(parts, pool.map(_say, parts), strict=True):
            for one, wav in zip(part, wavs, strict=True):
                writer(one.uid, (SAMPLE_RATE, wav))
                seconds += len(wav) / SAMPLE_RATE
    for name, field in (("text", "text"), ("utt2spk", "speaker")):
        lines = "".join(f"{one.uid} {getattr(one, field)}\n" for one in planned)
        (directory / name).write_text(lines, encoding="utf-8")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path, help="where train/ and test/ are made")
    parser.add_argument("--train", type=at_least(_FEWEST), default=200000, help="training utterances")
    parser.add_argument(
        "--test", type=at_least(_FEWEST), default=1400, help="test utterances, half of them digit strings"
    )
    parser.add_argument("--seed", type=int, default=9)
    parser.add_argument("--jobs", type=at_least(1), default=os.cpu_count(), help="processes")
    args = parser.parse_args()
    train = plan(args.train, _SHARES, test=False, seed=args.seed)
    test = plan(args.test, _SHARES, test=True, seed=args.seed)
    for name, planned in (("train", train), ("answers", answers(train)), ("test", test)):
        seconds = synthesise(planned, args.directory / name, args.jobs)
        texts = len({one.text for one in planned})
        print(
            f"{name}: {len(planned)} utterances, {texts} texts, {seconds / 3600:.2f} hours, seed {args.seed}",
            flush=True,
        )


if __name__ == "__main__":
    main()
