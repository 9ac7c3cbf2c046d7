"""espeak-ng out of the wheel ``espeakng-loader`` (library and data), by ctypes: text to samples, no sound device."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import espeakng_loader
import numpy as np
import soxr

SAMPLE_RATE = 16000
_SYNCHRONOUS, _RATE, _PITCH, _RANGE = 2, 1, 3, 4  # espeak_AUDIO_OUTPUT, espeak_PARAMETER of speak_lib.h
_UTF8, _SSML = 1, 0x10
_SILENCE = 0.01  # of the peak
_EDGE = 0.1  # seconds of silence left on either side
_LOUDNESS = 0.07  # root mean square of speech at full scale 1


@dataclass(frozen=True)
class Voice:
    """``name`` as espeak-ng has it ("en-us+f3"), ``rate`` in words a minute, ``pitch`` and its ``range`` from 0 to 99."""

    name: str
    rate: int = 150
    pitch: int = 50
    range: int = 50


class Espeak:
    """One in a process: the library has one global state."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(espeakng_loader.get_library_path())
        self._rate = self._library.espeak_Initialize(_SYNCHRONOUS, 0, espeakng_loader.get_data_path().encode(), 0)
        if self._rate <= 0:
            raise RuntimeError(
                f"espeak-ng found no data in {espeakng_loader.get_data_path()}; reinstall espeakng-loader"
            )
        self._parts: list[np.ndarray] = []
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
        self._callback = kind(self._take)
        self._library.espeak_SetSynthCallback(self._callback)

    def _take(self, samples, count, events) -> int:
        if samples and count > 0:
            self._parts.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def say(self, text: str, voice: Voice, *, spelled: bool = False) -> np.ndarray:
        """[n] int16 at 16 kHz, a tenth of a second of silence around it. ``spelled``: the text is letters, said by name."""
        if self._library.espeak_SetVoiceByName(voice.name.encode()) != 0:
            raise ValueError(f"espeak-ng has no voice {voice.name!r}")
        for parameter, value in ((_RATE, voice.rate), (_PITCH, voice.pitch), (_RANGE, voice.range)):
            self._library.espeak_SetParameter(parameter, value, 0)
        if spelled:
            letters = "".join(text.split())
            text = f'<speak><say-as interpret-as="characters">{letters}</say-as></speak>'
        data = text.encode() + b"\0"
        self._parts.clear()
        code = self._library.espeak_Synth(data, len(data), 0, 0, 0, _UTF8 | (_SSML if spelled else 0), None, None)
        if code != 0 or not self._parts:
            raise RuntimeError(f"espeak-ng failed (code {code}) on {text!r} with {voice}")
        return _finished(np.concatenate(self._parts), self._rate)


def _finished(samples: np.ndarray, rate: int) -> np.ndarray:
    wav = soxr.resample(samples.astype(np.float32) / 32768, rate, SAMPLE_RATE)
    loud = np.flatnonzero(np.abs(wav) > _SILENCE * np.abs(wav).max())
    speech = wav[loud[0] : loud[-1] + 1]
    speech = speech * (_LOUDNESS / np.sqrt(np.mean(speech**2)))
    edge = np.zeros(int(_EDGE * SAMPLE_RATE), dtype=np.float32)
    return (np.clip(np.concatenate([edge, speech, edge]), -1, 1) * 32767).astype(np.int16)
