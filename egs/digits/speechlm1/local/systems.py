"""A trained checkpoint as something that speaks and listens, through the package's own surface.

That is its Python interface for the Bagpiper kind, and its command line for the OpusLM kind.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
import yaml
from lm_data import ANSWER
from lm_rows import Spoken, spliced
from logmel_units import read_centres, units_of
from test_sets import write_opuslm_set

from espnet2_vllm import SpeechLM
from espnet2_vllm.checkpoint import ensure_converted
from espnet2_vllm.codec import Codec, load_codec
from espnet2_vllm.io.keyed import read_keyed
from espnet2_vllm.layout import Layout

RATE = 16000
SEARCHES = {"greedy": {"temperature": 0.0, "topk": 1}, "sampled": {"temperature": 0.6, "topk": 20}}
_TEXT = {"temperature": 0.0, "topk": 1, "cfg": 1, "max_step": 48}
_ROWS = {"min_step": 10, "max_step": 400}


def codes_of(wav: np.ndarray, codec: Codec, centres: torch.Tensor, layout: Layout) -> np.ndarray:
    """[n] int16 at 16 kHz -> [T, 9] as an OpusLM checkpoint's arks hold them."""
    codes = codec.encode(wav.astype(np.float32) / 32768)
    return spliced(layout, Spoken("", "", codes, units_of(wav, centres)))


def as_int16(samples: np.ndarray) -> np.ndarray:
    return (np.clip(samples, -1, 1) * 32767).astype(np.int16)


class BagpiperSystem:
    """One engine for all that is asked of it."""

    guided = True

    def __init__(self, checkpoint: Path, backend: str, work: Path) -> None:
        self._model = SpeechLM.from_pretrained(checkpoint, backend=backend, dtype="float32", device="cpu")

    def speak(self, texts: Sequence[str], search: str, scale: float, seed: int) -> list[np.ndarray]:
        """[n] int16 at 16 kHz each; empty where no sound came."""
        audio = {**SEARCHES[search], **_ROWS, "cfg": scale}
        answers = self._ask([[["user", "text", text]] for text in texts], ["audio"], audio, seed)
        return [np.zeros(0, np.int16) if answer.audio is None else as_int16(answer.audio[0]) for answer in answers]

    def listen(self, wavs: Sequence[np.ndarray]) -> list[str]:
        heard = [wav for wav in wavs if len(wav) >= RATE // 10]
        prompts = [[["user", "audio", (wav.astype(np.float32) / 32768, RATE)]] for wav in heard]
        answers = iter(self._ask(prompts, ["text"], {**SEARCHES["greedy"], **_ROWS, "cfg": 1}, 0) if prompts else [])
        return [next(answers).text if len(wav) >= RATE // 10 else "" for wav in wavs]

    def answer(self, wavs: Sequence[np.ndarray], scale: float, seed: int) -> list[tuple[str, np.ndarray]]:
        """Text and speech that spoken questions are answered with; the model itself chooses what it answers with."""
        prompts = [[["system", "text", ANSWER], ["user", "audio", (w.astype(np.float32) / 32768, RATE)]] for w in wavs]
        answers = self._ask(prompts, None, {**SEARCHES["sampled"], **_ROWS, "cfg": scale}, seed)
        return [(a.text, np.zeros(0, np.int16) if a.audio is None else as_int16(a.audio[0])) for a in answers]

    def _ask(self, prompts: list[Any], enforce: list[str] | None, audio: dict[str, Any], seed: int) -> list[Any]:
        decoding = {"audio": audio, "text": _TEXT} | ({"enforce_modality": enforce} if enforce else {})
        return self._model.generate(prompts, decoding, seed=seed)

    def close(self) -> None:
        self._model.close()


class OpusLMSystem:
    """A run of the command line for each thing that is asked. ``voice``: [n] int16, a recording of who is to speak."""

    guided = False

    def __init__(self, checkpoint: Path, backend: str, work: Path, voice: np.ndarray, centres: Path) -> None:
        self._folder, self._backend, self._work = checkpoint, backend, work
        self._opened = ensure_converted(checkpoint)
        self._codec = load_codec(self._opened.codec, base_dir=self._opened.codec_base, device="cpu")
        self._centres = read_centres(centres)
        self._voice = self._heard(voice)
        self._runs = 0

    def speak(self, texts: Sequence[str], search: str, scale: float, seed: int) -> list[np.ndarray]:
        assert scale == 1, "this family has no guidance"
        asked = {f"u{i:05d}": text for i, text in enumerate(texts)}
        out = self._run("codec_ssl_tts", {"text": asked, "utt2spk": dict.fromkeys(asked, self._voice)}, search, seed)
        return [self._wav(out / "wav.scp" / f"codec_ssl_tts_{uid}_sample0.wav") for uid in asked]

    def listen(self, wavs: Sequence[np.ndarray]) -> list[str]:
        heard = {f"u{i:05d}": self._heard(wav) for i, wav in enumerate(wavs) if len(wav) >= RATE // 10}
        texts = read_keyed(self._run("codec_ssl_asr", {"wav.scp": heard}, "greedy", 0) / "text" / "text")
        return [texts.get(f"codec_ssl_asr_u{i:05d}_sample0", "") for i in range(len(wavs))]

    def _heard(self, wav: np.ndarray) -> np.ndarray:
        return codes_of(wav, self._codec, self._centres, self._opened.layout)

    def _wav(self, path: Path) -> np.ndarray:
        return soundfile.read(path, dtype="int16")[0] if path.is_file() else np.zeros(0, np.int16)

    def _run(self, task: str, entries: dict[str, dict[str, Any]], search: str, seed: int) -> Path:
        self._runs += 1
        folder = Path(tempfile.mkdtemp(dir=self._work, prefix=f"{self._backend}{self._runs}-"))
        data = write_opuslm_set(folder / "data", task, entries)
        config = yaml.safe_load((self._folder / "decode_default.yaml").read_text(encoding="utf-8"))
        found = SEARCHES[search]
        config["codec_ssl"] |= {"topk": found["topk"], "sampling_temperature": found["temperature"] or 1.0}
        (folder / "decode.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        names = {
            "train_config": self._folder / "config.yaml",
            "model_file": self._folder / "model.pth",
            "inference_config_file": folder / "decode.yaml",
            "output_dir": folder / "out",
            "data_path_and_name_and_type": f"{data},_,dataset_json",
            "backend": self._backend,
            "seed": seed,
        }
        command = [sys.executable, "-m", "espnet2_vllm.bin.speechlm_inference_chat"]
        command += [word for name, value in names.items() for word in (f"--{name}", str(value))]
        with open(folder / "log", "w", encoding="utf-8") as log:
            code = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
        if code > 1:
            raise RuntimeError(f"{' '.join(command)} ended with code {code}; see {folder / 'log'}")
        return folder / "out"

    def close(self) -> None:
        pass
