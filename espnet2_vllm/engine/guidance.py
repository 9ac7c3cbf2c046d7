"""Classifier-free guidance by pairs: the scheduler of requests that need an unconditional companion.

A guided segment is decoded by two requests in lockstep. The *main* is the user's; its hidden *companion* has a prompt of pad rows
as long as everything that the main has consumed, and from the modality row on is fed the main's rows at the same positions
(ESPnet ``ParallelLLM._prepare_cfg_cache``). The worker merges their logits and gives both the main's ids.

Both are in a step or neither is. A member that must wait is *held*: its last token stays out of the step, so that it always comes
back as a row of one token, like any decode.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from ..errors import EngineError
from ..layout import PAD
from ..protocol import AUDIO, BRIDGE, MODALITY, TEXT, BagpiperRules
from . import channel
from .compat import limit_running
from .core import EXTRA_ARGS, rules_from
from .scheduler import SpeechScheduler

log = logging.getLogger(__name__)

SUFFIX = "::companion"


class PairedRequest(Request):
    """A request that can be held, and what its scheduler knows of its phase."""

    held = 0
    rules: BagpiperRules
    main_id: str | None = None  # of a companion
    next_phase = MODALITY
    segments = 0

    @property
    def is_companion(self) -> bool:
        return self.main_id is not None

    @property
    def num_tokens(self) -> int:
        return len(self._all_token_ids) - self.held

    @property
    def num_tokens_with_spec(self) -> int:
        return len(self._all_token_ids) + len(self.spec_token_ids) - self.held

    @property
    def expected(self) -> int:
        """Tokens, those in flight included."""
        return len(self._all_token_ids) + self.num_output_placeholders

    @property
    def at_last_token(self) -> bool:
        """Nothing but its last token is left to feed."""
        return self.status == RequestStatus.RUNNING and self.num_computed_tokens + 1 >= self.expected

    def guided(self, phase: int) -> bool:
        block = {TEXT: self.rules.text, AUDIO: self.rules.audio}.get(phase)
        return block is not None and block.guidance > 1

    @property
    def may_be_guided(self) -> bool:
        return self.guided(TEXT) or self.guided(AUDIO)

    def enforced_phase(self) -> int | None:
        """Phase that the next segment is bound to have; None if the model chooses."""
        return {"text": TEXT, "audio": AUDIO}.get(self.rules.enforced(self.segments) or "")


class GuidanceScheduler(SpeechScheduler):
    """Creates, pairs, preempts and removes companions; requests without guidance pass through untouched."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seats = self.max_num_running_reqs
        self.mains: dict[str, PairedRequest] = {}
        self.companion_of: dict[str, PairedRequest] = {}
        self.counts = {"companions": 0, "held": 0, "preempted": 0}
        self._ended: list[str] = []  # mains whose guided segment ended in the step at hand
        self._ending: dict[str, RequestStatus] = {}  # mains that the scheduler itself ends
        self._idle = False  # the last step moved nothing and nothing is in flight
        log.info("guidance: up to %d guided requests at once, or %d without guidance", self.seats // 2, self.seats)

    # -- admission ----------------------------------------------------------------------------------------------------
    def add_request(self, request: Request) -> None:
        known = request.request_id in self.requests
        super().add_request(request)
        if known:
            return
        rules = rules_from(self.layout, request.sampling_params.extra_args[EXTRA_ARGS]["rules"])
        request.__class__ = PairedRequest
        request.rules = rules
        if not request.may_be_guided:
            return
        if self.seats < 2:
            raise EngineError("guidance needs max_num_seqs of at least 2")
        self.mains[request.request_id] = request

    def _spawn(self, main: PairedRequest, length: int, token: int) -> None:
        """Creates the companion: ``length`` pad rows and the modality row, ending where its main ends."""
        total = main.num_prompt_tokens + main.max_tokens
        if total <= length + 1:
            return  # the context ends with the modality row: nothing will be sampled
        # Both must reach the end of their tokens together, or the last step is skipped for one of them only.
        params = SamplingParams(
            temperature=0.0,
            max_tokens=total - length - 1,
            ignore_eos=True,
            detokenize=False,
            extra_args={EXTRA_ARGS: {"companion_of": main.request_id}},
        )
        companion = PairedRequest(
            # A name of its own each time: a step of the last companion may still be in flight.
            request_id=f"{main.request_id}{SUFFIX}{self.counts['companions']}",
            prompt_token_ids=[PAD] * length + [token],
            sampling_params=params,
            pooling_params=None,
            client_index=main.client_index,
            arrival_time=main.arrival_time,
            lora_request=main.lora_request,
            priority=main.priority,
            block_hasher=None if main._block_hasher is None else self._hasher(),
        )
        companion.main_id = main.request_id
        companion.rules = main.rules
        self.requests[companion.request_id] = companion
        self._ordinary.add(companion.request_id)
        self.companion_of[main.request_id] = companion
        self.waiting.prepend_request(companion)
        self.counts["companions"] += 1

    # -- a step -------------------------------------------------------------------------------------------------------
    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if not self.mains:
            return super().schedule(*args, **kwargs)
        for main in self.mains.values():
            if main.status == RequestStatus.RUNNING and main.request_id not in self.companion_of:
                self._spawn_if_due(main)
        pairs = self._hold()
        self._pairs_first(pairs)
        preempted = self._make_room(pairs)
        limit_running(self, len(self.running) if preempted else self._seat_limit())
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            limit_running(self, self.seats)
        scheduled = output.num_scheduled_tokens
        # A step that preempts admits nobody, so that it may move nothing though the next one will.
        quiet = not preempted and not scheduled
        self._idle = quiet and not any(request.num_output_placeholders for request in self.running)
        for main, companion in pairs:
            both = (scheduled.get(main.request_id), scheduled.get(companion.request_id))
            assert both in ((1, 1), (None, None)), f"{main.request_id}: pair scheduled as {both} tokens"
        return output

    def _spawn_if_due(self, main: PairedRequest) -> None:
        """A companion as soon as it is certain that the next segment is guided."""
        recorded = len(main._all_token_ids)
        if main.next_phase in (MODALITY, BRIDGE):
            phase = main.enforced_phase()
            if phase is not None and main.guided(phase):
                name = "text" if phase == TEXT else "audio"
                length = recorded + (main.next_phase == BRIDGE)
                self._spawn(main, length, self.layout.modality_token(name))
        elif main.guided(main.next_phase):
            # The model chose the modality itself: the last row is the modality row, and the main is held there.
            self._spawn(main, recorded - 1, main._all_token_ids[-1])

    def _needs_pair(self, main: PairedRequest) -> bool:
        """Whether the next row of ``main`` is sampled from merged logits, or may be."""
        if main.expected >= main.num_prompt_tokens + main.max_tokens:
            return False  # no further row will come
        if main.next_phase in (TEXT, AUDIO):
            return main.guided(main.next_phase)
        rows_ahead = main.num_output_placeholders - (1 if main.next_phase == MODALITY else 2)
        if rows_ahead < 0:
            return False
        phase = main.enforced_phase()
        # Where the model chooses, nothing can be said before its choice has come back.
        return True if phase is None else main.guided(phase)

    def _hold(self) -> list[tuple[PairedRequest, PairedRequest]]:
        """Holds every member whose pair is not ready; gives the pairs that are."""
        pairs = []
        for companion in self.companion_of.values():
            companion.held = 1
        for main in self.mains.values():
            main.held = 0
            if not self._needs_pair(main):
                continue
            companion = self.companion_of.get(main.request_id)
            if companion is not None and self._ready(main, companion):
                companion.held = 0
                pairs.append((main, companion))
            else:
                main.held = 1
                self.counts["held"] += 1
        return pairs

    @staticmethod
    def _ready(main: PairedRequest, companion: PairedRequest) -> bool:
        # A preempted main may come back while its modality row is already known, but none of the pair's rows.
        return (
            main.at_last_token
            and companion.at_last_token
            and main.num_computed_tokens == companion.num_computed_tokens
            and main.expected == companion.expected
        )

    def _pairs_first(self, pairs: list[tuple[PairedRequest, PairedRequest]]) -> None:
        """vLLM allocates from the front and preempts from the back, so pairs in front are never split."""
        place = {id(request): i for i, request in enumerate(self.running)}
        pairs.sort(key=lambda pair: place[id(pair[0])])
        members = [request for pair in pairs for request in pair]
        inside = {id(request) for request in members}
        self.running = members + [request for request in self.running if id(request) not in inside]

    # -- room ---------------------------------------------------------------------------------------------------------
    def _missing_blocks(self, request: Request, tokens: int) -> int:
        have = 0
        if request.status == RequestStatus.RUNNING:
            have = len(self.kv_cache_manager.get_block_ids(request.request_id)[0])
        return max(0, -(-tokens // self.block_size) - have)

    def _unused_blocks(self) -> int:
        return self.kv_cache_manager.block_pool.get_num_free_blocks()

    def _make_room(self, pairs: list[tuple[PairedRequest, PairedRequest]]) -> bool:
        """Preempts whole units from the back until every pair can go on; says whether it did."""
        preempted = False
        while sum(self._missing_blocks(r, r.num_computed_tokens + 1) for p in pairs for r in p) > self._unused_blocks():
            if len(self.running) <= 2 and pairs:
                self._give_up(pairs.pop()[0])
            else:
                self._preempt_unit(self.running[-1])
            pairs[:] = [pair for pair in pairs if pair[0].status == RequestStatus.RUNNING]
            preempted = True
        if not preempted and self._stuck():
            self._break_deadlock()
        return preempted

    def _stuck(self) -> bool:
        """Everybody who runs is held, and nobody could be admitted either."""
        return (
            self._idle
            and bool(self.running)
            and bool(self.waiting)
            and all(getattr(r, "held", 0) for r in self.running)
        )

    def _break_deadlock(self) -> None:
        """Makes room for the head of the queue: the youngest unit that is not its own goes back behind it."""
        head = self.waiting.peek_request()
        unit = self._unit(head)
        others = [request for request in self.running if request not in unit]
        if not others:
            self._give_up(next(request for request in unit if not request.is_companion))
            return
        self._preempt_unit(others[-1])
        waiting = [request for request in unit if request.status != RequestStatus.RUNNING]
        self.waiting.remove_requests(waiting)
        for request in waiting:
            self.waiting.prepend_request(request)

    def _unit(self, request: Request) -> list[PairedRequest]:
        """A request and its mate, the main first."""
        name = self._unit_name(request)
        return [r for r in (self.requests.get(name), self.companion_of.get(name)) if r is not None]

    def _preempt_unit(self, request: Request) -> None:
        now = time.monotonic()
        for member in self._unit(request):
            if member.status == RequestStatus.RUNNING:
                self.running.remove(member)
                self._preempt_request(member, now)
                self.counts["preempted"] += 1

    def _give_up(self, main: PairedRequest) -> None:
        """Ends a pair that cannot fit even alone; its client is told that the context is full."""
        log.error(
            "%s: %d rows and as many of its companion do not fit the %d blocks of the KV cache; the request ends here",
            main.request_id, main.expected, self.kv_cache_manager.block_pool.num_gpu_blocks,
        )  # fmt: skip
        self._ending[main.request_id] = RequestStatus.FINISHED_LENGTH_CAPPED
        self._preempt_unit(main)

    # -- seats --------------------------------------------------------------------------------------------------------
    def _seat_limit(self) -> int:
        """How many may run after this step's admissions: every guided main keeps a seat for its companion."""
        running, admitted = len(self.running), 0
        units = {self._unit_name(request) for request in self.running}
        taken = sum(self._unit_seats(name) for name in units)
        for request in self.waiting:
            name = self._unit_name(request)
            if name not in units:  # else the seat is there already, kept for it by its mate
                taken += self._unit_seats(name)
                units.add(name)
            if taken > self.seats:
                break
            admitted += 1
        return min(running + admitted, self.seats)

    @staticmethod
    def _unit_name(request: PairedRequest) -> str:
        return request.main_id or request.request_id

    def _unit_seats(self, name: str) -> int:
        return 2 if name in self.mains else 1

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        # vLLM must see a held member's step as a prompt chunk that is not the last.
        for request in (*self.mains.values(), *self.companion_of.values()):
            request.held = 0
        super()._update_after_schedule(scheduler_output)

    # -- outputs ------------------------------------------------------------------------------------------------------
    def _record(self, scheduler_output: Any, model_runner_output: Any) -> dict[str, Request]:
        requests = super()._record(scheduler_output, model_runner_output)
        for request_id, request in requests.items():
            if request_id in self.mains:
                code = self.history.codes(request_id, request.num_tokens, request.num_tokens + 1)
                if code[0, 0] & channel.SPLIT:
                    self._report_split(request)
                self._advance(request, int(channel.next_phases(code)[0]))
        return requests

    def _report_split(self, main: PairedRequest) -> None:
        companion = self.companion_of.get(main.request_id)
        log.error(
            "%s: row %d was sampled without its companion (%s); the request ends with an error",
            main.request_id,
            main.num_tokens,
            "none" if companion is None else f"at {companion.num_computed_tokens} of {companion.num_tokens} rows",
        )
        self._ending[main.request_id] = RequestStatus.FINISHED_ERROR

    def _advance(self, main: PairedRequest, phase: int) -> None:
        if main.next_phase == MODALITY:
            main.segments += 1
        ended = main.next_phase in (TEXT, AUDIO) and phase not in (TEXT, AUDIO)
        main.next_phase = phase
        if ended:
            self._ended.append(main.request_id)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        gone = [name for name in self.mains if name not in self.requests]
        self._retire([*self._ended, *gone])
        self._ended.clear()
        for name in gone:
            del self.mains[name]
        self._end(outputs)
        for client in outputs.values():
            if client.scheduler_stats is not None:
                companions = sum(c.status == RequestStatus.RUNNING for c in self.companion_of.values())
                client.scheduler_stats.num_running_reqs -= companions
        return outputs

    def _end(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Ends requests from this side, and tells their clients."""
        for name, status in self._ending.items():
            request = self.mains.get(name)
            if request is None:
                continue
            request.status, before = status, request.status
            output = EngineCoreOutput(request_id=name, new_token_ids=[], finish_reason=request.get_finished_reason())
            request.status = before
            if name in self.history:
                super()._deliver(output, {name: request})
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)
            self.finish_requests([name], status)
        self._ending.clear()

    def _deliver(self, output: Any, requests: dict[str, Request]) -> bool:
        request = requests.get(output.request_id)
        if request is not None and request.is_companion:
            return False
        return super()._deliver(output, requests)

    def _retire(self, names: Iterable[str]) -> None:
        """Finishes the companions of these mains."""
        companions = [self.companion_of.pop(name).request_id for name in names if name in self.companion_of]
        if companions:
            super().finish_requests(companions, RequestStatus.FINISHED_ABORTED)

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        result = super().finish_requests(*args, **kwargs)
        gone = [name for name in self.mains if name not in self.requests]
        self._retire(gone)
        for name in gone:
            del self.mains[name]
        return result
