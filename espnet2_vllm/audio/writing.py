"""Sound into files: 16-bit mono wav as ESPnet writes it, and the other formats, through libsndfile."""

import io
import os
import uuid
from pathlib import Path

import numpy as np

from espnet2_vllm.audio_format import AudioFormat
from espnet2_vllm.errors import DataError
from espnet2_vllm.io.files import open_own

AS_ESPNET = AudioFormat()


def write_wav(path: str | os.PathLike, wav: np.ndarray, sample_rate: int, form: AudioFormat = AS_ESPNET) -> int:
    """Write [n] float samples as a mono file and return how many were clipped (beyond [-1, 1]).

    16-bit wav if nothing else is asked for. Conversion and clipping are libsndfile's, as in ESPnet's ``soundfile.write``. The
    file appears whole or not at all: it is written beside its place and moved there; parent directories are created.

    Raises:
        DataError: for samples that are NaN or infinite.
        OSError: where the file system refuses.
    """
    import soundfile

    path = Path(path)
    clipped = _check(wav, form, str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not named .wav, so that nobody who lists the directory takes an unfinished file for a result.
    unfinished = path.parent / f".{uuid.uuid4().hex}.part"
    try:
        # In memory first: libsndfile drops what a full disk refuses, and calls that a success.
        whole = io.BytesIO()
        soundfile.write(whole, wav, sample_rate, **form.soundfile)
        with open(unfinished, "xb") as file:
            file.write(whole.getbuffer())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return clipped


def append_to_ark(
    path: str | os.PathLike, key: str, wav: np.ndarray, sample_rate: int, form: AudioFormat
) -> tuple[int, int]:
    """Write [n] float samples behind what the ark holds; the byte that ``path:byte`` names them by, and how many were clipped.

    As Kaldi and kaldiio read it. One call at a time for each ark. An entry that a full disk cut short is taken away again.
    """
    import kaldiio

    path = Path(path)
    clipped = _check(wav, form, f"{key} in {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = io.BytesIO()
    kaldiio.save_ark(whole, {key: (sample_rate, wav)}, write_function="soundfile", write_kwargs=form.soundfile)
    with open_own(path, "ab") as file:
        end = file.tell()
        try:
            file.write(whole.getbuffer())
            file.flush()
        except OSError:
            file.truncate(end)
            raise
    return end + len(key.encode()) + 1, clipped


def _check(wav: np.ndarray, form: AudioFormat, where: str) -> int:
    """How many samples will be clipped. DataError for those that no file can hold."""
    assert wav.ndim == 1 and wav.dtype.kind == "f", f"expected float samples [n], got {wav.dtype} {wav.shape}"
    bad = int((~np.isfinite(wav)).sum())
    if bad:
        raise DataError(f"{where}: not written, {bad} of {len(wav)} samples are NaN or infinite")
    return int((np.abs(wav) > 1.0).sum()) if form.clips else 0
