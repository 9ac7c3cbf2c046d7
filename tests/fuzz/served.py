"""The vllm backend, watched."""

import hashlib
import time
from collections.abc import Callable

from espnet2_vllm.backends.vllm import VllmEngine
from espnet2_vllm.engine.compat import limit_running
from espnet2_vllm.engine.guidance import GuidanceScheduler
from espnet2_vllm.plan import RowRequest


class Served:
    """A ``VllmEngine`` and what its scheduler does meanwhile.

    Args:
        options: of the engine; a small model's worth by default.
        fused: on a CPU, the kernels take the place of the plain step (Triton's interpreter, V2 runner).

    Attributes:
        runner: ``v1`` or ``v2``.
        known: vLLM's own ``Request`` of each of ours since ``forget``, also after its end.
        hits: per id the rows that came from the prefix cache when it was first admitted.
        preempted: (id, rows that it had) of each preemption.
        on_schedule: called with each ``SchedulerOutput``.
    """

    def __init__(self, checkpoint, *, asynchronous: bool = False, fused: bool = False, **options) -> None:
        self.engine = VllmEngine(checkpoint, asynchronous=asynchronous, **options)
        self.core = self.engine._engine.engine_core.engine_core
        assert (self.core.batch_queue is not None) == asynchronous
        self.scheduler = self.core.scheduler
        (self.runner,) = set(self.on_ranks(runner_of_worker))
        if fused:
            self.on_ranks(install_kernels)
        self._seats = self.scheduler.max_num_running_reqs
        self._budget = self.scheduler.max_num_scheduled_tokens
        self._unused: list = []
        self._due: set[str] = set()
        self.scheduler.schedule = self._watch(self.scheduler.schedule)
        if isinstance(self.scheduler, GuidanceScheduler):
            self.scheduler._make_room = self._with_preemptions(self.scheduler._make_room)
        self.forget()

    def forget(self) -> None:
        self.known, self.hits, self.preempted, self.on_schedule = {}, {}, [], None

    # -- what a world may change --------------------------------------------------------------------------------------
    def limit(self, *, seats: int | None = None, budget: int | None = None, blocks: int | None = None) -> None:
        """Of an idle engine: seats, rows a step and KV blocks of what it was started with; None gives all of it.

        The number of rows a step may change at any time.
        """
        scheduler = self.scheduler
        if blocks is not None or seats is not None or budget is None:
            whole = scheduler.cache_config.num_gpu_blocks
            self._withhold(0 if blocks is None else whole - blocks)
            limit_running(scheduler, seats or self._seats)
            if isinstance(scheduler, GuidanceScheduler):
                scheduler.seats = scheduler.max_num_running_reqs
        scheduler.max_num_scheduled_tokens = budget or self._budget

    def _withhold(self, blocks: int) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        pool.free_blocks(self._unused)
        self._unused = pool.get_new_blocks(blocks) if blocks else []

    def _watch(self, schedule: Callable) -> Callable:
        def watched(*args, **kwargs):
            before = {
                name: (request.num_preemptions, request.num_output_tokens) for name, request in self.known.items()
            }
            output = self._without_admissions(schedule, *args, **kwargs)
            for name, (count, rows) in before.items():
                self.preempted += [(name, rows)] * (self.known[name].num_preemptions - count)
            names = {request.request_id: name for name, request in self.known.items()}
            for data in output.scheduled_new_reqs:
                if data.req_id in names:  # companions are not
                    self.hits.setdefault(names[data.req_id], data.num_computed_tokens)
            if self.on_schedule is not None:
                self.on_schedule(output)
            return output

        return watched

    def _without_admissions(self, schedule: Callable, *args, **kwargs):
        """A step that preempts admits nobody, in vLLM as here."""
        if not self._due or getattr(self.scheduler, "mains", None):
            return schedule(*args, **kwargs)  # guidance preempts in its own time
        self._preempt_due()
        scheduler = self.scheduler
        limit = scheduler.max_num_running_reqs
        limit_running(scheduler, len(scheduler.running))
        try:
            return schedule(*args, **kwargs)
        finally:
            limit_running(scheduler, limit)

    def _with_preemptions(self, make_room: Callable) -> Callable:
        def made(pairs):
            preempted = self._preempt_due()
            pairs[:] = [pair for pair in pairs if pair[0] in self.scheduler.running]
            return make_room(pairs) or preempted

        return made

    def _preempt_due(self) -> bool:
        """As the scheduler does when a block is missing: in the middle of scheduling, with rows in flight."""
        running, now = self.scheduler.running, time.monotonic()
        chosen = [self.known[name] for name in sorted(self._due) if self.known[name] in running]
        self._due.clear()
        for request in chosen:
            if isinstance(self.scheduler, GuidanceScheduler):
                self.scheduler._preempt_unit(request)
            else:
                running.remove(request)
                self.scheduler._preempt_request(request, now)
        return bool(chosen)

    # -- requests -----------------------------------------------------------------------------------------------------
    def submit(self, *requests: RowRequest) -> None:
        for request in requests:
            before = set(self.scheduler.requests)
            self.engine.submit(request)
            (new,) = set(self.scheduler.requests) - before
            self.known[request.request_id] = self.scheduler.requests[new]

    def run(self, *requests: RowRequest, before_step: Callable[[], None] | None = None) -> dict[str, object]:
        """Outcomes by id."""
        self.submit(*requests)
        outcomes, steps = {}, 0
        while self.engine.unfinished:
            if before_step is not None:
                before_step()
            outcomes.update(self.engine.step())
            steps += 1
            assert steps < 20_000, f"stuck: {self.describe()}"
        return outcomes

    def describe(self) -> str:
        scheduler = self.scheduler
        return (
            f"running {[r.request_id for r in scheduler.running]}, waiting {[r.request_id for r in scheduler.waiting]}"
        )

    def rows_of(self, name: str) -> int:
        """Rows of a request that have come back."""
        return self.known[name].num_output_tokens

    def runs(self, name: str) -> bool:
        return self.known[name] in self.scheduler.running

    def preempt(self, *names: str) -> None:
        """Takes their blocks in the next step, as for want of blocks."""
        self._due.update(names)

    def preempt_all(self) -> None:
        """Takes its blocks from every running request and empties the prefix cache, by vLLM's own means."""
        for request in self.scheduler.running:
            self.preempted += [(name, request.num_output_tokens) for name, one in self.known.items() if one is request]
        withheld = len(self._unused)
        self._withhold(0)  # no block may be in use
        self.engine._engine.reset_prefix_cache(reset_running_requests=True)
        self._withhold(withheld)

    # -- what is left -------------------------------------------------------------------------------------------------
    def assert_empty(self) -> None:
        """Nothing is left of any request, on either side."""
        assert self.engine.unfinished == 0
        self.engine._engine.step()  # tells the worker what ended since its last step
        assert not self.engine._engine.has_unfinished_requests()
        left = {name: value for name, value in (self._left_in_scheduler() | self._left_in_workers()).items() if value}
        assert not left, left
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        own = self.scheduler.cache_config.num_gpu_blocks - 1  # one block is vLLM's own
        assert free + len(self._unused) == own, f"{own - free - len(self._unused)} blocks are not free"

    def _left_in_scheduler(self) -> dict[str, object]:
        scheduler = self.scheduler
        left = {
            "requests": list(scheduler.requests), "running": scheduler.running, "waiting": list(scheduler.waiting),
            "history": list(scheduler.history), "prompts": list(scheduler._prompts), "text": scheduler._text,
            "streams": scheduler._streams, "continuous": scheduler._continuous,
        }  # fmt: skip
        if isinstance(scheduler, GuidanceScheduler):
            left |= {"mains": scheduler.mains, "companions": scheduler.companion_of}
            left |= {"ending": scheduler._ending, "ended": scheduler._ended}
        return left

    def _left_in_workers(self) -> dict[str, object]:
        """Of all ranks, by what it is and whose."""
        ranks = self.on_ranks(left_in_worker)
        left = {f"{name} of rank {rank}": value for rank, found in enumerate(ranks) for name, value in found.items()}
        # Slots of the V2 runner are vLLM's, which need not give the same ones on all ranks.
        tables = set() if self.runner == "v2" else set(self.on_ranks(tables_of_worker))
        return left | {"tables that differ between ranks": len(tables) > 1}

    def on_ranks(self, function: Callable) -> list:
        """What ``function`` gives for the worker of each rank, in its process."""
        return self.engine._engine.collective_rpc(function)

    def close(self) -> None:
        self.engine.close()


