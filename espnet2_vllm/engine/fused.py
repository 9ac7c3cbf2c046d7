"""The step path on CUDA: the same as ``core``'s plain methods, in five launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from vllm.v1.outputs import LogprobsTensors

from ..layout import NUM_SPECIALS
from ..protocol import AUDIO, BRIDGE, DONE, MODALITY, TEXT
from . import kernels
from .core import SpeechCore, SpeechWeights
from .phases import BagpiperPhases, OpusLMPhases

# Candidates that a row takes from each chunk of the text span, of which a step uses the least that suffices; each is compiled
# for itself. Beyond the last the plain path serves.
CANDIDATES = (1, 32, 64)
MAX_TOPK = CANDIDATES[-1]
TEXT_CHUNK = 4096


class FusedStep:
    """Embedding, heads and sampler of a step by Triton kernels.

    Stream 0 of an audio row needs the special ids and its own interval only, so these rows of ``lm_head`` and those of all
    auxiliary streams are one matrix (``weight``), and the whole vocabulary is multiplied only in steps that have a text row.
    """

    max_topk = MAX_TOPK

    def __init__(self, core: SpeechCore, weights: SpeechWeights, max_rows: int) -> None:
        layout, device = core.layout, weights.head.device
        self.core = core
        self.streams = layout.num_streams
        self.bagpiper = layout.family == "bagpiper"
        compact = [*range(NUM_SPECIALS), *range(*layout.streams[0])]
        self.compact_ids = torch.tensor(compact, dtype=torch.int32, device=device)
        self.masks = core.masks[:, self.compact_ids.long()].to(torch.uint8).contiguous()
        self.auxiliary_ids = core.heads.ids.to(torch.int32).contiguous()
        self.auxiliary_valid = core.heads.valid.to(torch.uint8).contiguous()
        rows = weights.head.detach()[self.compact_ids.long()]
        first = weights.stream_emb.detach()[0].float()
        bias = (
            rows.float() @ first if layout.primary_stream_embedded else rows.new_zeros(len(rows), dtype=torch.float32)
        )
        self.weight = torch.cat([rows.t(), core.heads.weight], 1).contiguous()
        self.bias = torch.cat([bias, core.heads.bias]).to(rows.dtype)
        self.chunks = triton.cdiv(layout.text.size, TEXT_CHUNK)
        self.search_steps = max_rows.bit_length()
        self._allocate(max_rows, device)

    def _allocate(self, rows: int, device: torch.device) -> None:
        """Buffers between the kernels of one step; what leaves the step is allocated afresh, since its copy runs on."""
        streams = self.streams
        self.chosen_ids = torch.zeros(rows, streams, dtype=torch.int32, device=device)
        self.chosen_logprobs = torch.zeros(rows, streams, dtype=torch.float32, device=device)
        self.text_values = torch.zeros(rows, self.chunks * MAX_TOPK, dtype=torch.float32, device=device)
        self.text_ids = torch.zeros(rows, self.chunks * MAX_TOPK, dtype=torch.int32, device=device)
        self.partners = torch.zeros(rows, dtype=torch.int32, device=device)
        self.ranks = torch.ones(rows, dtype=torch.int32, device=device)

    # -- input rows ---------------------------------------------------------------------------------------------------
    def embed(
        self,
        out: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor,
    ) -> None:
        """Fills ``out`` [n, H] for ``token_ids`` [n] of requests that begin at ``starts`` [R + 1] and sit in ``slots`` [R]."""
        history, hidden = self.core.history, out.shape[1]
        block = min(triton.next_power_of_2(hidden), 1024)
        requests = len(slots)
        kernels.embed_kernel[(len(token_ids), triton.cdiv(hidden, block))](
            out, token_ids, positions, slots, starts, requests, history, self.core.embedding, hidden,
            history.stride(0), history.stride(1), AUXILIARY=self.streams - 1, PAD_EMBEDDED=self.core.layout.pad_embedded,
            STEPS=self.search_steps, BLOCK=block,
        )  # fmt: skip

    # -- sampling -----------------------------------------------------------------------------------------------------
    def sample(
        self,
        hidden: torch.Tensor,
        text_logits: torch.Tensor | None,
        slots: torch.Tensor,
        seq_lens: torch.Tensor,
        prefill_lens: torch.Tensor,
        topk: int,
        guided: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, LogprobsTensors]:
        """Tokens [B, 1] int64, rows that emit [B] int32, and the channel's tensors.

        Args:
            hidden: [B, H].
            text_logits: [B, V], or None if no row is in the text phase.
            slots, seq_lens: [B] int32; the sampled row's position is its sequence length.
            prefill_lens: per slot the rows that were known before the step.
            topk: no row's is larger.
            guided: whether there may be pairs; None asks the core.
        """
        batch = len(hidden)
        logits = torch.addmm(self.bias, hidden, self.weight)
        guided = self.core.pairs.any if guided is None else guided
        if guided:
            self._find_partners(slots, seq_lens, prefill_lens)
        self._auxiliary(logits, slots, seq_lens, guided)
        self._primary(logits, text_logits, slots, seq_lens, topk, guided)
        self.core.agree(self.chosen_ids[:batch])
        tokens = torch.empty(batch, 1, dtype=torch.int64, device=hidden.device)
        ids = torch.empty(batch, self.streams + 1, dtype=torch.int32, device=hidden.device)
        logprobs = torch.empty(batch, self.streams + 1, dtype=torch.float32, device=hidden.device)
        emits = torch.empty(batch, dtype=torch.int32, device=hidden.device)
        self._advance((tokens, ids, logprobs, emits), slots, seq_lens, prefill_lens, guided)
        return tokens, emits, LogprobsTensors(ids, logprobs, self.ranks[:batch])

    def warm_up(self, compute_logits: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Compiles whatever ``sample`` can need, so that no request waits for a compiler; changes nothing.

        Args:
            compute_logits: gives [B, V] of stream 0, as in a step that has text rows.
        """
        device = self.weight.device
        rows = min(2, len(self.partners))
        hidden = torch.zeros(rows, len(self.weight), dtype=self.weight.dtype, device=device)
        slots = torch.arange(rows, dtype=torch.int32, device=device)
        # Rows of prompts that go on: they do not emit, and what does not emit is not kept.
        lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        known = torch.ones(len(self.partners), dtype=torch.int32, device=device)
        logits = compute_logits(hidden)
        for guided in (False, True) if self.bagpiper else (False,):
            self.sample(hidden, None, slots, lengths, known, MAX_TOPK, guided)
            for topk in CANDIDATES:
                self.sample(hidden, logits, slots, lengths, known, topk, guided)

    def _columns(self) -> dict[str, Any]:
        if self.bagpiper:
            table = BagpiperPhases
            return {"BAGPIPER": True, "PHASE": table.PHASE, "SEED": table.SEED}
        return {"BAGPIPER": False, "PHASE": OpusLMPhases.IS_AUDIO, "SEED": OpusLMPhases.SEED}

    def _find_partners(self, slots: torch.Tensor, seq_lens: torch.Tensor, prefill_lens: torch.Tensor) -> None:
        table, pairs = self.core.phases.table, self.core.pairs
        kernels.partners_kernel[(len(slots),)](
            self.partners, slots, seq_lens, prefill_lens, pairs.mates, pairs.is_companion, table.ints, table.ints.stride(0),
            table.floats, table.floats.stride(0), len(slots), TEXT=TEXT, AUDIO=AUDIO, PHASE=BagpiperPhases.PHASE,
            BLOCK=256,
        )  # fmt: skip

    def _auxiliary(self, logits: torch.Tensor, slots: torch.Tensor, seq_lens: torch.Tensor, guided: bool) -> None:
        table = self.core.phases.table
        auxiliary, width = self.auxiliary_ids.shape
        if not auxiliary:
            return
        audio_rules = BagpiperPhases.TEXT_RULES + BagpiperPhases.RULES
        kernels.auxiliary_kernel[(len(logits), auxiliary)](
            self.chosen_ids, self.chosen_logprobs, logits, logits.stride(0), self.auxiliary_ids, self.auxiliary_valid,
            slots, seq_lens, table.ints, table.ints.stride(0), table.floats, table.floats.stride(0), self.partners,
            len(self.compact_ids), GUIDED=guided,
            AUDIO=AUDIO, TOPK=audio_rules + BagpiperPhases.TOPK if self.bagpiper else OpusLMPhases.TOPK,
            TEMPERATURE=2 if self.bagpiper else 0, WIDTH=width, STREAMS=self.streams,
            BLOCK=triton.next_power_of_2(width), **self._columns(),
        )  # fmt: skip

    def _primary(
        self,
        logits: torch.Tensor,
        text_logits: torch.Tensor | None,
        slots: torch.Tensor,
        seq_lens: torch.Tensor,
        topk: int,
        guided: bool,
    ) -> None:
        layout, table = self.core.layout, self.core.phases.table
        best = next(size for size in CANDIDATES if size >= topk)
        # Without text rows nothing depends on it, and one compilation serves all.
        candidates = 0 if text_logits is None else self.chunks * best
        rules = BagpiperPhases.TEXT_RULES if self.bagpiper else 0
        top_column = rules + BagpiperPhases.TOPK if self.bagpiper else OpusLMPhases.TOPK
        if text_logits is not None:
            kernels.text_kernel[(len(logits), self.chunks)](
                self.text_values, self.text_ids, text_logits, text_logits.stride(0), layout.text.start, layout.text.size,
                slots, table.ints, table.ints.stride(0), table.floats, table.floats.stride(0), self.partners, self.chunks,
                TEXT=TEXT, TOPK=top_column, K=best, GUIDED=guided, BLOCK=TEXT_CHUNK,
                **{k: v for k, v in self._columns().items() if k != "SEED"},
            )  # fmt: skip
        ends = (*layout.end_tokens, layout.end_tokens[0])
        kernels.primary_kernel[(len(logits),)](
            self.chosen_ids, self.chosen_logprobs, logits, logits.stride(0), self.compact_ids, self.masks, slots, seq_lens,
            table.ints, table.ints.stride(0), table.floats, table.floats.stride(0), self.partners, self.text_values,
            self.text_ids, candidates, ends[0], ends[1], TEXT=TEXT, AUDIO=AUDIO,
            STEP=BagpiperPhases.STEP if self.bagpiper else OpusLMPhases.STEP, RULES=BagpiperPhases.RULES,
            MIN=rules + BagpiperPhases.MIN if self.bagpiper else OpusLMPhases.MIN, TOPK=top_column,
            TEMPERATURE=2 if self.bagpiper else 0, WIDTH=len(self.compact_ids), STREAMS=self.streams,
            HAS_TEXT=text_logits is not None, GUIDED=guided, BLOCK=triton.next_power_of_2(len(self.compact_ids)),
            CANDIDATES=triton.next_power_of_2(max(candidates, 1)), num_warps=8, **self._columns(),
        )  # fmt: skip

    def _advance(
        self,
        outputs: tuple[torch.Tensor, ...],
        slots: torch.Tensor,
        seq_lens: torch.Tensor,
        prefill_lens: torch.Tensor,
        guided: bool,
    ) -> None:
        core, special = self.core, self.core.layout.specials
        history, ints = core.history, core.phases.table.ints
        block = triton.next_power_of_2(self.streams)
        tokens, ids, logprobs, emits = outputs
        common = (
            tokens, ids, logprobs, history, self.chosen_ids, self.chosen_logprobs, slots, seq_lens, prefill_lens, emits,
            ints, ints.stride(0), history.stride(0), history.stride(1), core.scratch, history.shape[1] - 1,
        )  # fmt: skip
        if self.bagpiper:
            kernels.bagpiper_kernel[(len(tokens),)](
                *common, self.partners, special["assistant"], special["text"], special["audio"], special["eos"], special["eot"],
                core.layout.stop_token, MODALITY=MODALITY, TEXT=TEXT, AUDIO=AUDIO, BRIDGE=BRIDGE, DONE=DONE,
                FIRST_RULES=BagpiperPhases.TEXT_RULES, RULES=BagpiperPhases.RULES,
                FIRST_ENFORCED=core.phases.first_enforced, MAX_ENFORCED=BagpiperPhases.MAX_ENFORCED,
                STREAMS=self.streams, GUIDED=guided, BLOCK=block, num_warps=1,
            )  # fmt: skip
        else:
            kernels.opuslm_kernel[(len(tokens),)](
                *common, special["eos"], core.layout.stop_token, TEXT=TEXT, AUDIO=AUDIO, DONE=DONE,
                STREAMS=self.streams, BLOCK=block, num_warps=1,
            )  # fmt: skip
