"""The protocols of ``espnet2_vllm.protocol`` on tensors: state of all slots, advanced from the sampled ids, no wait for the device.

Each class keeps one row of numbers per slot, written on the host when a request is admitted (staged, flushed once a step) and
advanced on the device. ``constraint`` and ``advance`` are the tensor twins of the pure functions of the same names.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..layout import PAD, Layout
from ..protocol import AUDIO, BRIDGE, DONE, MODALITY, TEXT, BagpiperRules, BagpiperState, OpusLMRules, OpusLMState
from ..protocol.bagpiper import MAX_ENFORCED


class Constraints(NamedTuple):
    """Per row: phase [B], whether end tokens are open [B], topk [B], temperature [B], guidance scale [B], top-p [B]."""

    phase: torch.Tensor
    end_open: torch.Tensor
    topk: torch.Tensor
    temperature: torch.Tensor
    guidance: torch.Tensor
    top_p: torch.Tensor


class Advanced(NamedTuple):
    """Per row: ids as emitted [B, S], imposed ids [B, S], fed with empty auxiliary streams [B], phase of the next row [B]."""

    rows: torch.Tensor
    forced: torch.Tensor
    fed_empty: torch.Tensor
    after: torch.Tensor

    @property
    def done(self) -> torch.Tensor:
        return self.after == DONE


class SlotTable:
    """Rows of integers and floats per slot; host writes are staged and go over in one copy a step."""

    def __init__(self, num_slots: int, num_ints: int, num_floats: int, device: torch.device) -> None:
        # One slot more than requests: rows of padded or dummy batches write there.
        self.ints = torch.zeros(num_slots + 1, num_ints, dtype=torch.int64, device=device)
        self.floats = torch.ones(num_slots + 1, num_floats, dtype=torch.float32, device=device)
        self._staged: dict[int, tuple[list[int], list[float]]] = {}

    def stage(self, slot: int, ints: list[int], floats: list[float]) -> None:
        assert len(ints) == self.ints.shape[1] and len(floats) == self.floats.shape[1]
        self._staged[slot] = (ints, floats)

    def flush(self) -> None:
        if not self._staged:
            return
        device = self.ints.device
        index = torch.tensor(list(self._staged), dtype=torch.int64).to(device, non_blocking=True)
        ints = torch.tensor([row[0] for row in self._staged.values()], dtype=torch.int64)
        floats = torch.tensor([row[1] for row in self._staged.values()], dtype=torch.float32)
        self.ints[index] = ints.to(device, non_blocking=True)
        self.floats[index] = floats.to(device, non_blocking=True)
        self._staged.clear()


class BagpiperPhases:
    """Slot state of the Bagpiper family.

    Integers per slot: phase, rows of the segment, segments so far, enforced segments, seed, then for text and audio each
    (min_rows, max_rows, topk, last, known), then the enforced phases (0: the model chooses). Floats: temperature and guidance of
    text and audio, then the top-p of both.
    """

    PHASE, STEP, SEGMENTS, ENFORCED, SEED, TEXT_RULES = range(6)
    RULES = 5
    MIN, MAX, TOPK, LAST, KNOWN = range(RULES)
    MAX_ENFORCED = MAX_ENFORCED

    def __init__(self, layout: Layout, num_slots: int, device: torch.device) -> None:
        self.layout = layout
        self.first_enforced = self.TEXT_RULES + 2 * self.RULES
        self.table = SlotTable(num_slots, self.first_enforced + self.MAX_ENFORCED, 6, device)

    def add(self, slot: int, rules: BagpiperRules, state: BagpiperState, seed: int) -> None:
        assert len(rules.enforce) <= self.MAX_ENFORCED, (
            f"{len(rules.enforce)} enforced segments; the backend refuses them"
        )
        ints = [state.phase, state.step, state.segments, len(rules.enforce), seed]
        floats = []
        for block in (rules.text, rules.audio):
            if block is None:
                ints += [0, 1, 1, 1, 0]
                floats += [1.0, 1.0]
            else:
                ints += [block.min_rows, block.max_rows, block.sampling.topk, int(block.last), 1]
                floats += [block.sampling.temperature, max(block.guidance, 1.0)]
        floats += [1.0 if block is None else block.sampling.top_p for block in (rules.text, rules.audio)]
        enforced = [{"text": TEXT, "audio": AUDIO}.get(rules.enforced(i) or "", 0) for i in range(len(rules.enforce))]
        self.table.stage(slot, ints + enforced + [0] * (self.MAX_ENFORCED - len(enforced)), floats)

    def add_companion(self, slot: int) -> None:
        """A companion chooses nothing, so its slot is done from the start."""
        ints = [0] * self.table.ints.shape[1]
        ints[self.PHASE] = DONE
        self.table.stage(slot, ints, [1.0] * self.table.floats.shape[1])

    def seeds(self, slots: torch.Tensor) -> torch.Tensor:
        return self.table.ints[slots, self.SEED]

    def _rule(self, ints: torch.Tensor, audio: torch.Tensor, column: int) -> torch.Tensor:
        text_column = self.TEXT_RULES + column
        return torch.where(audio, ints[:, text_column + self.RULES], ints[:, text_column])

    def constraint(self, slots: torch.Tensor) -> Constraints:
        ints, floats = self.table.ints[slots], self.table.floats[slots]
        phase = ints[:, self.PHASE]
        audio = phase == AUDIO
        content = audio | (phase == TEXT)
        end_open = content & (ints[:, self.STEP] >= self._rule(ints, audio, self.MIN))
        topk = torch.where(content, self._rule(ints, audio, self.TOPK), 1)
        temperature = torch.where(audio, floats[:, 2], floats[:, 0])
        guidance = torch.where(audio, floats[:, 3], floats[:, 1])
        top_p = torch.where(audio, floats[:, 5], floats[:, 4])
        temperature, guidance, top_p = (torch.where(content, x, 1.0) for x in (temperature, guidance, top_p))
        return Constraints(phase, end_open, topk, temperature, guidance, top_p)

    def advance(self, slots: torch.Tensor, chosen: torch.Tensor, emit: torch.Tensor) -> Advanced:
        """``chosen`` [B, S] ids; only rows with ``emit`` [B] change their slot's state."""
        special = self.layout.specials
        ints = self.table.ints[slots]
        phase, step, segments = ints[:, self.PHASE], ints[:, self.STEP], ints[:, self.SEGMENTS]
        bridge, entering, audio = phase == BRIDGE, phase == MODALITY, phase == AUDIO
        content = audio | (phase == TEXT)
        pending = segments < ints[:, self.ENFORCED]

        where_enforced = self.first_enforced + segments.clamp(max=self.MAX_ENFORCED - 1)
        enforced = torch.where(pending, ints.gather(1, where_enforced.unsqueeze(1)).squeeze(1), 0)
        modality = torch.where(enforced == TEXT, special["text"], chosen[:, 0])
        modality = torch.where(enforced == AUDIO, special["audio"], modality)
        primary = torch.where(bridge, special["assistant"], torch.where(entering, modality, chosen[:, 0]))

        to_audio = modality == special["audio"]
        entered = torch.where(to_audio, AUDIO, torch.where(modality == special["text"], TEXT, DONE))
        entered = torch.where(self._rule(ints, to_audio, self.KNOWN) > 0, entered, DONE)

        eot = chosen[:, 0] == special["eot"]
        ended = eot | (chosen[:, 0] == special["eos"])
        last = content & (ended | (step + 1 >= self._rule(ints, audio, self.MAX)))
        goes_on = (self._rule(ints, audio, self.LAST) == 0) & (eot | pending)

        after = torch.where(last, torch.where(goes_on, BRIDGE, DONE), phase)
        after = torch.where(entering, entered, torch.where(bridge, MODALITY, after))
        new_step = torch.where(content & ~last, step + 1, 0)
        state = torch.stack([after, new_step, segments + entering.long()], 1)
        self.table.ints[slots, : self.ENFORCED] = torch.where(emit.unsqueeze(1), state, ints[:, : self.ENFORCED])

        rows = torch.where(audio.unsqueeze(1), chosen, PAD)
        rows[:, 0] = primary
        forced = (~audio).unsqueeze(1).expand(rows.shape).clone()
        forced[:, 0] = bridge | (entering & (enforced > 0))
        return Advanced(rows, forced, last, after)


