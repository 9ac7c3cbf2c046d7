"""Decode ESPnet SpeechLM checkpoints on a stock vLLM wheel."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .answer import Answer
    from .decoding_choice import Decoding
    from .pretrained import from_pretrained, from_server
    from .releases import AUTO, PAPER_DECODING, RELEASES, TTS_SYSTEM, UNDERSTAND_PROMPT, UNDERSTAND_SYSTEM
    from .speechlm import SpeechLM
    from .thinking import split_thinking

# Found when they are asked for, so that importing the package, which every command line does, costs nothing.
_HOMES = {
    "AUTO": "releases",
    "Answer": "answer",
    "Decoding": "decoding_choice",
    "PAPER_DECODING": "releases",
    "RELEASES": "releases",
    "SpeechLM": "speechlm",
    "TTS_SYSTEM": "releases",
    "UNDERSTAND_PROMPT": "releases",
    "UNDERSTAND_SYSTEM": "releases",
    "from_pretrained": "pretrained",
    "from_server": "pretrained",
    "split_thinking": "thinking",
}

__all__ = [
    "AUTO",
    "Answer",
    "Decoding",
    "PAPER_DECODING",
    "RELEASES",
    "SpeechLM",
    "TTS_SYSTEM",
    "UNDERSTAND_PROMPT",
    "UNDERSTAND_SYSTEM",
    "__version__",
    "from_pretrained",
    "from_server",
    "split_thinking",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
