"""Rows that change nothing but their request's length, taken out of vLLM's own loop over a step's requests.

Most rows of a step neither begin nor end a request, and nobody waits for them. vLLM handles each in some ten calls and makes an
output of it, which ``SpeechScheduler`` would drop; at hundreds of requests this is most of what a step costs the host.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.request import Request, RequestStatus

from .blocks import MARGIN, QuietBlocks


class SteadyRows:
    """Appends rows as ``AsyncScheduler.update_from_output`` would, for the requests of which it would say nothing.

    Args:
        stop_token: id that ends a request.
        max_model_len: rows of a sequence at most.
        hash_block_size: rows that a block hash covers.
    """

    def __init__(self, blocks: QuietBlocks, stop_token: int, max_model_len: int, hash_block_size: int) -> None:
        self._blocks, self._stop = blocks, stop_token
        self._longest, self._hashed = max_model_len, hash_block_size

    @staticmethod
    def ordinary(request: Request) -> bool:
        """Whether a request can have such rows at all: nothing but ids and its length can end it, and nobody watches it."""
        params = request.sampling_params
        return (
            params.num_logprobs is None
            and params.prompt_logprobs is None
            and params.min_tokens == 0
            and params.eos_token_id is None
            and params.repetition_detection is None
            and not request.use_structured_output
            and not request.resumable
            and not request.has_encoder_inputs
        )

    def take(self, scheduler_output: Any, requests: Iterable[tuple[Request, list[int]]]) -> Any:
        """Appends what can be appended; the scheduler's output of the step without these requests.

        Args:
            scheduler_output: of the step; not changed.
            requests: ordinary ones that got a row in it, and the ids that they got.
        """
        scheduled = dict(scheduler_output.num_scheduled_tokens)
        hashed, size = self._hashed, self._blocks.block_size
        # One loop without calls: it runs for every row of a step.
        for request, tokens in requests:
            if not self.is_steady(request, tokens):
                continue
            request.num_in_flight_tokens -= scheduled.pop(request.request_id)
            request._output_token_ids.append(tokens[0])
            rows = request._all_token_ids
            rows.append(tokens[0])
            if not len(rows) % hashed:
                request.update_block_hashes()
            request.num_output_placeholders = due = request.num_output_placeholders - 1
            assert due >= 0, f"{request.request_id}: {due} rows due"
            computed = request.num_computed_tokens - due
            if computed % size < MARGIN or request.is_prefill_chunk:  # else nothing is to be cached
                self._blocks.cache_blocks(request, computed)
        rest = copy.copy(scheduler_output)
        rest.num_scheduled_tokens = scheduled
        return rest

    def is_steady(self, request: Request, tokens: list[int]) -> bool:
        """Whether nothing would come of this row but a longer request."""
        length = len(request._all_token_ids) + 1
        return (
            length < self._longest
            and tokens[0] != self._stop
            and request.prefill_stats is None  # its first output is out
            and length < request.num_prompt_tokens + request.max_tokens
            and request.status is RequestStatus.RUNNING
            and len(tokens) == 1
            and not request.events
        )


def cached_request_data(
    requests: list[Request], resumed: set[str], blocks: dict[str, Any], none: Any
) -> CachedRequestData:
    """What ``Scheduler._make_cached_request_data`` says to the V2 runner.

    Args:
        requests: all of the step that the runner knows.
        resumed: ids of those that come back after preemption.
        blocks: new KV cache blocks by request id.
        none: the object that stands for no new blocks.
    """
    names = [request.request_id for request in requests]
    new = map(blocks.__getitem__, names)
    return CachedRequestData(
        req_ids=names,
        resumed_req_ids=resumed,
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None if given is none else given.get_block_ids(allow_none=True) for given in new],
        num_computed_tokens=[request.num_computed_tokens for request in requests],
        num_output_tokens=[len(request._output_token_ids) + request.num_output_placeholders for request in requests],
    )


def count_scheduled(scheduler: Any, scheduled: dict[str, int]) -> None:
    """Books of ``AsyncScheduler._update_after_schedule`` for ordinary requests, in one pass."""
    requests, prefills = scheduler.requests, scheduler._inflight_prefills
    fence = scheduler.sched_step_seq if scheduler.defer_block_free else None
    next_step = scheduler.current_step + scheduler.pp_size if scheduler.use_v2_model_runner else None
    for name, count in scheduled.items():
        request = requests[name]
        request.num_computed_tokens += count
        request.num_in_flight_tokens += count
        if fence is not None:
            request.last_sched_seq = fence
        request.is_prefill_chunk = request.num_computed_tokens < request.num_tokens + request.num_output_placeholders
        if request.is_prefill_chunk:
            continue
        prefills.discard(request)
        request.num_output_placeholders += 1
        if next_step is not None:
            request.next_decode_eligible_step = next_step
    scheduler.finished_req_ids = set()
    scheduler.reset_preempted_req_ids = set()
