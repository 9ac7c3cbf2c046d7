"""State and sampling of all requests on tensors by slot. Knows no runner; the adapters are thin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import embedding_bag

from ..errors import EngineError
from ..layout import Layout
from ..protocol import AUDIO, BagpiperRules, OpusLMRules, Sampling
from . import channel
from .continuous import ContinuousRows
from .heads import AuxiliaryHeads, primary_masks
from .pairs import Pairs, Partners, merge
from .phases import make_phases
from .sampling import choose
from .tap import TAP

EXTRA_ARGS = "speechlm"  # key of SamplingParams.extra_args


class SpeechWeights(NamedTuple):
    """What the core needs of a model: embedding [V, H], lm_head [V, H], stream_emb [S, H]."""

    embedding: torch.Tensor
    head: torch.Tensor
    stream_emb: torch.Tensor


@dataclass(frozen=True)
class Sampled:
    """One step's rows.

    Attributes:
        tokens: [B] int64, what vLLM sees: the fed id of stream 0, or the stop token of a finished request.
        codes: [B, S] int64, ids as emitted with flags (``channel.encode``).
        logprobs: [B, S] float32.
    """

    tokens: torch.Tensor
    codes: torch.Tensor
    logprobs: torch.Tensor


def rules_from(layout: Layout, data: Mapping[str, Any]) -> BagpiperRules | OpusLMRules:
    return (BagpiperRules if layout.family == "bagpiper" else OpusLMRules).from_dict(layout, data)


def auxiliary_from_bytes(layout: Layout, data: bytes | None, rows: int) -> np.ndarray | None:
    """[rows, S-1] int32 from the bytes in a request's arguments; None if all are empty."""
    if not data:
        return None
    auxiliary = np.frombuffer(data, dtype="<i4")
    if auxiliary.size != rows * (layout.num_streams - 1):
        raise EngineError(
            f"{auxiliary.size} auxiliary ids for {rows} prompt rows of {layout.num_streams - 1} auxiliary streams"
        )
    return auxiliary.reshape(rows, -1)


