"""An independent recogniser that needs no network: pocketsphinx with its own English model and a grammar of digits."""

from __future__ import annotations

import numpy as np
from pocketsphinx import Decoder
from texts import DIGITS

# Its model was trained on recordings: it hears words in digital silence, and puts too many into clean speech.
_DITHER, _INSERTION, _SILENCE = (
    30.0,
    1e-3,
    3200,
)  # standard deviation in 16-bit steps; probability; samples on either side
_GRAMMAR = "#JSGF V1.0; grammar digits; public <string> = ( " + " | ".join(DIGITS) + " )+ ;"


class DigitRecogniser:
    def __init__(self) -> None:
        self._decoder = Decoder(lm=None, loglevel="FATAL", wip=_INSERTION)
        self._decoder.add_jsgf_string("digits", _GRAMMAR)
        self._decoder.activate_search("digits")

    def __call__(self, wav: np.ndarray) -> str:
        """[n] int16 at 16 kHz -> words; nothing heard is ''. A recogniser starts every utterance afresh."""
        noisy = np.pad(wav.astype(np.float32), _SILENCE)
        noisy += np.random.default_rng(0).normal(0, _DITHER, len(noisy))
        self._decoder.reinit_feat()
        self._decoder.start_utt()
        self._decoder.process_raw(np.clip(noisy, -32768, 32767).astype(np.int16).tobytes(), full_utt=True)
        self._decoder.end_utt()
        found = self._decoder.hyp()
        return found.hypstr.strip() if found else ""
