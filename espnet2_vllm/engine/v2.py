"""V2 runner adapter: serves CUDA. All that is S streams wide is in ``core``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from .compat import sampler_output
from .core import EXTRA_ARGS, SpeechCore
from .predictions import Predictions, channel_tensors
from .ranks import FirstRank
from .tap import TAP


class SpeechModelState(DefaultModelState):
    """The runner's slots are ours: fixed from admission to removal, and preemption is removal."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        weights = self.model.speech_weights()
        self.core = SpeechCore(
            self.model.layout,
            weights,
            num_slots=self.max_num_reqs,
            max_rows=self.model_config.max_model_len,
            device=self.device,
            agree=FirstRank(),
        )
        self.fused = None
        if self.device.type == "cuda":
            from .fused import FusedStep

            self.fused = FusedStep(self.core, weights, self.max_num_reqs)
        # None: not told, so a row may be in the text phase.
        self.text_rows: bool | None = None
        # Captured graphs read this buffer; prepare_inputs fills it outside of them.
        self.embeds = torch.zeros(
            self.max_num_tokens, self.model_config.get_hidden_size(), dtype=self.dtype, device=self.device
        )
        self.slot_of: dict[str, int] = {}

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        super().add_request(req_index, new_req_data)
        args = (new_req_data.sampling_params.extra_args or {}).get(EXTRA_ARGS)
        if args is None:
            return  # vLLM's warm-up; the scheduler admits no such request
        resume = getattr(new_req_data, "speechlm_resume", None)
        self.core.add(new_req_data.req_id, req_index, args, len(new_req_data.prompt_token_ids), resume)
        self.slot_of[new_req_data.req_id] = req_index
        if args.get("tap"):
            TAP.follow(args["tap"], req_index)

    def remove_request(self, req_id: str) -> None:
        super().remove_request(req_id)
        slot = self.slot_of.pop(req_id, None)
        if slot is not None:
            self.core.remove(req_id, slot)

    def apply_staged_writes(self) -> None:
        super().apply_staged_writes()
        self.core.flush()

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        inputs = super().prepare_inputs(input_batch, req_states)
        total, requests = input_batch.num_tokens, input_batch.num_reqs
        self.model.skip_primary = self.fused_serves() and self.text_rows is False
        inputs["inputs_embeds"] = self.embeds[: input_batch.num_tokens_after_padding]
        if self.fused is not None:
            self.fused.embed(
                self.embeds[:total],
                input_batch.input_ids,
                input_batch.positions,
                input_batch.idx_mapping[:requests],
                input_batch.query_start_loc,
            )
            self._embed_continuous(input_batch)
            return inputs
        starts = input_batch.query_start_loc[: requests + 1].long()
        slots = torch.repeat_interleave(
            input_batch.idx_mapping[:requests].long(), starts[1:] - starts[:-1], output_size=total
        )
        positions = input_batch.positions[:total].long()
        self.embeds[:total] = self.core.embed(input_batch.input_ids[:total].long(), slots, positions)
        self._embed_continuous(input_batch)
        return inputs

    def _embed_continuous(self, input_batch: Any) -> None:
        if self.core.continuous:
            self.core.continuous.write(
                self.embeds,
                input_batch.idx_mapping_np[: input_batch.num_reqs],
                input_batch.query_start_loc_np,
                input_batch.num_computed_tokens_np,
                input_batch.num_scheduled_tokens,
            )

    def fused_serves(self) -> bool:
        """Whether this step's rows are sampled by the kernels; the plain path needs the whole vocabulary's logits."""
        core = self.core
        return self.fused is not None and core.top <= self.fused.max_topk and not core.cut and not TAP.active

    @torch.inference_mode()
    def warm_up(self) -> None:
        if self.fused is not None:
            self.model.skip_primary = False
            self.fused.warm_up(self.model.compute_logits)

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        inputs = super().prepare_dummy_inputs(num_reqs, num_tokens)
        inputs["inputs_embeds"] = self.embeds[:num_tokens]
        return inputs

    def custom_sampler(self, sampler: Any) -> tuple[Any, None]:
        return SpeechSampler(sampler, self), None


class SpeechSampler:
    """Stands in front of vLLM's sampler, which keeps its own books (penalty counts and the like) but chooses nothing."""

    def __init__(self, base: Any, state: SpeechModelState) -> None:
        self.base, self.state = base, state
        self.none_rejected = torch.zeros(state.max_num_reqs, dtype=torch.int32, device=state.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["base"], name)

    def add_request(self, slot: int, *args: Any) -> None:
        # (prompt_len, params) up to 0.30, (params) from 0.32.
        self.base.add_request(slot, *args)

    def apply_staged_writes(self) -> None:
        self.base.apply_staged_writes()

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> Any:
        state, count = self.state, input_batch.num_reqs
        hidden, known = state.model.last_hidden, self.base.req_states.prefill_len.gpu
        slots, lengths = input_batch.idx_mapping[:count], input_batch.seq_lens[:count]
        if state.fused_serves():
            text = None if state.model.skip_primary else logits
            tokens, emits, tensors = state.fused.sample(hidden, text, slots, lengths, known, state.core.top)
        else:
            slots = slots.long()
            # A row emits once everything that was known before the step is in the cache.
            emit = lengths >= known[slots]
            sampled = state.core.sample(hidden, logits, slots, lengths.long(), emit)
            tokens, emits, tensors = sampled.tokens.view(-1, 1), emit.to(torch.int32), channel_tensors(sampled)
        return sampler_output(
            sampled_token_ids=tokens,
            logprobs_tensors=tensors,
            num_sampled=emits,
            num_rejected=self.none_rejected[:count],
        )


class SpeechPromptWorker:
    """Predictions at every prompt row in the form of prompt log-probabilities; takes the place of the runner's own."""

    def __init__(self, state: SpeechModelState) -> None:
        self.state = state
        self._wanted: dict[str, Predictions] = {}

    def add_request(self, req_id: str, req_idx: int, sampling_params: Any) -> None:
        if sampling_params.prompt_logprobs is not None and req_id in self.state.slot_of:
            self._wanted[req_id] = Predictions(self.state.core.layout.num_streams)

    def remove_request(self, req_id: str) -> None:
        self._wanted.pop(req_id, None)

    def compute_prompt_token_id_logprobs(self, *args: Any) -> dict[str, torch.Tensor]:
        """Asked for from 0.32 on; of requests that this package does not make."""
        return {}

    def compute_prompt_logprobs(
        self, logits_fn: Any, hidden_states: torch.Tensor, input_batch: Any, *args: Any
    ) -> dict[str, LogprobsTensors]:
        if not self._wanted:
            return {}
        self.state.model.skip_primary = False  # predictions need the whole vocabulary, whatever the step's rows did
        lengths: np.ndarray = args[-1][input_batch.idx_mapping_np]
        done = {}
        for row, request_id in enumerate(input_batch.req_ids):
            if request_id not in self._wanted:
                continue
            start = int(input_batch.num_computed_tokens_np[row])
            stop = start + int(input_batch.num_scheduled_tokens[row])
            first = int(input_batch.query_start_loc_np[row])
            rows = min(stop, int(lengths[row]) - 1) - start
            self._wanted[request_id].extend(
                self.state.core, hidden_states[first : first + max(rows, 0)], logits_fn, self.state.slot_of[request_id]
            )
            if stop >= lengths[row]:
                done[request_id] = self._wanted.pop(request_id).tensors()
        return done