class SpeechCore:
    """Everything that is S streams wide.

    Memory: the history table takes ``num_slots x max_rows x (S-1) x 4`` bytes, the auxiliary heads ``(S-1) x W x H`` weights.

    Args:
        agree: gives all ranks the chosen ids of one of them; see ``ranks.FirstRank``.
    """

    def __init__(
        self,
        layout: Layout,
        weights: SpeechWeights,
        *,
        num_slots: int,
        max_rows: int,
        device: torch.device,
        agree: Callable[[torch.Tensor], torch.Tensor] = lambda ids: ids,
    ) -> None:
        self.layout, self.device, self.agree = layout, device, agree
        self.embedding = weights.embedding
        streams = layout.num_streams
        if streams < 2:
            raise EngineError("a layout of one stream is plain text; use vLLM itself")
        self.history = torch.zeros(num_slots + 1, max_rows + 1, streams - 1, dtype=torch.int32, device=device)
        self.scratch = num_slots
        self.phases = make_phases(layout, num_slots, device)
        self.heads = AuxiliaryHeads(layout, weights.head, weights.stream_emb)
        self.masks = primary_masks(layout, device)
        self.ends = torch.tensor(layout.end_tokens, dtype=torch.int64, device=device)
        self.columns = torch.arange(layout.vocab_size, device=device).unsqueeze(0)
        self.stream_codes = torch.tensor(channel.stream_codes(streams), dtype=torch.int64, device=device)
        self.auxiliary_streams = torch.arange(1, streams, device=device)
        self.pairs = Pairs(num_slots, device)
        self.continuous = ContinuousRows(weights.embedding.shape[1], weights.embedding.dtype, device)
        self._topk: dict[int, int] = {}
        self._cut: set[int] = set()  # slots of requests with a top-p below 1
        self._pending: list[tuple[int, int, np.ndarray]] = []

    # -- requests -----------------------------------------------------------------------------------------------------
    def add(
        self, name: str, slot: int, args: Mapping[str, Any], prompt_rows: int, resume: Mapping[str, Any] | None
    ) -> None:
        """Puts a request into ``slot``.

        Args:
            name: the engine's id of the request.
            args: ``extra_args["speechlm"]``: rules, seed, auxiliary ids and continuous rows of the prompt.
            prompt_rows: rows of the original prompt.
            resume: of a request that comes back after preemption: ``state`` of its protocol and ``auxiliary`` ids [n, S-1] of
                the rows behind the prompt, as fed.
        """
        main = args.get("companion_of")
        if main is None:
            rules = rules_from(self.layout, args["rules"])
            self.pairs.add(name, slot, None, is_guided(rules))
            state = rules.start()
            if resume is not None and resume["state"] is not None:
                state = type(state)(*resume["state"])
            self.phases.add(slot, rules, state, int(args["seed"]))
            wanted = samplings(rules)
            self._topk[slot] = max((sampling.topk for sampling in wanted), default=1)
            if any(sampling.top_p < 1 for sampling in wanted):
                self._cut.add(slot)
        else:
            self.pairs.add(name, slot, main)
            self.phases.add_companion(slot)
        self.continuous.add(slot, args.get("continuous", ()))
        prompt = auxiliary_from_bytes(self.layout, args.get("auxiliary"), prompt_rows)
        # The slot's last tenant left its ids behind: every position that is read before it is written must be cleared.
        self._pending.append(
            (slot, 0, np.zeros((prompt_rows, self.layout.num_streams - 1), np.int32) if prompt is None else prompt)
        )
        if resume is not None and len(resume["auxiliary"]):
            self._pending.append((slot, prompt_rows, resume["auxiliary"]))

    @property
    def top(self) -> int:
        """No request's topk is larger."""
        return max(self._topk.values(), default=1)

    @property
    def cut(self) -> bool:
        """Whether a request may have a row with a top-p below 1."""
        return bool(self._cut)

    def remove(self, name: str, slot: int) -> None:
        self.pairs.remove(name)
        self._topk.pop(slot, None)
        self._cut.discard(slot)
        self.continuous.remove(slot)

    def flush(self) -> None:
        """Writes what ``add`` staged; once a step, before ``embed``."""
        self.phases.table.flush()
        self.pairs.flush()
        for slot, start, rows in self._pending:
            values = torch.from_numpy(np.array(rows, dtype=np.int32))
            self.history[slot, start : start + len(rows)] = values.to(self.device, non_blocking=True)
        self._pending.clear()

    # -- a step -------------------------------------------------------------------------------------------------------
    def embed(self, token_ids: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Input of the backbone: the sum over streams of the embedding rows.

        Args:
            token_ids, slots, positions: [n] int64; the position's auxiliary ids come from the history.

        Returns:
            [n, H].
        """
        auxiliary = self.history[slots, positions].long()
        primary = torch.nn.functional.embedding(token_ids, self.embedding)
        skip = None if self.layout.pad_embedded else self.layout.pad
        return primary + embedding_bag(auxiliary, self.embedding, mode="sum", padding_idx=skip)

    def primary_logits(self, logits: torch.Tensor, constraints: Any) -> torch.Tensor:
        """[B, V] float32 logits of stream 0, -inf where the phase forbids."""
        masked = logits[:, : self.layout.vocab_size].float()
        masked = masked.masked_fill(~self.masks[constraints.phase], -torch.inf)
        ends = logits[:, self.ends].float()
        masked[:, self.ends] = torch.where(constraints.end_open.unsqueeze(1), ends, masked[:, self.ends])
        return masked

    def sample(
        self,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        emit: torch.Tensor,
    ) -> Sampled:
        """Samples all streams of all rows and advances their slots.

        Args:
            hidden: [B, H] backbone output behind the final norm.
            logits: [B, V] raw logits of stream 0.
            slots: [B] int64.
            positions: [B] int64 position of each sampled row (one past its input).
            emit: [B] bool; other rows (prompt chunks that are not the last) change nothing.
        """
        constraints = self.phases.constraint(slots)
        auxiliary = self.heads(hidden)
        TAP.record(slots, emit, logits, auxiliary)
        partners = None
        if self.pairs.any:
            partners = self.pairs.partners(slots, positions, emit, constraints.guidance > 1)
            logits, auxiliary = (merge(x, partners, constraints.guidance) for x in (logits.float(), auxiliary))
        if not self.cut:
            constraints = constraints._replace(top_p=None)
        seeds = self.phases.seeds(slots)
        first, first_logprob = self._choose_primary(logits, constraints, seeds, positions)
        rest, rest_logprob = self._choose_auxiliary(auxiliary, constraints, seeds, positions)
        chosen = self.agree(torch.cat([first.unsqueeze(1), rest], 1))
        advanced = self.phases.advance(slots, chosen, emit)
        logprobs = torch.cat([first_logprob.unsqueeze(1), rest_logprob], 1)
        if partners is not None:
            # A companion gets its main's row.
            source = torch.where(partners.companion, partners.row, torch.arange(len(slots), device=slots.device))
            advanced, logprobs = type(advanced)(*(x[source] for x in advanced)), logprobs[source]
        return self._finish(slots, positions, emit, advanced, logprobs, partners)

    def _choose_primary(
        self, logits: torch.Tensor, constraints: Any, seeds: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return choose(
            self.primary_logits(logits, constraints),
            self.columns,
            constraints.topk,
            constraints.temperature,
            self.top,
            seeds,
            positions,
            torch.zeros_like(seeds),
            constraints.top_p,
        )

    def _choose_auxiliary(
        self, logits: torch.Tensor, constraints: Any, seeds: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch, streams, width = logits.shape
        repeat = lambda x: x.repeat_interleave(streams)  # noqa: E731
        column, logprob = choose(
            logits.view(-1, width),
            self.heads.ids.repeat(batch, 1),
            repeat(constraints.topk),
            repeat(constraints.temperature),
            self.top,
            repeat(seeds),
            repeat(positions),
            self.auxiliary_streams.repeat(batch),
            None if constraints.top_p is None else repeat(constraints.top_p),
        )
        ids = self.heads.ids.unsqueeze(0).expand(batch, -1, -1).gather(-1, column.view(batch, streams, 1)).squeeze(-1)
        return ids, logprob.view(batch, streams)

    def _finish(
        self,
        slots: torch.Tensor,
        positions: torch.Tensor,
        emit: torch.Tensor,
        advanced: Any,
        logprobs: torch.Tensor,
        partners: Partners | None,
    ) -> Sampled:
        fed = torch.where(advanced.fed_empty.unsqueeze(1), self.layout.pad, advanced.rows[:, 1:]).to(torch.int32)
        where = torch.where(emit, slots, self.scratch)
        self.history[where, positions.clamp(max=self.history.shape[1] - 1)] = fed
        logprobs = torch.where(advanced.forced, 0.0, logprobs)
        flags = (advanced.forced.long(), advanced.fed_empty.long(), advanced.after)
        codes = channel.encode(advanced.rows, *flags, self.stream_codes)
        if partners is not None:
            codes[:, 0] += partners.split.long() * channel.SPLIT
        tokens = torch.where(advanced.done, self.layout.stop_token, advanced.rows[:, 0])
        return Sampled(tokens, codes, logprobs)

    # -- teacher forcing ----------------------------------------------------------------------------------------------
    def predict(self, hidden: torch.Tensor, logits: torch.Tensor, slots: torch.Tensor) -> Sampled:
        """Masked argmax of all streams under a given history; changes nothing. Arguments as ``sample``.

        End tokens are closed (ESPnet ``ARDelayLM`` with teacher forcing).
        """
        constraints = self.phases.constraint(slots)
        constraints = constraints._replace(end_open=torch.zeros_like(constraints.end_open))
        auxiliary = self.heads(hidden)
        TAP.record_all(int(slots[0]) if len(slots) else -1, logits, auxiliary)
        first = self.primary_logits(logits, constraints).argmax(-1)
        audio = (constraints.phase == AUDIO).unsqueeze(1)
        best = auxiliary.argmax(-1, keepdim=True)
        rest = self.heads.ids.unsqueeze(0).expand(len(slots), -1, -1).gather(-1, best).squeeze(-1)
        rows = torch.cat([first.unsqueeze(1), torch.where(audio, rest, self.layout.pad)], 1)
        none = torch.zeros_like(rows)
        imposed = none.clone()
        imposed[:, 1:] = ~audio
        codes = channel.encode(rows, imposed, none[:, 0], none[:, 0], self.stream_codes)
        return Sampled(first, codes, torch.zeros(rows.shape, dtype=torch.float32, device=rows.device))


def is_guided(rules: BagpiperRules | OpusLMRules) -> bool:
    """Whether a segment of the request may be guided."""
    blocks = () if isinstance(rules, OpusLMRules) else (rules.text, rules.audio)
    return any(block is not None and block.guidance > 1 for block in blocks)


def samplings(rules: BagpiperRules | OpusLMRules) -> list[Sampling]:
    """How the request's rows may be chosen."""
    if isinstance(rules, OpusLMRules):
        return [rules.sampling]
    return [block.sampling for block in (rules.text, rules.audio) if block is not None]