def install_kernels(worker) -> None:
    from espnet2_vllm.engine.fused import FusedStep

    state = worker.model_runner.model_state
    state.fused = FusedStep(state.core, state.model.speech_weights(), state.max_num_reqs)


def left_in_worker(worker) -> dict[str, object]:
    runner, seats = worker.model_runner, worker.vllm_config.scheduler_config.max_num_seqs
    if hasattr(runner, "model_state"):  # V2
        state, free = runner.model_state, runner.req_states.free_indices
        own = {"slots": state.slot_of, "wanted": runner.prompt_logprobs_worker._wanted}
        core = state.core
    else:
        free, core = runner._free_slots, runner.core
        own = {"slots": runner._slots, "wanted": runner._predictions, "known": runner.requests}
    pairs = core.pairs
    own |= {"mates": pairs._slots, "mains of slots": pairs._mains, "companions of slots": pairs._companions}
    own |= {"sound": core.continuous._slots}
    own |= {"topk": core._topk, "cut": core._cut, "seats": set(range(seats)) - set(free)}
    return {name: str(value) if value else None for name, value in own.items()}


def tables_of_worker(worker) -> str:
    """Digest of the history, all streams of all slots."""
    core = worker.model_runner.core
    return hashlib.sha256(core.history[: core.scratch].numpy().tobytes()).hexdigest()


def runner_of_worker(worker) -> str:
    return "v2" if hasattr(worker.model_runner, "model_state") else "v1"
