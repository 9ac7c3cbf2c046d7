"""Decode ESPnet SpeechLM checkpoints on a stock vLLM wheel."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .answer import Answer
    from .decoding_choice import Decoding
    from .speechlm import SpeechLM
    from .thinking import split_thinking

__all__ = ["Answer", "Decoding", "SpeechLM", "__version__", "split_thinking"]

# Found when they are asked for, so that importing the package, which every command line does, costs nothing.
_HOMES = {"Answer": "answer", "Decoding": "decoding_choice", "SpeechLM": "speechlm", "split_thinking": "thinking"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
