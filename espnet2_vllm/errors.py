"""Errors that a user can act on: each message says what, where, what was expected and what to do."""

import sys


class SpeechLMError(Exception):
    """Base of every error that this package raises on purpose."""

    exit_code = 1


class ConfigError(SpeechLMError):
    """A command line, yaml file or option that cannot be used. Exit code 2."""

    exit_code = 2


class DataError(SpeechLMError):
    """An input file, utterance or prompt that cannot be decoded. Exit code 1; other utterances go on."""


class CheckpointError(SpeechLMError):
    """A checkpoint that is missing, incomplete, of the wrong family or inconsistent with its own description."""


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