class OpusLMPhases:
    """Slot state of the OpusLM family.

    Integers per slot: rows so far, finish index (-1 unset), whether the row before ended, audio or not, min_rows, max_rows,
    topk, seed. Floats: temperature, top-p.
    """

    STEP, FINISH, ENDED, IS_AUDIO, MIN, MAX, TOPK, SEED = range(8)

    def __init__(self, layout: Layout, num_slots: int, device: torch.device) -> None:
        self.layout = layout
        self.table = SlotTable(num_slots, 8, 2, device)
        self.streams = torch.arange(layout.num_streams, device=device)

    def add(self, slot: int, rules: OpusLMRules, state: OpusLMState, seed: int) -> None:
        audio = int(rules.modality == "audio")
        ints = [
            state.step,
            state.finish,
            int(state.ended),
            audio,
            rules.min_rows,
            rules.max_rows,
            rules.sampling.topk,
            seed,
        ]
        self.table.stage(slot, ints, [rules.sampling.temperature, rules.sampling.top_p])

    def seeds(self, slots: torch.Tensor) -> torch.Tensor:
        return self.table.ints[slots, self.SEED]

    def constraint(self, slots: torch.Tensor) -> Constraints:
        ints = self.table.ints[slots]
        phase = torch.where(ints[:, self.IS_AUDIO] > 0, AUDIO, TEXT)
        end_open = ints[:, self.STEP] >= ints[:, self.MIN]
        temperature, top_p = self.table.floats[slots].unbind(1)
        return Constraints(phase, end_open, ints[:, self.TOPK], temperature, torch.ones_like(temperature), top_p)

    def advance(self, slots: torch.Tensor, chosen: torch.Tensor, emit: torch.Tensor) -> Advanced:
        """``chosen`` [B, S] ids; only rows with ``emit`` [B] change their slot's state."""
        eos, drain = self.layout.specials["eos"], self.layout.num_streams - 1
        ints = self.table.ints[slots]
        step, finish, limit = ints[:, self.STEP], ints[:, self.FINISH], ints[:, self.MAX]
        emptied = torch.where(finish >= 0, step - finish + 1, 0)
        forced = (self.streams > step.unsqueeze(1)) | (self.streams < emptied.unsqueeze(1))
        forced |= (ints[:, self.IS_AUDIO] == 0).unsqueeze(1) & (self.streams > 0)
        rows = torch.where(forced, PAD, chosen)

        natural = (finish < 0) & (ints[:, self.ENDED] > 0)
        cut = (finish < 0) & ~natural & (step == limit - drain)
        rows[:, 0] = torch.where(cut, eos, rows[:, 0])
        forced[:, 0] |= cut
        finish = torch.where(natural | cut, step, finish)
        done = ((finish >= 0) & (step - finish >= drain)) | (step + 1 >= limit)

        state = torch.stack([step + 1, finish, (rows[:, 0] == eos).long()], 1)
        self.table.ints[slots, : self.IS_AUDIO] = torch.where(emit.unsqueeze(1), state, ints[:, : self.IS_AUDIO])
        after = torch.where(ints[:, self.IS_AUDIO] > 0, AUDIO, TEXT)
        return Advanced(rows, forced, torch.zeros_like(done), torch.where(done, DONE, after))


def make_phases(layout: Layout, num_slots: int, device: torch.device) -> BagpiperPhases | OpusLMPhases:
    kind = BagpiperPhases if layout.family == "bagpiper" else OpusLMPhases
    return kind(layout, num_slots, device)
