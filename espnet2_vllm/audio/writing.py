"""Wav files as ESPnet writes them: PCM_16, mono, through libsndfile."""

import io
import os
import uuid
from pathlib import Path

import numpy as np

from espnet2_vllm.errors import DataError


def write_wav(path: str | os.PathLike, wav: np.ndarray, sample_rate: int) -> int:
    """Write [n] float samples as 16-bit mono and return how many were clipped (beyond [-1, 1]).

    Conversion and clipping are libsndfile's, as in ESPnet's ``soundfile.write``. The file appears whole or not at all:
    it is written beside its place and moved there; parent directories are created. Raises DataError for samples that
    are NaN or infinite, OSError where the file system refuses.
    """
    import soundfile

    assert wav.ndim == 1 and wav.dtype.kind == "f", f"expected float samples [n], got {wav.dtype} {wav.shape}"
    path = Path(path)
    bad = int((~np.isfinite(wav)).sum())
    if bad:
        raise DataError(f"{path}: not written, {bad} of {len(wav)} samples are NaN or infinite")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not named .wav, so that nobody who lists the directory takes an unfinished file for a result.
    unfinished = path.parent / f".{uuid.uuid4().hex}.part"
    try:
        # In memory first: libsndfile drops what a full disk refuses, and calls that a success.
        whole = io.BytesIO()
        soundfile.write(whole, wav, sample_rate, subtype="PCM_16", format="WAV")
        with open(unfinished, "xb") as file:
            file.write(whole.getbuffer())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return int((np.abs(wav) > 1.0).sum())
