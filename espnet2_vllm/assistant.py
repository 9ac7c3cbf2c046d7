"""What is asked of a Bagpiper, wherever it runs: the three methods of ESPnet's ``espnet2.bin.speechlm_inference.Bagpiper``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .decoding_choice import Decoding
from .errors import NoRecordingError
from .releases import AUTO, Release

# (role, modality, content); content is a text, the path of a recording, or (samples, rate).
Message = tuple[str, str, Any]
Choice = Decoding | Mapping[str, Any] | str | Path | None


class Assistant:
    """Hears, speaks and answers. A falsy ``system`` sends no system turn; ``AUTO`` is what the release was trained with.

    Temperatures and ``topk`` are ESPnet's (0.6 for text, 0.8 for audio, 20) unless ``decoding`` says otherwise, whatever a
    release's yaml says; all else is the yaml's.
    """

    release: Release

    def describe(
        self,
        audio: Any,
        prompt: str | None = AUTO,
        system: str | None = AUTO,
        decoding: Choice = None,
        *,
        seed: int | None = None,
    ) -> str:
        """Says in words what is in a recording.

        Args:
            audio: the path of a recording, or (samples, rate).
            prompt: what is asked about it; AUTO is ``UNDERSTAND_PROMPT`` unless the release says otherwise, None nothing.
            system: AUTO is ``UNDERSTAND_SYSTEM`` unless the release says otherwise.
            decoding: settings of this call.
            seed: of the sampling; None draws one.

        Returns:
            The answer with its thinking (``split_thinking`` takes them apart).

        Raises:
            FileNotFoundError: if there is no such recording, before anything else happens.
        """
        heard = recording(audio)
        if system is AUTO:
            system = self.release.describe_system
        if prompt is AUTO:
            prompt = self.release.describe_prompt
        messages = _system(system) + [("user", "audio", heard)]
        if prompt is not None:
            messages.append(("user", "text", prompt))
        return self._chat(messages, False, decoding, seed)[0]

    def render(
        self, scene: str, system: str | None = AUTO, decoding: Choice = None, *, seed: int | None = None
    ) -> tuple[bytes | None, str]:
        """Makes the sound of a described scene, in which spoken words stand in quotes.

        Returns:
            A wav file (16-bit), or None where the model chose to give text alone, and the text it wrote.
        """
        messages = _system(self.release.system if system is AUTO else system) + [("user", "text", scene)]
        text, audio = self._chat(messages, True, decoding, seed)
        return audio, text

    def ask(self, prompt: str, system: str | None = None, decoding: Choice = None, *, seed: int | None = None) -> str:
        """Answers a text with a text."""
        return self._chat([*_system(system), ("user", "text", prompt)], False, decoding, seed)[0]

    def _chat(
        self, messages: list[Message], audio_out: bool, decoding: Choice, seed: int | None
    ) -> tuple[str, bytes | None]:
        """Text of the answer, a line each segment that has some, and the wav file of its first sound."""
        raise NotImplementedError


def _system(text: str | None) -> list[Message]:
    return [("system", "text", text)] if text else []


def recording(audio: Any) -> Any:
    """The name of a recording, or (samples, rate) as they are. NoRecordingError for a name without a file."""
    if not isinstance(audio, (str, os.PathLike)):
        return audio
    name = os.fspath(audio)
    here, colon, offset = name.rpartition(":")
    entry = bool(colon) and offset.isdecimal() and os.path.isfile(here)  # of an ark
    if os.path.isfile(name) and (name.strip() != name or name.endswith("|") or (colon and offset.isdecimal())):
        from .audio.reading import read_audio_bytes  # a file whose name reads like a command or an entry

        return read_audio_bytes(Path(name).read_bytes(), name)
    if not os.path.isfile(name) and not entry:
        raise NoRecordingError(f"no such audio file: {name}")
    return name
