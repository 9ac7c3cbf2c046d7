"""What is said: digit strings, dates, spelled words, commands, and questions that a digit string or a spelled word answers.

All lower case words. A text belongs to the training or to the test set by its own hash, never to both; texts of which there are too
few to be parted belong to both: commands, strings of one and two digits, counting and what counts up.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
KINDS = ("digits", "date", "spell", "command", "question")

_TEST_ONE_IN = 10
_LENGTHS = {1: 2, 2: 4, 3: 20, 4: 24, 5: 22, 6: 16, 7: 7, 8: 5}  # digits a string: relative frequency
_SHORTEST_PARTED = 3


def _listed(texts: str, separator: str | None = None) -> list[str]:
    return texts.split(separator)


_MONTHS = _listed("january february march april may june july august september october november december")
_ORDINALS = _listed(
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth fifteenth sixteenth "
    "seventeenth eighteenth nineteenth twentieth"
)
_TEENS = _listed("ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen")
_TENS = _listed("twenty thirty forty fifty sixty seventy eighty ninety")
_WORDS = _listed(
    "cat dog sun map red blue tree fish bird milk book door lamp rain snow wind star moon ship road king ring "
    "song hand foot head nose lake hill farm cow pig hen fox owl bee ant egg jam tea cup pan box bag hat coat "
    "shoe bed desk wall roof yard gate bus van jet boat train plane clock watch phone chair table bread apple "
    "lemon grape onion quiz zero wolf frog duck goat lion tiger zebra queen judge black white green brown "
    "house mouse water music paper river ocean cloud storm night light world voice sound speak learn"
)
_COMMANDS = _listed(
    "turn on the light;turn off the light;turn up the volume;turn down the volume;open the door;close the door;open the window;"
    "close the window;stop the music;play the music;play the next song;start the timer;stop the timer;set the alarm;call home;"
    "read the news;go back;go on;say it again;what time is it;what day is it;how are you;who are you;where are you;good morning;"
    "good night;thank you;yes please;no thank you;help me",
    ";",
)


def is_test(text: str) -> bool:
    """Whether ``text`` is kept for the test set: the same on every machine."""
    return zlib.crc32(text.encode()) % _TEST_ONE_IN == 0


def answer(text: str) -> str:
    """The answer to a question; ValueError where ``text`` is none."""
    match text.split():
        case ["count", "from", first, "to", last] if first in DIGITS and last in DIGITS:
            start, stop = DIGITS.index(first), DIGITS.index(last)
            step = 1 if start <= stop else -1
            return " ".join(DIGITS[digit] for digit in range(start, stop + step, step))
        case ["what", "comes", "after", digit] if digit in DIGITS[:-1]:
            return DIGITS[DIGITS.index(digit) + 1]
        case ["what", "comes", "before", digit] if digit in DIGITS[1:]:
            return DIGITS[DIGITS.index(digit) - 1]
        case ["repeat", *digits] if digits and set(digits) <= set(DIGITS):
            return " ".join(digits)
        case ["spell", word] if word.isalpha():
            return " ".join(word)
    raise ValueError(f"no question that has an answer here: {text!r}")


def draw(kind: str, rng: random.Random, *, test: bool) -> str:
    """A random text of ``kind``, of the test or of the training set."""
    return next(text for text in _stream(kind, rng) if not _parted(kind, text) or is_test(_key(text)) == test)


def _stream(kind: str, rng: random.Random) -> Iterator[str]:
    makers = {"digits": _digits, "date": _date, "spell": _spelled, "command": _command, "question": _question}
    while True:
        yield makers[kind](rng)


def _key(text: str) -> str:
    """What is hashed: what is to be repeated or spelled goes where its answer goes."""
    return answer(text) if text.startswith(("repeat ", "spell ")) else text


def _parted(kind: str, text: str) -> bool:
    if kind == "command" or text.startswith(("count ", "what ")):
        return False
    return kind in ("date", "spell") or len(_key(text).split()) >= _SHORTEST_PARTED


def _digits(rng: random.Random) -> str:
    (length,) = rng.choices(list(_LENGTHS), list(_LENGTHS.values()))
    return " ".join(rng.choice(DIGITS) for _ in range(length))


def _date(rng: random.Random) -> str:
    day = rng.choice([*_ORDINALS, *(f"twenty {one}" for one in _ORDINALS[:9]), "thirtieth", "thirty first"])
    tens = rng.choice(_TENS)
    year = rng.choice([tens, f"{tens} {rng.choice(DIGITS[1:])}", rng.choice(_TEENS)])
    return f"{rng.choice(_MONTHS)} the {day} nineteen {year}"


def _spelled(rng: random.Random) -> str:
    return " ".join(rng.choice(_WORDS))


def _command(rng: random.Random) -> str:
    return rng.choice(_COMMANDS)


def _question(rng: random.Random) -> str:
    (form,) = rng.choices(["count", "after", "before", "repeat", "spell"], [30, 6, 6, 36, 22])
    if form == "count":
        first, last = sorted(rng.sample(range(10), 2))
        return f"count from {DIGITS[first]} to {DIGITS[last]}"
    if form == "after":
        return f"what comes after {rng.choice(DIGITS[:-1])}"
    if form == "before":
        return f"what comes before {rng.choice(DIGITS[1:])}"
    return f"repeat {_digits(rng)}" if form == "repeat" else f"spell {rng.choice(_WORDS)}"
