"""How well a checkpoint speaks and listens: word error rates by pocketsphinx (a grammar of digits) and by the model itself.

Every measurement is a line of OUTPUT/measurements.jsonl, a later one in place of an earlier one of the same thing. From all of them
OUTPUT/quality.md, .json and .png are made.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jiwer
import kaldiio
import numpy as np
import soundfile
from lm_data import OWN_VOICE
from lm_rows import Spoken
from quality_report import write_report
from recognise import DigitRecogniser
from systems import RATE, BagpiperSystem, OpusLMSystem
from texts import answer

from espnet2_vllm.checkpoint import ensure_converted
from espnet2_vllm.io.keyed import read_keyed

SEED = 9
_RESAMPLES = 2000
_OWN_TONGUE = "espeak-ng"  # whose recordings are the reference


@dataclass(frozen=True)
class Measurement:
    """One word error rate, in percent, with the bounds of its 95 % interval (bootstrap over utterances)."""

    family: str
    backend: str
    task: str
    search: str
    scale: float
    judge: str
    utterances: int
    wer: float
    low: float
    high: float
    seconds: float

    @property
    def key(self) -> tuple[Any, ...]:
        return self.family, self.backend, self.task, self.search, self.scale, self.judge


def word_errors(wanted: Sequence[str], heard: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """(errors, words), a number for each utterance."""
    found = [jiwer.process_words(reference, words) for reference, words in zip(wanted, heard, strict=True)]
    errors = [one.substitutions + one.deletions + one.insertions for one in found]
    return np.array(errors), np.array([len(text.split()) for text in wanted])


def interval(errors: np.ndarray, words: np.ndarray, seed: int = SEED) -> tuple[float, float, float]:
    """(rate, low, high) in percent."""
    rng = np.random.default_rng(seed)
    picks = rng.integers(len(errors), size=(_RESAMPLES, len(errors)))
    rates = 100 * errors[picks].sum(1) / words[picks].sum(1)
    low, high = np.percentile(rates, [2.5, 97.5])
    return 100 * errors.sum() / words.sum(), float(low), float(high)


def _recognise(wavs: Sequence[np.ndarray]) -> list[str]:
    recogniser = DigitRecogniser()
    return [recogniser(wav) if len(wav) else "" for wav in wavs]


class Evaluation:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.family = ensure_converted(args.checkpoint).family
        nothing = np.zeros((0, 0), np.int64)
        corpus = [Spoken(uid, text, nothing) for uid, text in read_keyed(args.data / "text").items()]
        seen = {text for file in args.seen for text in read_keyed(file).values()}
        digits = sorted((one for one in corpus if one.kind == "digits"), key=lambda one: one.uid[::-1])
        self.digits = [one for one in digits[args.first :] if one.text not in seen]
        print(f"{len(self.digits)} strings of digits, of which none is among {len(seen)} texts that were seen")
        self.questions = [one for one in corpus if one.kind == "question"]
        self.wavs = kaldiio.load_scp(str(args.data / "wav.scp"))
        own = (self.wavs[one.uid][1] for one in corpus if one.speaker == OWN_VOICE)
        self.voice = next(wav for wav in own if 2 * RATE < len(wav) < 2.5 * RATE)
        args.output.mkdir(parents=True, exist_ok=True)
        self.pool = ProcessPoolExecutor(args.jobs)

    def run(self) -> None:
        args = self.args
        if "reference" in args.tasks:
            self.reference(self.digits[: args.utterances])
        for backend in args.backend:
            work = args.output / "work"
            work.mkdir(exist_ok=True)
            system = self._system(backend, work)
            if "listen" in args.tasks:
                self.listen(system, backend, self.digits[: args.utterances])
            if "speak" in args.tasks:
                for search in args.search:
                    for scale in args.scales if system.guided else [1.0]:
                        count = args.utterances if scale in args.full_scales else args.curve_utterances
                        self.speak(system, backend, search, scale, self.digits[:count])
            if "answer" in args.tasks and system.guided:
                self.answer(system, backend, self.questions[: args.curve_utterances])
            system.close()
        write_report(args.output)

    def _system(self, backend: str, work: Path) -> BagpiperSystem | OpusLMSystem:
        if self.family == "bagpiper":
            return BagpiperSystem(self.args.checkpoint, backend, work)
        return OpusLMSystem(
            self.args.checkpoint, backend, work, self.voice, self.args.checkpoint / "logmel_centres.npy"
        )

    def reference(self, utterances: Sequence[Spoken]) -> None:
        """What pocketsphinx makes of the recordings themselves: the floor of every figure."""
        for name in ("all voices", OWN_VOICE):
            group = [one for one in utterances if name in ("all voices", one.speaker)]
            start = time.monotonic()
            heard = self._sphinx([self.wavs[one.uid][1] for one in group])
            self._note(_OWN_TONGUE, name, "speak", "", 1.0, "pocketsphinx", group, heard, start)

    def listen(self, system: Any, backend: str, utterances: Sequence[Spoken]) -> None:
        start = time.monotonic()
        heard = system.listen([self.wavs[one.uid][1] for one in utterances])
        self._note(self.family, backend, "listen", "greedy", 1.0, "itself", utterances, heard, start)

    def speak(self, system: Any, backend: str, search: str, scale: float, utterances: Sequence[Spoken]) -> None:
        start = time.monotonic()
        wavs = system.speak([one.text for one in utterances], search, scale, self.args.seed)
        ended = time.monotonic()
        print(
            f"spoke {len(wavs)} texts, {sum(map(len, wavs)) / RATE:.0f} s of speech, in {ended - start:.0f} s",
            flush=True,
        )
        folder = self.args.output / "wavs" / f"{self.family}_{backend}_{search}_{scale:g}"
        folder.mkdir(parents=True, exist_ok=True)
        for one, wav in zip(utterances[:20], wavs, strict=False):
            soundfile.write(folder / f"{one.text.replace(' ', '_')}.wav", wav, RATE)
        shared = (self.family, backend, "speak", search, scale)
        self._note(*shared, "pocketsphinx", utterances, self._sphinx(wavs), start, ended)
        self._note(*shared, "itself", utterances, system.listen(wavs), start, ended)

    def answer(self, system: Any, backend: str, questions: Sequence[Spoken]) -> None:
        start = time.monotonic()
        scale = self.args.full_scales[0]
        found = system.answer([self.wavs[one.uid][1] for one in questions], scale, self.args.seed)
        wanted = [answer(one.text) for one in questions]
        shared = (self.family, backend, "answer", "sampled", scale)
        self._note(*shared, "its text", questions, [text for text, _ in found], start, wanted=wanted)
        spoken = [i for i, text in enumerate(wanted) if len(text.split()[0]) > 1]
        heard = self._sphinx([found[i][1] for i in spoken])
        group, digits = [questions[i] for i in spoken], [wanted[i] for i in spoken]
        self._note(*shared, "pocketsphinx", group, heard, start, wanted=digits)

    def _sphinx(self, wavs: list[np.ndarray]) -> list[str]:
        size = max(len(wavs) // (4 * self.args.jobs), 1)
        parts = [wavs[start : start + size] for start in range(0, len(wavs), size)]
        return [text for part in self.pool.map(_recognise, parts) for text in part]

    def _note(
        self,
        family: str,
        backend: str,
        task: str,
        search: str,
        scale: float,
        judge: str,
        utterances: Sequence[Spoken],
        heard: Sequence[str],
        start: float,
        ended: float | None = None,
        wanted: Sequence[str] | None = None,
    ) -> None:
        wanted = wanted or [one.text for one in utterances]
        rate, low, high = interval(*word_errors(wanted, heard))
        seconds = (ended or time.monotonic()) - start
        found = Measurement(family, backend, task, search, scale, judge, len(wanted), rate, low, high, seconds)
        print(f"{family} {backend} {task} {search} cfg {scale:g}, judged by {judge}: WER {rate:.1f} % "
              f"[{low:.1f}, {high:.1f}] of {len(wanted)} utterances, {seconds:.0f} s", flush=True)  # fmt: skip
        for reference, words in [pair for pair in zip(wanted, heard, strict=True) if pair[0] != pair[1]][:4]:
            print(f"    {reference!r} became {words!r}", flush=True)
        path = self.args.output / "measurements.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        kept = [line for line in lines if Measurement(**json.loads(line)).key != found.key]
        path.write_text("\n".join([*kept, json.dumps(asdict(found))]) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="Kaldi directory of the test utterances")
    parser.add_argument(
        "--seen", type=Path, nargs="*", default=[], help="text files of training: what is in them is not measured"
    )
    parser.add_argument("--first", type=int, default=0, help="leave out so many strings, by which a model was chosen")
    parser.add_argument("--backend", nargs="+", default=["vllm"], choices=["vllm", "pytorch"])
    parser.add_argument("--tasks", nargs="+", default=["reference", "listen", "speak", "answer"])
    parser.add_argument("--search", nargs="+", default=["greedy", "sampled"])
    parser.add_argument("--scales", nargs="+", type=float, default=[1.0, 1.5, 2.0, 3.0], help="of guidance (Bagpiper)")
    parser.add_argument("--full-scales", nargs="+", type=float, default=[1.5, 1.0], help="measured on all utterances")
    parser.add_argument("--utterances", type=int, default=500)
    parser.add_argument("--curve-utterances", type=int, default=200, help="for the other scales, and spoken questions")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--jobs", type=int, default=2, help="processes of pocketsphinx")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    Evaluation(args).run()


if __name__ == "__main__":
    main()
