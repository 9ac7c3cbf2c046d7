"""V1 runner adapter: serves CPUs. All that is S streams wide is in ``core``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from .core import EXTRA_ARGS, SpeechCore
from .predictions import Predictions, channel_tensors
from .ranks import FirstRank
from .tap import TAP


class SpeechCPURunner(CPUModelRunner):
    """vLLM's CPU runner with slots of our own, keyed by request id; so the order of its batch does not matter."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.core = SpeechCore(
            self.model.layout,
            self.model.speech_weights(),
            num_slots=self.max_num_reqs,
            max_rows=self.max_model_len,
            device=self.device,
            agree=FirstRank(),
        )
        self._slots: dict[str, int] = {}
        self._free_slots = list(range(self.max_num_reqs))[::-1]
        self._predictions: dict[str, Predictions] = {}
        self._positions = np.zeros(0, dtype=np.int64)

    # -- slots --------------------------------------------------------------------------------------------------------
    def _release(self, request_id: str) -> None:
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self.core.remove(request_id, slot)
            self._free_slots.append(slot)

    def _occupy(self, request_id: str, args: dict[str, Any], prompt_rows: int, resume: Any) -> None:
        slot = self._slots[request_id] = self._free_slots.pop()
        self.core.add(request_id, slot, args, prompt_rows, resume)
        if args.get("tap"):
            TAP.follow(args["tap"], slot)

    def _update_states(self, scheduler_output: Any) -> Any:
        # In one order on all ranks, which a set of names does not have; so each request has one slot on all of them.
        for request_id in sorted({*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ())}):
            self._release(request_id)
            self._predictions.pop(request_id, None)  # a prompt that comes back is predicted from its first row on
        for data in scheduler_output.scheduled_new_reqs:
            args = data.sampling_params.extra_args[EXTRA_ARGS]
            self._occupy(data.req_id, args, len(data.prompt_token_ids), None)
        for request_id, resume in scheduler_output.speechlm_resumed.items():
            known = self.requests[request_id]
            args = known.sampling_params.extra_args[EXTRA_ARGS]
            self._occupy(request_id, args, len(known.prompt_token_ids), resume)
        return super()._update_states(scheduler_output)

    # -- a step -------------------------------------------------------------------------------------------------------
    def _preprocess(self, scheduler_output: Any, num_input_tokens: int, intermediate_tensors: Any = None) -> Any:
        prepared = super()._preprocess(scheduler_output, num_input_tokens, intermediate_tensors)
        token_ids, _, positions, *rest = prepared
        ids = self.input_batch.req_ids
        counts = np.array([scheduler_output.num_scheduled_tokens[i] for i in ids], dtype=np.int64)
        self._batch_slots = torch.tensor([self._slots[i] for i in ids], dtype=torch.int64)
        self._positions = self.input_batch.num_computed_tokens_cpu[: len(ids)].astype(np.int64) + counts
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        total = int(self._starts[-1])
        self.core.flush()
        slots = torch.repeat_interleave(self._batch_slots, torch.from_numpy(counts), output_size=total)
        embeds = self.core.embed(self.input_ids.gpu[:total].long(), slots, positions[:total].long())
        if self.core.continuous:
            batch_slots, computed = self._batch_slots.numpy(), self._positions - counts
            self.core.continuous.write(embeds, batch_slots, self._starts[:-1], computed, counts)
        if num_input_tokens > total:
            embeds = torch.nn.functional.pad(embeds, (0, 0, 0, num_input_tokens - total))
        return (token_ids, embeds, positions, *rest)

    def _sample(self, logits: torch.Tensor, spec_decode_metadata: Any) -> SamplerOutput:
        assert spec_decode_metadata is None, "speculative decoding was refused at start-up"
        count = len(self.input_batch.req_ids)
        emit = torch.from_numpy(~self.discard_request_mask.np[:count])
        positions = torch.from_numpy(self._positions)
        sampled = self.core.sample(self.model.last_hidden, logits, self._batch_slots, positions, emit)
        tokens = sampled.tokens.to(torch.int32).unsqueeze(1)
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=channel_tensors(sampled))

    # -- teacher forcing ----------------------------------------------------------------------------------------------
    def _get_prompt_logprobs_dict(
        self, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, Any]:
        """Predictions at every row of the prompts that ask for them, in the form of prompt log-probabilities.

        Takes the place of vLLM's own, which knows one stream only. Entry i of a request predicts row i + 1.
        """
        done = {}
        for request_id in list(self.num_prompt_logprobs):
            if request_id not in num_scheduled_tokens:
                continue
            row = self.input_batch.req_id_to_index[request_id]
            length = len(self.requests[request_id].prompt_token_ids)
            known = self._predictions.setdefault(request_id, Predictions(self.core.layout.num_streams))
            start = int(self._positions[row]) - num_scheduled_tokens[request_id]
            hidden = hidden_states[self._starts[row] : self._starts[row + 1]][: max(length - 1 - start, 0)]
            known.extend(self.core, hidden, self.model.compute_logits, self._slots[request_id])
            if self._positions[row] >= length:
                done[request_id] = self._predictions.pop(request_id).tensors()
                del self.num_prompt_logprobs[request_id]
        return done
