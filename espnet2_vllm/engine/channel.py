"""Ids of all streams in vLLM's log-probability channel.

A step's row has S + 1 columns: the token that vLLM sees, then one code per stream. vLLM keeps the columns of a row apart by
their id, so every code carries its stream; flags ride in the higher bits.

    bits  0..19  id
    bits 20..23  stream + 1
    bit  24      the id was forced, not chosen
    bit  25      (stream 0 only) the row was fed with empty auxiliary streams, whatever was emitted
    bits 26..28  (stream 0 only) phase of the next row
    bit  29      (stream 0 only) the row wanted guidance and its companion was not beside it: never a result
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

ID_BITS = 20
_ID_MASK = (1 << ID_BITS) - 1
_STREAM_SHIFT = ID_BITS
_FORCED = 1 << 24
_FED_EMPTY = 1 << 25
_PHASE_SHIFT = 26
SPLIT = 1 << 29
MAX_STREAMS = 15


class Decoded(NamedTuple):
    """ids [N, S] int32, forced [N, S] bool, fed_empty [N] bool."""

    ids: np.ndarray
    forced: np.ndarray
    fed_empty: np.ndarray


def stream_codes(num_streams: int) -> list[int]:
    """What is added to an id of each stream."""
    assert num_streams <= MAX_STREAMS, f"{num_streams} streams do not fit the channel's {MAX_STREAMS}"
    return [(s + 1) << _STREAM_SHIFT for s in range(num_streams)]


def encode(ids: Any, forced: Any, fed_empty: Any, next_phase: Any, streams: Any) -> Any:
    """Codes [N, S] of ids [N, S]; works on torch tensors and numpy arrays alike (integer ids, integer or bool flags)."""
    codes = ids + streams + forced * _FORCED
    codes[:, 0] += fed_empty * _FED_EMPTY + next_phase * (1 << _PHASE_SHIFT)
    return codes


def decode(codes: np.ndarray) -> Decoded:
    """The inverse of ``encode``. ``codes``: [N, S] integers, without the column of vLLM's token."""
    codes = np.asarray(codes, dtype=np.int64)
    expected = np.arange(1, codes.shape[1] + 1)
    streams = (codes >> _STREAM_SHIFT) & 0xF
    assert (streams == expected).all(), (
        f"columns are of streams {streams.tolist()}, expected {expected.tolist()} in each row"
    )
    ids = (codes & _ID_MASK).astype(np.int32)
    return Decoded(ids, (codes & _FORCED) != 0, (codes[:, :1] & _FED_EMPTY).any(axis=1))


def next_phases(codes: np.ndarray) -> np.ndarray:
    """Phase of the row behind each of ``codes`` [N, S]: [N]."""
    return (codes[:, 0] >> _PHASE_SHIFT) & 7


def fed_auxiliary(codes: np.ndarray) -> np.ndarray:
    """Auxiliary ids as fed, [N, S-1] int32, of codes [N, S]."""
    ids = (codes[:, 1:] & _ID_MASK).astype(np.int32)
    ids[(codes[:, 0] & _FED_EMPTY) != 0] = 0
    return ids
