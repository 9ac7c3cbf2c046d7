"""Continuous rows of prompts on their way through the engine: vectors that take the place of the sum of embeddings.

They travel with the request like auxiliary ids, as bytes in ``SamplingParams.extra_args``, not through vLLM's multimodal path or
``prompt_embeds``. Nothing of the decode path changes then: no model is registered as multimodal (whose interface every version of
vLLM changes), ids of text stay shareable through the prefix cache, V1 and V2 runner take them alike, and a preempted prompt gets
them again with its other arguments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from ..errors import EngineError
from ..plan import Continuous

# (first row of the prompt, rows, digest of the vectors, the vectors' bytes)
Part = tuple[int, int, bytes, bytes]


def to_parts(continuous: Iterable[Continuous], dtype: torch.dtype) -> list[Part]:
    """What a request carries. ``dtype``: of the model."""
    parts = []
    for rows in continuous:
        vectors = rows.vectors.to("cpu", dtype).contiguous()
        data = vectors.view(torch.uint8).numpy().tobytes()
        parts.append((rows.start, rows.count, hashlib.blake2b(data, digest_size=16).digest(), data))
    return parts


def places(parts: Iterable[Part]) -> list[tuple[int, int, bytes]]:
    """(first row, end, digest) of each part: what tells continuous rows apart."""
    return [(start, start + count, digest) for start, count, digest, _ in parts]


def rows_between(known: Iterable[tuple[int, int, bytes]], start: int, stop: int) -> bytes:
    """Names the continuous rows at positions [start, stop); empty if there are none. ``known``: ``places``."""
    inside = [(first, last, digest) for first, last, digest in known if first < stop and start < last]
    return b"".join(b"%d %d " % (first - start, last - start) + digest for first, last, digest in inside)


class ContinuousRows:
    """Vectors by slot, each until its prompt is in the cache. False if there are none, which is all that a decode step asks."""

    def __init__(self, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self._hidden, self._dtype, self._device = hidden, dtype, device
        self._slots: dict[int, list[tuple[int, torch.Tensor]]] = {}

    def __bool__(self) -> bool:
        return bool(self._slots)

    def add(self, slot: int, parts: Sequence[Part]) -> None:
        """Takes in what ``to_parts`` gave."""
        held = []
        for start, count, _, data in parts:
            vectors = torch.frombuffer(bytearray(data), dtype=self._dtype)
            if vectors.numel() != count * self._hidden:
                raise EngineError(f"{len(data)} bytes are no {count} continuous rows of {self._hidden} x {self._dtype}")
            vectors = vectors.view(count, self._hidden)
            # Pinned, so that a step does not wait for the device.
            held.append((start, vectors.pin_memory() if self._device.type == "cuda" else vectors))
        if held:
            self._slots[slot] = held

    def remove(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def write(
        self, embeds: torch.Tensor, slots: np.ndarray, firsts: np.ndarray, computed: np.ndarray, scheduled: np.ndarray
    ) -> None:
        """Puts the vectors of a step's continuous rows in the place of what their ids, pads, gave.

        Args:
            embeds: [n, H] input of the backbone, the rows of a request behind each other.
            slots, firsts, computed, scheduled: [requests] on the CPU: slot, first row in ``embeds``, rows that are in the cache
                already, rows of this step.
        """
        rows = {int(slot): row for row, slot in enumerate(slots)}
        for slot in self._slots.keys() & rows.keys():
            row = rows[slot]
            begin = int(computed[row])
            end, shift = begin + int(scheduled[row]), int(firsts[row]) - begin
            for start, vectors in self._slots[slot]:
                low, high = max(start, begin), min(start + len(vectors), end)
                if low < high:
                    embeds[low + shift : high + shift].copy_(vectors[low - start : high - start], non_blocking=True)
            if all(start + len(vectors) <= end for start, vectors in self._slots[slot]):
                del self._slots[slot]
