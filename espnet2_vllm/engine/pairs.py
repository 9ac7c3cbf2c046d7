"""Which slots are a guided main and its companion, and the merge of their logits."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Partners(NamedTuple):
    """Per row of a batch.

    Attributes:
        row: [B] int64, the row of the other member (its own row where there is none).
        guided: [B] bool, a main whose row is sampled from merged logits.
        companion: [B] bool, a companion that gets its main's row.
        split: [B] bool, a main that wanted guidance and has no companion at the same position beside it.
    """

    row: torch.Tensor
    guided: torch.Tensor
    companion: torch.Tensor
    split: torch.Tensor


class Pairs:
    """Mates by slot. Members come and go separately (a preempted one comes back into another slot)."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.mates = torch.full((num_slots + 1,), -1, dtype=torch.int64, device=device)
        self.is_companion = torch.zeros(num_slots + 1, dtype=torch.bool, device=device)
        self._rows = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._slots: dict[str, int] = {}
        self._companions: dict[str, str] = {}  # of mains
        self._mains: dict[str, str] = {}  # of companions
        self._wanting: set[str] = set()
        self._staged: dict[int, tuple[int, bool]] = {}

    @property
    def any(self) -> bool:
        """Whether any slot holds a member of a pair, or what should be one."""
        return bool(self._mains or self._wanting)

    def add(self, name: str, slot: int, main: str | None, wanting: bool = False) -> None:
        """Puts a request into ``slot``.

        Args:
            main: name of the request whose companion this is.
            wanting: it has guided segments, so that a row of them without a companion must be found out.
        """
        self._slots[name] = slot
        if wanting:
            self._wanting.add(name)
        if main is not None:
            self._mains[name], self._companions[main] = main, name
        self._stage(slot, name)
        mate = self._mains.get(name) or self._companions.get(name)
        if mate in self._slots:
            self._stage(self._slots[mate], mate)

    def remove(self, name: str) -> None:
        slot = self._slots.pop(name, None)
        if slot is None:
            return
        self._wanting.discard(name)
        self._staged[slot] = (-1, False)
        mate = self._mains.pop(name, None)
        if mate is not None:
            del self._companions[mate]
        else:
            mate = self._companions.get(name)
        if mate in self._slots:
            self._stage(self._slots[mate], mate)

    def _stage(self, slot: int, name: str) -> None:
        mate = self._mains.get(name) or self._companions.get(name)
        self._staged[slot] = (self._slots.get(mate, -1), name in self._mains)

    def flush(self) -> None:
        if not self._staged:
            return
        device = self.mates.device
        where = torch.tensor(list(self._staged), dtype=torch.int64).to(device, non_blocking=True)
        values = torch.tensor(list(self._staged.values()), dtype=torch.int64).to(device, non_blocking=True)
        self.mates[where] = values[:, 0]
        self.is_companion[where] = values[:, 1] > 0
        self._staged.clear()

    def partners(
        self, slots: torch.Tensor, positions: torch.Tensor, emit: torch.Tensor, wanted: torch.Tensor
    ) -> Partners:
        """Finds the other members in the batch.

        Args:
            slots, positions: [B] int64.
            emit: [B] bool, rows that sample; both members of a pair do or neither.
            wanted: [B] bool, rows whose segment is guided.
        """
        own = torch.arange(len(slots), device=slots.device)
        self._rows[slots] = own
        mates = self.mates[slots]
        row = self._rows[mates.clamp(min=0)].clamp(max=len(slots) - 1)
        # The table of rows keeps what earlier batches left, so a hit must name the mate's slot itself.
        there = (mates >= 0) & (slots[row] == mates) & (positions[row] == positions) & emit & emit[row]
        companion = self.is_companion[slots]
        guided = wanted & there & ~companion
        split = wanted & emit & ~there & ~companion
        return Partners(torch.where(there, row, own), guided, companion & there & wanted[row], split)


def merge(logits: torch.Tensor, partners: Partners, scale: torch.Tensor) -> torch.Tensor:
    """Guided rows become ``scale * conditional + (1 - scale) * unconditional`` (ESPnet ``ParallelLLM``), others stay.

    Args:
        logits: [B, ...] float32.
        scale: [B] float32.
    """
    shape = (-1,) + (1,) * (logits.dim() - 1)
    scale, guided = scale.view(shape), partners.guided.view(shape)
    # Columns that no row may take are -inf in both members, and their difference is no number.
    mixed = torch.where(torch.isinf(logits), logits, scale * logits + (1 - scale) * logits[partners.row])
    return torch.where(guided, mixed, logits)
