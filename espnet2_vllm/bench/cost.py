"""What a run costs a device by the model's own arithmetic: operations and bytes, and how much of the device that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..layout import Layout

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
# Part of the device's name: (dense bf16 operations/s, bytes/s of its memory), from the vendor's data sheets.
_PEAKS = {
    "H200": (989e12, 4.8e12),
    "H100 NVL": (835e12, 3.9e12),
    "H100 PCIe": (756e12, 2.0e12),
    "H100": (989e12, 3.35e12),
    "A100-SXM4-80GB": (312e12, 2.04e12),
    "A100-SXM4-40GB": (312e12, 1.56e12),
}


@dataclass(frozen=True)
class Peaks:
    """Of a device; None where it is not known.

    Attributes:
        flops: dense operations a second in 16-bit floating point.
        bandwidth: bytes a second of its memory.
    """

    flops: float | None = None
    bandwidth: float | None = None

    def of(self, devices: int) -> Peaks:
        """Of so many together."""
        return Peaks(self.flops and self.flops * devices, self.bandwidth and self.bandwidth * devices)


def peaks_of(device: str, dtype: str) -> Peaks:
    """Peaks of the device of this name. Operations are known for 16-bit floating point only."""
    for part, (flops, bandwidth) in _PEAKS.items():
        if part in device:
            return Peaks(flops if _BYTES[dtype] == 2 else None, bandwidth)
    return Peaks()


@dataclass(frozen=True)
class Shape:
    """What counts of a backbone.

    Attributes:
        weights: elements of all matrices of all layers (embedding and head not among them).
        hidden: H.
        attention: operations for one row and one row of its context, all layers.
        cache: elements of keys and values a row, all layers.
    """

    weights: int
    hidden: int
    attention: int
    cache: int

    @classmethod
    def of(cls, backbone: Mapping[str, Any]) -> Shape:
        hidden, layers, heads = (backbone[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
        size = backbone.get("head_dim") or hidden // heads
        shared = backbone.get("num_key_value_heads") or heads
        layer = 2 * hidden * heads * size + 2 * hidden * shared * size + 3 * hidden * backbone["intermediate_size"]
        return cls(layers * layer, hidden, 4 * layers * heads * size, 2 * layers * shared * size)


def head_columns(layout: Layout, modality: str) -> int:
    """Ids among which a row of ``text`` or ``audio`` chooses: columns of ``lm_head`` that it needs. ``plain`` is all ids."""
    if modality == "plain":
        return layout.vocab_size
    primary = sum(span.size for span in layout.primary_spans(modality)) + len(layout.end_tokens)
    return primary + (sum(map(len, layout.auxiliary_candidates())) if modality == "audio" else 0)


@dataclass(frozen=True)
class Work:
    """All that one measured run asks for.

    Attributes:
        units: sequences.
        prompt, output: rows of each.
        columns: by kind of row (``text``, ``audio``): (share of the output rows, columns of the head that they need).
        steps: of each engine; weights are read once in each.
        passes: times that a row goes through the model: 1, and for the share of the rows that are guided once more.
        engines: that share the units.
    """

    units: int
    prompt: int
    output: int
    columns: Mapping[str, tuple[float, int]]
    steps: int
    passes: float = 1.0
    engines: int = 1

    def flops(self, shape: Shape) -> float:
        """Operations: a product with each weight for every row fed, attention to its context, the head for every row chosen."""
        fed = self.prompt + self.output - 1
        contexts = fed * (fed + 1) / 2
        heads = sum(share * columns for share, columns in self.columns.values()) * self.output
        return (
            self.units * self.passes * (2 * shape.weights * fed + shape.attention * contexts + 2 * shape.hidden * heads)
        )

    def bytes(self, shape: Shape, dtype: str) -> float:
        """Bytes read: all layers and the head's columns in every step, keys and values of the context for every row after
        the first."""
        first, last = self.prompt + 1, self.prompt + self.output - 1
        contexts = (self.output - 1) * (first + last) / 2
        head = max((columns for _, columns in self.columns.values()), default=0) * shape.hidden
        cache = self.units * self.passes * contexts * shape.cache
        return _BYTES[dtype] * (self.engines * self.steps * (shape.weights + head) + cache)


def use_of(work: Work, shape: Shape, dtype: str, seconds: float, peaks: Peaks) -> dict[str, float | None]:
    """``flops`` and ``bandwidth`` a second, and their shares of the device's peaks (None where a peak is not known)."""
    flops, bandwidth = work.flops(shape) / seconds, work.bytes(shape, dtype) / seconds
    return {
        "flops": flops,
        "flops_share": flops / peaks.flops if peaks.flops else None,
        "bandwidth": bandwidth,
        "bandwidth_share": bandwidth / peaks.bandwidth if peaks.bandwidth else None,
    }
