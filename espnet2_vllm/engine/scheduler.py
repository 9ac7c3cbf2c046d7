"""vLLM's scheduler with the history of all streams: exact prefix caching and resumption after preemption."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from itertools import compress
from typing import Any

import numpy as np
import vllm.v1.core.kv_cache_utils as kv_cache_utils
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import Request, RequestStatus

from ..errors import EngineError
from ..protocol import AUDIO, replay
from . import channel
from .blocks import QuietBlocks
from .compat import check_options, is_stale, layout_of, steady_rows_known
from .continuous import places, rows_between
from .core import EXTRA_ARGS, auxiliary_from_bytes, rules_from
from .history import History
from .steady import SteadyRows, cached_request_data, count_scheduled
from .streams import Stream

NO_HASHES: list[Any] = []


class SpeechScheduler(AsyncScheduler):
    """Adds three things to vLLM's scheduler, all through overridable methods.

    A step's rows of all streams are recorded as they come back. Blocks that hold audio positions mix a digest of their auxiliary
    ids into the block hash, so that equal primary ids with different codes never share. A request that comes back after
    preemption carries its history and the state of its protocol to the worker. The same goes for continuous rows of prompts.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._check_configuration()
        self.layout = layout_of(self.vllm_config.model_config)
        self.kv_cache_manager = QuietBlocks(self.kv_cache_manager, self.block_size)
        self.history = History(self.layout.num_streams, self.max_model_len)
        self._prompts: dict[str, np.ndarray] = {}
        self._continuous: dict[str, list[tuple[int, int, bytes]]] = {}
        # Requests whose next rows may be in the text phase, which needs the whole vocabulary.
        self._text: set[str] = set()
        self._streams: dict[str, Stream] = {}
        self._steady = None
        if steady_rows_known() and not self.enable_return_routed_experts:
            size = self.hash_block_size
            self._steady = SteadyRows(self.kv_cache_manager, self.layout.stop_token, self.max_model_len, size)
        self._ordinary: set[str] = set()

    def _check_configuration(self) -> None:
        # The backend has looked at the settings before; not so where somebody else started vLLM.
        check_options(self.vllm_config, cpu=current_platform.is_cpu())
        if (groups := len(self.kv_cache_config.kv_cache_groups)) != 1:
            raise EngineError(f"models with more than one KV cache group are not supported; this one has {groups}")

    # -- admission ----------------------------------------------------------------------------------------------------
    def add_request(self, request: Request) -> None:
        if request.request_id not in self.requests:
            args = (request.sampling_params.extra_args or {}).get(EXTRA_ARGS) if request.sampling_params else None
            if args is None:
                raise EngineError(
                    f"{request.request_id}: a request of a SpeechLM needs SamplingParams.extra_args['{EXTRA_ARGS}']"
                )
            prompt = auxiliary_from_bytes(self.layout, args.get("auxiliary"), request.num_prompt_tokens)
            if prompt is not None:
                self._prompts[request.request_id] = prompt
            if "continuous" in args:
                self._continuous[request.request_id] = places(args["continuous"])
            if starts_with_text(args["rules"]):
                self._text.add(request.request_id)
            if "stream" in args:
                before = int(self.layout.family == "bagpiper")
                self._streams[request.request_id] = Stream(*args["stream"], before)
            elif SteadyRows.ordinary(request):
                self._ordinary.add(request.request_id)
            self._install_hasher(request)
        super().add_request(request)

    def _install_hasher(self, request: Request) -> None:
        if request._block_hasher is None:
            return
        request._block_hasher = self._hasher()
        request.block_hashes.clear()
        request.update_block_hashes()

    def _hasher(self) -> Callable[[Request], list[Any]]:
        hash_function = get_hash_fn_by_name(self.cache_config.prefix_caching_hash_algo)
        size = self.hash_block_size

        def block_hashes(request: Request) -> list[Any]:
            start = len(request.block_hashes) * size
            if start + size > request.num_tokens:
                return NO_HASHES  # at most steps no block is full
            hashes: list[Any] = []
            parent = request.block_hashes[-1] if request.block_hashes else None
            while start + size <= request.num_tokens:
                stop = start + size
                extra, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, stop, 0 if start == 0 else -1)
                digest = self._digest(request, start, stop)
                if digest:
                    extra = (*(extra or ()), (EXTRA_ARGS, digest))
                ids = request.all_token_ids[start:stop]
                parent = kv_cache_utils.hash_block_tokens(hash_function, parent, ids, extra)
                hashes.append(parent)
                start = stop
            return hashes

        return block_hashes

    def _digest(self, request: Request, start: int, stop: int) -> bytes:
        """Digest of auxiliary ids as fed and of continuous rows at positions [start, stop); empty if there are none."""
        auxiliary = self.auxiliary(request, start, stop)
        continuous = rows_between(self._continuous.get(request.request_id, ()), start, stop)
        if not (continuous or auxiliary.any()):
            return b""
        return hashlib.blake2b(auxiliary.tobytes() + continuous, digest_size=16).digest()

    def auxiliary(self, request: Request, start: int, stop: int) -> np.ndarray:
        """[stop - start, S-1] auxiliary ids as fed, prompt and generated rows alike."""
        result = np.zeros((stop - start, self.layout.num_streams - 1), dtype=np.int32)
        length = request.num_prompt_tokens
        prompt = self._prompts.get(request.request_id)
        if prompt is not None and start < length:
            result[: min(stop, length) - start] = prompt[start : min(stop, length)]
        if stop > length:
            first = max(start, length)
            result[first - start :] = self.history.fed(request.request_id, first, stop)
        return result

    # -- a step -------------------------------------------------------------------------------------------------------
    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        resumed: dict[str, Any] = {}
        # The V2 runner sees a resumed request as a new one, the V1 runner as a cached one.
        for data in output.scheduled_new_reqs:
            request = self.requests[data.req_id]
            if request.num_output_tokens:
                resumed[data.req_id] = self._resumption(request)
        for request_id in output.scheduled_cached_reqs.resumed_req_ids:
            resumed[request_id] = self._resumption(self.requests[request_id])
        output.speechlm_resumed = resumed
        output.speechlm_text_rows = not self._text.isdisjoint(output.num_scheduled_tokens)
        for data in output.scheduled_new_reqs:
            data.speechlm_resume = resumed.get(data.req_id)
        return output

    def _make_cached_request_data(
        self, running: list[Request], resumed: list[Request], scheduled: Any, drafts: Any, blocks: dict[str, Any]
    ) -> Any:
        if self._steady is None or not self.use_v2_model_runner:
            return super()._make_cached_request_data(running, resumed, scheduled, drafts, blocks)
        names = {request.request_id for request in resumed}
        return cached_request_data([*running, *resumed], names, blocks, self.kv_cache_manager.empty_kv_cache_blocks)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        scheduled = scheduler_output.num_scheduled_tokens
        if self._steady is not None and self._ordinary.issuperset(scheduled):
            count_scheduled(self, scheduled)
        else:
            super()._update_after_schedule(scheduler_output)

    def _resumption(self, request: Request) -> dict[str, Any]:
        start, stop = request.num_prompt_tokens, request.num_tokens
        args = request.sampling_params.extra_args[EXTRA_ARGS]
        if start == stop:  # preempted before it generated anything
            return {"state": None, "auxiliary": np.zeros((0, self.layout.num_streams - 1), dtype=np.int32)}
        fed = self.history.fed(request.request_id, start, stop)
        if "rules" not in args:
            return {"state": None, "auxiliary": fed}  # a companion has no protocol of its own
        emitted = self.history.emitted(request.request_id, start, stop)
        state, _ = replay(rules_from(self.layout, args["rules"]), [tuple(map(int, row)) for row in emitted])
        return {"state": tuple(state), "auxiliary": fed}

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        # Before vLLM appends the tokens, because the hashes of blocks that they fill need all streams.
        requests = self._record(scheduler_output, model_runner_output)
        if self._steady is not None and not model_runner_output.num_nans_in_logits:
            sampled, index = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
            ordinary = self._ordinary
            scheduler_output = self._steady.take(
                scheduler_output,
                [(request, sampled[index[name]]) for name, request in requests.items() if name in ordinary],
            )
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for client in outputs.values():
            client.outputs = [output for output in client.outputs if self._deliver(output, requests)]
        self._forget([request_id for request_id in requests if request_id not in self.requests])
        return outputs

    def _record(self, scheduler_output: Any, model_runner_output: Any) -> dict[str, Request]:
        """Stores the step's rows, as one matrix; gives the requests that they belong to."""
        logprobs, sampled = model_runner_output.logprobs, model_runner_output.sampled_token_ids
        requests: dict[str, Request] = {}
        if logprobs is None or not sampled:
            return requests
        index = model_runner_output.req_id_to_index
        positions, rows = [], []
        for request_id in scheduler_output.num_scheduled_tokens:
            request, row = self.requests.get(request_id), index[request_id]
            if request is None or not sampled[row]:
                continue
            if request.status is not RequestStatus.RUNNING and request.is_finished() or is_stale(request):
                continue
            requests[request_id] = request
            positions.append(len(request._all_token_ids))
            rows.append(row)
        if rows:
            codes = logprobs.logprob_token_ids[rows, 1:]
            self.history.record(list(requests), positions, codes, logprobs.logprobs[rows, 1:])
            # An audio row reaches text by its end, a bridge and a modality row at the earliest: more rows than are in flight.
            audio = channel.next_phases(codes) == AUDIO
            self._text.difference_update(compress(requests, audio))
            self._text.update(compress(requests, ~audio))
        return requests

    def _deliver(self, output: Any, requests: dict[str, Request]) -> bool:
        """Whether an output goes to the client now.

        A request that does not stream gets its first output, for the latency figures, and its last, with all rows. One that
        streams gets the rows in between as its ``Stream`` says; its last output has all of them nevertheless.
        """
        request = requests.get(output.request_id)
        if request is None or request.sampling_params.num_logprobs is not None:
            return True
        if output.finished:
            first, last = request.num_prompt_tokens, request.num_tokens
            codes = self.history.codes(output.request_id, first, last)
            logprobs = self.history.logprobs(output.request_id, first, last)
            output.kv_transfer_params = {EXTRA_ARGS: (codes.astype("<i4").tobytes(), logprobs.astype("<f4").tobytes())}
            if output.prefill_stats is None:
                stream = self._streams.get(output.request_id)
                output.new_token_ids = list(request.output_token_ids[1 if stream is None else stream.sent :])
            return True
        if self._streams and output.request_id in self._streams:
            return self._hand_out(output, request)
        return output.prefill_stats is not None

    def _hand_out(self, output: Any, request: Request) -> bool:
        """Puts the rows of a streaming request into ``output`` if they are due."""
        stream, rows = self._streams[request.request_id], request.num_output_tokens
        due = stream.due(rows, audio=request.request_id not in self._text)
        if not due and output.prefill_stats is None:
            return False
        start = request.num_prompt_tokens
        codes = self.history.codes(request.request_id, start + stream.sent, start + rows)
        output.kv_transfer_params = {EXTRA_ARGS: (codes.astype("<i4").tobytes(), b"")}
        output.new_token_ids = list(request.output_token_ids[stream.sent :])
        stream.sent = rows
        return True

    # -- end ----------------------------------------------------------------------------------------------------------
    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        result = super().finish_requests(*args, **kwargs)
        self._forget([request_id for request_id in self._known() if request_id not in self.requests])
        return result

    def _known(self) -> set[str]:
        tables = (self.history, self._prompts, self._continuous, self._text, self._streams, self._ordinary)
        return set().union(*tables)

    def _forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.history.close(request_id)
            self._prompts.pop(request_id, None)
            self._continuous.pop(request_id, None)
            self._text.discard(request_id)
            self._streams.pop(request_id, None)
            self._ordinary.discard(request_id)


def starts_with_text(rules: dict[str, Any]) -> bool:
    """Whether the first rows of a request may be in the text phase."""
    if "modality" in rules:
        return rules["modality"] == "text"
    return rules["enforce"][:1] != ["audio"]
