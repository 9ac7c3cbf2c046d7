"""What a segment holds for the outside: ids for token arks, text ids, codes for the codec."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..codes import codec_codes
from ..errors import DataError
from ..layout import Layout
from ..plan import Segment, text_ids

AUDIO_NAMES = ("codec_ssl", "spk")
TEXT_NAMES = ("text_bpe",)
_HEADER_ROWS = 4  # at most: sos, task, role, modality


@dataclass(frozen=True)
class Content:
    """Content of one segment.

    Attributes:
        tokens: [n] int32 for the token ark (OpusLM; empty for Bagpiper).
        text: [n] ids of the text tokenizer; None for audio.
        codes: [frames, codebooks] codes within the codec's range; None for text.
        outside: codes that were not codes of their stream and were moved to the nearest one.
    """

    tokens: np.ndarray
    text: np.ndarray | None = None
    codes: np.ndarray | None = None
    outside: int = 0


def legacy_content(layout: Layout, segment: Segment) -> Content:
    """Content as ESPnet's older ``SpeechLM.parse_sequence`` (espnet2/bin/speechlm_inference.py) takes it from a segment.

    Frames whose first code is pad are left out. Tokens are codes without SSL units, counted from the first code, or text ids of
    the joint vocabulary.

    Raises:
        DataError: for a modality that is neither text nor audio.
    """
    if segment.name not in AUDIO_NAMES:
        content = opuslm_content(layout, segment)
        return replace(content, tokens=content.tokens + np.int32(layout.text.start))
    rows = segment.rows if segment.generated else _without_header(layout, segment.rows)
    first = layout.codec_streams[0]
    rows = rows[(rows[:, first] != layout.pad) & (rows[:, 0] != layout.specials["eos"])]
    codes, outside = codec_codes(layout, rows)
    tokens = (rows[:, first:] - layout.code_spans[first].start).reshape(-1).astype(np.int32)
    return Content(tokens, codes=codes, outside=outside)


def opuslm_content(layout: Layout, segment: Segment) -> Content:
    """Content as ESPnet's ``TaskOrientedWriter`` and ``ChatOrientedWriter`` take it from a segment.

    Header rows and rows whose stream 0 is pad are left out (so is a frame whose SSL unit is pad). An audio reference loses its
    eos row, at which ESPnet fails with an IndexError; a text reference keeps it, so its last token is negative, as in ESPnet.

    Raises:
        DataError: for a modality that is neither text nor audio.
    """
    rows = segment.rows if segment.generated else _without_header(layout, segment.rows)
    rows = rows[rows[:, 0] != layout.pad]
    if segment.name in TEXT_NAMES:
        ids = rows[:, 0].astype(np.int64) - layout.text.start
        return Content(ids.astype(np.int32), text=ids)
    if segment.name not in AUDIO_NAMES:
        raise DataError(f"modality {segment.name!r} cannot be written; expected one of {(*TEXT_NAMES, *AUDIO_NAMES)}")
    if not segment.generated:
        rows = rows[rows[:, 0] != layout.specials["eos"]]
    codes, outside = codec_codes(layout, rows)
    return Content((rows - layout.streams[0].start).reshape(-1).astype(np.int32), codes=codes, outside=outside)


def _without_header(layout: Layout, rows: np.ndarray) -> np.ndarray:
    """Given rows behind their modality row."""
    for index, token in enumerate(rows[:_HEADER_ROWS, 0]):
        if layout.modality_of(int(token)) is not None:
            return rows[index + 1 :]
    raise DataError(
        f"no modality row among the first {_HEADER_ROWS} rows of a segment: {rows[:_HEADER_ROWS, 0].tolist()}"
    )


def bagpiper_content(layout: Layout, segment: Segment) -> Content:
    """Content of a generated segment, as ESPnet's ``ParallelLLM.inference`` detokenizes it.

    Fewer than S audio rows hold no frame.
    """
    none = np.zeros(0, dtype=np.int32)
    if segment.modality == "text":
        return Content(none, text=text_ids(layout, segment))
    if segment.modality != "audio":
        return Content(none)
    codes, outside = codec_codes(layout, segment.rows)
    return Content(none, codes=codes, outside=outside)
