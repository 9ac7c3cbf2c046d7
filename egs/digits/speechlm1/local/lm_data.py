"""From utterances to examples: which tasks the small models learn, and in which shares."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_model import Batch
from lm_rows import Example, Spoken, bagpiper_example, opuslm_example, without_condition
from texts import answer

from espnet2_vllm.io.keyed import read_keyed
from espnet2_vllm.layout import Layout
from espnet2_vllm.prompt.opuslm import Facts, Turn
from espnet2_vllm.prompt.tasks import TASKS

# System prompts of the Bagpiper model. Without one it says the text that it is given and writes down the speech that it hears.
ANSWER = "answer"
VOICES = {"tts1": "voice one", "tts2": "voice two", "tts3": "voice three", "tts4": "voice four"}
OWN_VOICE = "tts1"  # speaks where no voice is asked for
_OWN_SHARE = 0.55
_TTS_LISTENED = 0.3  # of the recordings to be heard, those of the voices that also speak
_NO_LIMIT = 10**6
_SHORT_SHARE = 0.25  # of draws that are of the shortest quarter
_KINDS = {"digits": 0.7, "date": 0.08, "spell": 0.08, "command": 0.04, "question": 0.1}


def load_corpus(data: Path, codes: Path, units: Path | None = None) -> list[Spoken]:
    """``data``: a Kaldi directory; ``codes`` and ``units``: npz files, an array for each of its ids."""
    texts = read_keyed(data / "text")
    with np.load(codes) as file:
        known = set(file.files)
        arrays = {uid: file[uid] for uid in texts if uid in known}
    classes: dict[str, np.ndarray] = {}
    if units is not None:
        with np.load(units) as file:
            classes = {uid: file[uid] for uid in arrays}
    missing = len(texts) - len(arrays)
    print(
        f"{data}: {len(arrays)} utterances, {sum(map(len, arrays.values()))} frames"
        + f", {missing} without codes" * bool(missing)
    )
    return [Spoken(uid, texts[uid], codes, classes.get(uid)) for uid, codes in arrays.items()]


def held_out(corpus: Sequence[Spoken], one_in: int) -> tuple[list[Spoken], list[Spoken]]:
    """Utterances that are only looked at, the first one in so many, and those to be trained on.

    Each part has some of what ``Pool.draw`` is asked for, however few there are. ValueError if there are too few for that.
    """
    held, others = list(corpus[: len(corpus) // one_in]), list(corpus[len(corpus) // one_in :])
    groups = {
        OWN_VOICE: lambda one: one.speaker == OWN_VOICE,
        "the voices that are only listened to": lambda one: not one.is_target,
    }
    for name, belongs in groups.items():
        places = [place for place, one in enumerate(others) if belongs(one) and one.kind in _KINDS]
        if not any(belongs(one) and one.kind in _KINDS for one in held):
            held += [others.pop(place) for place in places[:1]]
            del places[:1]
        if not places:
            raise ValueError(
                f"of {len(corpus)} utterances fewer than two are of {name}: make more (--train_utterances of run.sh)"
            )
    return held, others


class Pool:
    """Utterances by what they are good for; ``limit`` is the most frames that are drawn, in forked processes too."""

    def __init__(self, corpus: Sequence[Spoken], rng: random.Random) -> None:
        self.rng = rng
        self._limit = multiprocessing.Value("q", _NO_LIMIT)
        self.fill(corpus)

    @property
    def limit(self) -> int:
        return self._limit.value

    @limit.setter
    def limit(self, frames: int) -> None:
        self._limit.value = frames

    def fill(self, corpus: Sequence[Spoken]) -> None:
        self._lists: dict[tuple[str, str], list[Spoken]] = {}
        self._answers: dict[tuple[str, str], list[Spoken]] = {}
        by_length = sorted(corpus, key=lambda spoken: len(spoken.codes))
        for one in by_length:
            for group in (one.speaker, "tts" if one.is_target else "asr"):
                self._lists.setdefault((group, one.kind), []).append(one)
            if one.is_target:
                self._answers.setdefault((one.speaker, one.text), []).append(one)
        self._questions = [
            one for one in by_length if one.kind == "question" and self.spoken_answer(one.text, OWN_VOICE)
        ]

    def draw(self, group: str) -> Spoken:
        """An utterance of a speaker, or of all that are ``tts`` or ``asr``, of a kind by its share."""
        kinds = [kind for kind in _KINDS if self._lists.get((group, kind))]
        (kind,) = self.rng.choices(kinds, [_KINDS[kind] for kind in kinds])
        return self._within(self._lists[group, kind])

    def question(self) -> Spoken:
        return self._within(self._questions)

    def spoken_answer(self, question: str, speaker: str) -> Spoken | None:
        found = self._answers.get((speaker, answer(question)))
        return self.rng.choice(found) if found else None

    @property
    def converses(self) -> bool:
        """Whether there are questions, and time for them: dialogues come when the lengths of utterances are no longer limited."""
        return bool(self._questions) and self.limit == _NO_LIMIT

    def _within(self, utterances: list[Spoken]) -> Spoken:
        """Of utterances sorted by length; a tenth is always allowed. Short ones, where ends are learnt, come more often."""
        low, high = max(len(utterances) // 10, 1), len(utterances)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if len(utterances[middle].codes) <= self.limit else (low, middle)
        if self.rng.random() < _SHORT_SHARE:
            low = max(low // 4, 1)
        return utterances[self.rng.randrange(low)]


# -- Bagpiper ----------------------------------------------------------------------------------------------------------
class BagpiperTasks:
    """Draws examples. ``dropout``: share of those with a spoken answer whose condition is taken away (ESPnet's ``audio_cfg``)."""

    def __init__(self, layout: Layout, tokenizer: Any, pool: Pool, shares: dict[str, float], dropout: float) -> None:
        self.layout, self.tokenizer, self.pool, self.shares, self.dropout = layout, tokenizer, pool, shares, dropout

    def draw(self) -> Example:
        rng = self.pool.rng
        shares = {
            task: share for task, share in self.shares.items() if self.pool.converses or not task.startswith("dialogue")
        }
        (task,) = rng.choices(list(shares), list(shares.values()))
        example = bagpiper_example(self.layout, self.tokenizer, getattr(self, task)(), task)
        if example.spoken and rng.random() < self.dropout:
            return without_condition(example, self.layout)
        return example

    def text_to_audio(self) -> list[list[Any]]:
        plain = self.pool.rng.random() < _OWN_SHARE
        spoken = self.pool.draw(OWN_VOICE if plain else "tts")
        voice = [] if plain else [["system", "text", VOICES[spoken.speaker]]]
        return [*voice, ["user", "text", spoken.text], ["assistant", "audio", spoken]]

    def heard(self, spoken: Spoken) -> Example:
        messages = [["user", "audio", spoken], ["assistant", "text", spoken.text]]
        return bagpiper_example(self.layout, self.tokenizer, messages, "audio_to_text")

    def audio_to_text(self) -> list[list[Any]]:
        heard = self.pool.draw("tts" if self.pool.rng.random() < _TTS_LISTENED else "asr")
        return [["user", "audio", heard], ["assistant", "text", heard.text]]

    def dialogue_text(self) -> list[list[Any]]:
        return [["system", "text", ANSWER], *self._turn(False)]

    def dialogue_audio(self) -> list[list[Any]]:
        return [["system", "text", ANSWER], *self._turn(True)]

    def dialogue_two(self) -> list[list[Any]]:
        return [
            ["system", "text", ANSWER],
            *self._turn(self.pool.rng.random() < 0.7),
            *self._turn(self.pool.rng.random() < 0.7),
        ]

    def _turn(self, aloud: bool) -> list[list[Any]]:
        question = self.pool.question()
        reply = self.pool.spoken_answer(question.text, OWN_VOICE)
        asked = ["user", "audio", question] if aloud else ["user", "text", question.text]
        return [asked, ["assistant", "text", reply.text], ["assistant", "audio", reply]]


# -- OpusLM ------------------------------------------------------------------------------------------------------------
class OpusLMTasks:
    """Draws examples of the tasks' own names in ESPnet."""

    def __init__(self, layout: Layout, tokenizer: Any, pool: Pool, shares: dict[str, float], facts: Facts) -> None:
        self.layout, self.tokenizer, self.pool, self.shares, self.facts = layout, tokenizer, pool, shares, facts

    def draw(self) -> Example:
        rng = self.pool.rng
        shares = {task: share for task, share in self.shares.items() if self.pool.converses or task != "audio_dialogue"}
        (task,) = rng.choices(list(shares), list(shares.values()))
        entries = getattr(self, task)()
        return opuslm_example(self.layout, self.tokenizer, TASKS[task], entries, self.facts, rng)

    def codec_ssl_tts(self) -> dict[str, Any]:
        spoken = self.pool.draw("tts")
        prompt = self.pool.draw(spoken.speaker)
        return {"text": spoken.text, "utt2spk": prompt, "wav.scp": spoken}

    def heard(self, spoken: Spoken) -> Example:
        entries = {"wav.scp": spoken, "text": spoken.text}
        return opuslm_example(self.layout, self.tokenizer, TASKS["codec_ssl_asr"], entries, self.facts, self.pool.rng)

    def codec_ssl_asr(self) -> dict[str, Any]:
        heard = self.pool.draw("tts" if self.pool.rng.random() < _TTS_LISTENED else "asr")
        return {"wav.scp": heard, "text": heard.text}

    def audio_dialogue(self) -> dict[str, Any]:
        question = self.pool.question()
        reply = self.pool.spoken_answer(question.text, OWN_VOICE)
        turns = [
            Turn("user", "codec_ssl", False, question),
            Turn("assistant", "text_bpe", True, reply.text),
            Turn("assistant", "codec_ssl", True, reply),
        ]
        return {"dialogue": turns}


# -- batches -----------------------------------------------------------------------------------------------------------
def batches(draw: Callable[[], Example], rng: random.Random, rows: int, ahead: int = 8) -> Iterator[list[Example]]:
    """Examples of like length together, at most ``rows`` rows a batch with what fills them up; in random order."""
    while True:
        drawn: list[Example] = []
        while sum(map(len, drawn)) < rows * ahead:
            drawn.append(draw())
        groups = grouped(drawn, rows)
        rng.shuffle(groups)
        yield from groups


def grouped(items: Sequence[Any], rows: int, length: Callable[[Any], int] = len) -> list[list[Any]]:
    """Items of like length together, at most ``rows`` rows a group with what fills them up, but one item at least."""
    groups: list[list[Any]] = [[]]
    for item in sorted(items, key=length):
        if groups[-1] and length(item) * (len(groups[-1]) + 1) > rows:
            groups.append([])
        groups[-1].append(item)
    return groups


def loader(source: torch.utils.data.Dataset, workers: int) -> torch.utils.data.DataLoader:
    """Of batches as they are. ``workers`` forked processes make them ahead; 0: this process."""
    forked = {"multiprocessing_context": "fork", "prefetch_factor": 4} if workers else {}
    return torch.utils.data.DataLoader(source, batch_size=None, num_workers=workers, **forked)


class Batches(torch.utils.data.IterableDataset):
    """Batches without end, in every process that makes them from a seed of its own."""

    def __init__(self, tasks: BagpiperTasks | OpusLMTasks, rows: int, noise: float, seed: str) -> None:
        self._tasks, self._rows, self._noise, self._seed = tasks, rows, noise, seed

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        rng = random.Random(f"{self._seed} {worker.id if worker else 0}")
        self._tasks.pool.rng = rng
        for examples in batches(self._tasks.draw, rng, self._rows):
            yield Batch(examples, self._noise, rng.randrange(2**32))
