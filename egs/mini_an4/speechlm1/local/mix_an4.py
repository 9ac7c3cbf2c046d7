"""Sets to be enhanced, out of a Kaldi data directory: ``mix_an4.py data/all data``.

``noisy``: ``mix.scp`` is the recording in pink noise of 5 dB. ``mixed``: another speaker's recording is added at 0 dB. In both
``wav.scp`` is the clean recording. Seeded, so that each run makes the same.
"""

import shutil
import sys
from pathlib import Path

import numpy as np

from espnet2_vllm.audio import mono_at, read_audio, write_wav
from espnet2_vllm.io.keyed import read_keyed, write_keyed

RATE = 16000
SEED = 20261129


def pink_noise(rng: np.random.Generator, length: int) -> np.ndarray:
    """[length] of noise whose power falls as 1/f."""
    spectrum = np.fft.rfft(rng.standard_normal(length))
    return np.fft.irfft(spectrum / np.sqrt(np.maximum(np.arange(len(spectrum)), 1)), length)


def at_level(sound: np.ndarray, beside: np.ndarray, decibels: float) -> np.ndarray:
    """``sound``, scaled to lie ``decibels`` below ``beside``."""
    power = np.mean(beside**2) / max(np.mean(sound**2), 1e-12)
    return sound * np.sqrt(power / 10 ** (decibels / 10))


def main() -> None:
    source, data = map(Path, sys.argv[1:])
    rng = np.random.default_rng(SEED)
    speakers = read_keyed(source / "utt2spk")
    clean = {key: mono_at(*read_audio(spec), RATE) for key, spec in read_keyed(source / "wav.scp").items()}
    for name in ("noisy", "mixed"):
        places = {}
        for key, wav in clean.items():
            if name == "noisy":
                added = at_level(pink_noise(rng, len(wav)), wav, 5)
            else:
                other = clean[rng.choice(sorted(k for k in clean if speakers[k] != speakers[key]))]
                added = at_level(np.resize(other, len(wav)), wav, 0)
            path = data / name / "mix" / f"{key}.wav"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_wav(path, (wav + added).astype(np.float32) / 2, RATE)
            places[key] = str(path)
        write_keyed(data / name / "mix.scp", places)
        for file in ("wav.scp", "text", "utt2spk"):
            shutil.copyfile(source / file, data / name / file)
        print(f"{data / name}: {len(places)} utterances, seed {SEED}")


if __name__ == "__main__":
    main()
