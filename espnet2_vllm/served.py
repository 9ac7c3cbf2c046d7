"""A Bagpiper behind a server: ESPnet's wire (``espnet2.bin.speechlm_inference.ServedBagpiper``), chat completions with sound.

Nothing but the standard library is imported, so that a caller needs no engine.
"""

from __future__ import annotations

import base64
import io
import json
import os
import urllib.error
import urllib.request
import wave
from pathlib import Path
from typing import Any

from .assistant import Assistant, Choice, Message
from .decoding_choice import ESPNET_SAMPLING, Decoding
from .errors import ConfigError, ServerError
from .releases import AUTO, TTS_SYSTEM, Release

DEFAULT_URL = "http://127.0.0.1:9811/v1"
DEFAULT_MODEL = "bagpiper"
_END_OF_TURN = 3  # <|eot|>, which ends a written answer; what also speaks is ended by the server
_MOST_DETAIL = 2000  # characters of what a server says is wrong
_ELSEWHERE = (
    "source",
    "enforce_modality",
    "min_step",
    "max_step",
    "text",
    "audio",
)  # settings that the wire has no word for


class ServedBagpiper(Assistant):
    """A model behind a server.

    Args:
        url: with ``/v1``; None takes ESPNET_BAGPIPER_URL, else ``http://127.0.0.1:9811/v1``.
        model: the server's name of it; None takes ESPNET_BAGPIPER_MODEL, else ``bagpiper``.
        timeout: seconds that one answer may take.
        tts_system: system turn of ``render``. AUTO takes ESPNET_BAGPIPER_TTS_SYSTEM where it is set (empty: none), else none
            for a model with "tts" in its name, else ``TTS_SYSTEM``.
    """

    def __init__(
        self,
        url: str | None = None,
        model: str | None = None,
        timeout: float = 3600.0,
        tts_system: str | None = AUTO,
    ) -> None:
        self.url = (os.environ.get("ESPNET_BAGPIPER_URL", DEFAULT_URL) if url is None else url).rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"url {self.url!r}: expected an address such as {DEFAULT_URL}")
        self.model = os.environ.get("ESPNET_BAGPIPER_MODEL", DEFAULT_MODEL) if model is None else model
        self.timeout = timeout
        if tts_system is AUTO:
            named = None if "tts" in self.model.lower() else TTS_SYSTEM
            tts_system = os.environ.get("ESPNET_BAGPIPER_TTS_SYSTEM", named) or None
        self.tts_system = tts_system
        self.release = Release(system=tts_system)

    def __repr__(self) -> str:
        return f"ServedBagpiper(url={self.url!r}, model={self.model!r})"

    def _chat(
        self, messages: list[Message], audio_out: bool, decoding: Choice, seed: int | None
    ) -> tuple[str, bytes | None]:
        answer = self._post(self._request(messages, audio_out, Decoding.of(decoding, "bagpiper"), seed))
        try:
            message = answer["choices"][0]["message"]
            text, sound = message.get("content") or "", (message.get("audio") or {}).get("data")
            return text, _wav(base64.b64decode(sound)) if sound else None
        except (KeyError, IndexError, TypeError, AttributeError, ValueError, EOFError, wave.Error) as error:
            shown = json.dumps(answer)[:_MOST_DETAIL]
            raise ServerError(
                f"{self.url}: not the answer of a Bagpiper ({type(error).__name__}: {error}): {shown}"
            ) from error

    def _request(
        self, messages: list[Message], audio_out: bool, decoding: Decoding, seed: int | None
    ) -> dict[str, Any]:
        """The body of a request."""
        useless = [name for name in _ELSEWHERE if getattr(decoding, name) is not None]
        if useless:
            raise ConfigError(f"{', '.join(useless)}: cannot be set for a model behind a server; leave them out")
        text, audio = (
            own if (own := decoding.temperature_of(name)) is not None else ESPNET_SAMPLING.temperature_of(name)
            for name in ("text", "audio")
        )
        topk = ESPNET_SAMPLING.topk if decoding.topk is None else decoding.topk
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [_turn(*message) for message in messages],
            "max_tokens": decoding.tokens(audio_out),
            "top_k": topk,
        }
        if seed is not None:
            body["seed"] = seed
        if not audio_out:
            return body | {"temperature": text, "stop_token_ids": [_END_OF_TURN]}
        more = {
            "mode": "text_audio",
            "phase": "text",
            "text_temperature": text,
            "audio_temperature": audio,
            "audio_topk": topk,
        }
        if decoding.cfg is not None:
            more["cfg"] = decoding.cfg
        return body | {"temperature": audio, "vllm_xargs": more}

    def _post(self, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{self.url}/chat/completions",
            data=json.dumps(body).encode("utf-8"),
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            detail = error.read().decode("utf-8", "replace")[:_MOST_DETAIL]
            raise ServerError(f"{self.url}: HTTP {error.code}: {detail}") from error
        except TimeoutError as error:
            raise ServerError(f"{self.url}: no answer within {self.timeout:g} s; give a longer timeout") from error
        except OSError as error:  # URLError is one
            reason = getattr(error, "reason", error)
            raise ServerError(
                f"no server at {self.url} ({reason}); start one, give the address of another, or run the model here with "
                "espnet2_vllm.from_pretrained"
            ) from error
        except ValueError as error:
            raise ServerError(f"{self.url}: the answer is no JSON: {error}") from error


def _turn(role: str, modality: str, content: Any) -> dict[str, Any]:
    """A message as the server takes it: sound as a file in base64."""
    if modality == "text":
        return {"role": role, "content": content}
    if isinstance(content, str):
        data, kind = Path(content).read_bytes(), Path(content).suffix.lstrip(".").lower()
    else:
        from .answer import wav_bytes
        from .prompt.conversation import samples_of

        samples, rate = samples_of(content)
        data, kind = wav_bytes(samples.T, rate), "wav"
    sound = {"data": base64.b64encode(data).decode("ascii"), "format": kind}
    return {"role": role, "content": [{"type": "input_audio", "input_audio": sound}]}


def _wav(data: bytes) -> bytes:
    """``data``, which is a wav file. wave.Error or EOFError if it is none."""
    with wave.open(io.BytesIO(data), "rb"):
        return data
