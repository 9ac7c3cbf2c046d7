"""Raw logits of chosen requests, for comparisons of backends. Off unless a request asks; in the engine's own process only."""

from __future__ import annotations

import torch

Row = tuple[torch.Tensor, torch.Tensor]


class Tap:
    """Collects (stream 0 [V], auxiliary [S-1, W]) float32 logits of each row that a followed request emits."""

    def __init__(self) -> None:
        self._slot: dict[str, int] = {}
        self._rows: dict[str, list[Row]] = {}
        self._history: dict[str, list[Row]] = {}

    @property
    def active(self) -> bool:
        return bool(self._slot)

    def follow(self, request_id: str, slot: int) -> None:
        """Records the rows of ``request_id``, which now sits in ``slot``; emitted rows from before a preemption stay."""
        self._slot = {other: s for other, s in self._slot.items() if s != slot}
        self._slot[request_id] = slot
        self._rows.setdefault(request_id, [])
        self._history[request_id] = []  # a given history is predicted anew, from its first row on

    def take(self, request_id: str) -> list[Row]:
        """The rows so far, which are forgotten here. Under a given history those of the history alone, without the emitted one."""
        self._slot.pop(request_id, None)
        emitted = self._rows.pop(request_id, [])
        return self._history.pop(request_id, []) or emitted

    def record(self, slots: torch.Tensor, emit: torch.Tensor, primary: torch.Tensor, auxiliary: torch.Tensor) -> None:
        if not self._slot:
            return
        rows = {int(slot): row for row, (slot, on) in enumerate(zip(slots.cpu(), emit.cpu(), strict=True)) if on}
        self._record_rows(rows, primary, auxiliary)

    def record_all(self, slot: int, primary: torch.Tensor, auxiliary: torch.Tensor) -> None:
        """Every row belongs to ``slot``: a given history."""
        for request_id, where in self._slot.items():
            if where == slot:
                pairs = zip(primary.float().cpu(), auxiliary.float().cpu(), strict=True)
                self._history[request_id].extend(pairs)

    def _record_rows(self, rows: dict[int, int], primary: torch.Tensor, auxiliary: torch.Tensor) -> None:
        for request_id, slot in self._slot.items():
            if slot in rows:
                row = rows[slot]
                self._rows[request_id].append((primary[row].float().cpu(), auxiliary[row].float().cpu()))


TAP = Tap()
