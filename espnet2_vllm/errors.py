"""Errors that a user can act on: each message says what, where, what was expected and what to do."""

import re
import reprlib
import sys
from typing import Any

MOST_CHARACTERS = 4_000  # of a message
_TAIL = 1_000  # of which the end, where what to do stands
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class _Brief(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write out what has more than 4,300 digits.
        return super().repr_int(x, level) if x.bit_length() < 1000 else f"a whole number of {x.bit_length()} bits"


_brief = _Brief()
_brief.maxlevel, _brief.maxstring, _brief.maxlong, _brief.maxother = 3, 200, 60, 400


def shown(value: Any) -> str:
    """``value`` as a message shows it: shortened, whatever its size, on one line and without control characters."""
    text = str(value) if isinstance(value, Exception) else _brief.repr(value)
    return printable(text if len(text) <= MOST_CHARACTERS // 4 else f"{text[: MOST_CHARACTERS // 4]}...")


def printable(text: str) -> str:
    """``text`` with its control characters, but for tabs and line breaks, as escapes: none moves a terminal's cursor."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class SpeechLMError(Exception):
    """Base of every error that this package raises on purpose.

    A message is printable, and shortened in its middle where a value in it is long.
    """

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        message = str(message)
        left_out = len(message) - MOST_CHARACTERS
        if left_out > 0:
            head, tail = message[: MOST_CHARACTERS - _TAIL], message[-_TAIL:]
            message = f"{head} [... {left_out} characters ...] {tail}"
        super().__init__(printable(message))


class ConfigError(SpeechLMError):
    """A command line, yaml file or option that cannot be used. Exit code 2."""

    exit_code = 2


class DataError(SpeechLMError):
    """An input file, utterance or prompt that cannot be decoded. Exit code 1; other utterances go on."""


class CheckpointError(SpeechLMError):
    """A checkpoint that is missing, incomplete, of the wrong family or inconsistent with its own description."""


class ReleaseFileError(CheckpointError, FileNotFoundError):
    """A release folder that has not exactly one file of a kind. What ESPnet's Python interface raises is its other parent."""


class UntunedError(ConfigError, ValueError):
    """A checkpoint that was never tuned to answer, and was not asked for twice."""


class NoRecordingError(DataError, FileNotFoundError):
    """A recording that is not there."""


class ServerError(SpeechLMError, RuntimeError):
    """A server that cannot be reached, refuses, or answers something else."""


class CodecError(SpeechLMError):
    """A clip that the codec could not decode. Other clips go on."""


class EngineError(SpeechLMError):
    """The inference engine is missing, unsupported, or refused a request."""


class AbortError(EngineError):
    """The engine gave up a request that it had begun. Other requests go on; the same request may well succeed later."""


def complain(command: str, error: SpeechLMError | OSError) -> int:
    """Says on stderr why ``command`` ends; its exit code. An OSError: output that cannot be written there."""
    print(f"{command}: {error}", file=sys.stderr)
    return error.exit_code if isinstance(error, SpeechLMError) else 1
