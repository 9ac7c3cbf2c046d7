"""Between codes (what a codec speaks) and rows (what the model speaks)."""

from __future__ import annotations

import numpy as np

from . import delay
from .errors import DataError
from .layout import Layout


def audio_rows(layout: Layout, codes: np.ndarray, frames: int | None = None) -> np.ndarray:
    """Delayed rows of an audio prompt (Bagpiper; ESPnet ``DiscreteAudioIO.encode_batch``).

    Args:
        codes: [T, S] codes from 0.
        frames: take the rows of the first so many frames. A clip that was encoded together with longer ones keeps codes
            of its padding in its last S - 1 rows, where the clip alone would have pads: ESPnet cuts after the delay.

    Returns:
        [T + S - 1, S] int32 ids, or [frames + S - 1, S]; [0, S] for no frame.

    Raises:
        DataError: if the codes are not of this layout.
    """
    spans = layout.code_spans
    if codes.ndim != 2 or codes.shape[1] != len(spans):
        raise DataError(
            f"codes of shape {codes.shape} for a layout of {len(spans)} streams; expected [frames, {len(spans)}]"
        )
    sizes = np.array([span.size for span in spans])
    bad = np.argwhere((codes < 0) | (codes >= sizes))
    if len(bad):
        frame, stream = (int(i) for i in bad[0])
        raise DataError(
            f"code {codes[frame, stream]} of stream {stream} at frame {frame} is outside 0..{sizes[stream] - 1}"
        )
    ids = (codes + np.array([span.start for span in spans])).astype(np.int32)
    rows = delay.interleave(ids, layout.stream_pads)
    if frames is None:
        return rows
    assert 1 <= frames <= len(codes), f"{frames} of {len(codes)} frames"
    return rows[: frames + layout.num_streams - 1]


def codec_codes(layout: Layout, rows: np.ndarray) -> tuple[np.ndarray, int]:
    """Codes that a codec decodes, from the content of an audio segment (``Segment.rows``).

    Bagpiper: delayed rows, the delay is undone here. OpusLM: frames; stream 0 holds SSL units, which no codec decodes.
    An id outside its stream's span (a pad, or an id of another stream) counts as the nearest code, as in ESPnet
    ``DiscreteAudioIO.decode_batch``; OpusLM's ESPnet raises an IndexError there.

    Args:
        rows: [R, S] ids.

    Returns:
        [T, C] int64 codes, where C is the number of the codec's streams, and how many ids were outside.
    """
    return frame_codes(layout, delay.undo(rows) if layout.family == "bagpiper" else rows)


def frame_codes(layout: Layout, frames: np.ndarray) -> tuple[np.ndarray, int]:
    """Codes of ``frames`` [T, S], ids without the delay; otherwise as ``codec_codes``."""
    spans = [layout.code_spans[s] for s in layout.codec_streams]
    start, stop = (np.array([span[i] for span in spans], dtype=np.int64) for i in (0, 1))
    ids = frames[:, list(layout.codec_streams)].astype(np.int64)
    kept = np.clip(ids, start, stop - 1)
    return kept - start, int((kept != ids).sum())
