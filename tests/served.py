"""The vllm backend under test: random requests on recorded models, their rows by the pytorch backend, and a watched engine.

Wherever a row is drawn, two backends may add up the same numbers in another order, so a request is used only if none of its
choices was closer than ``MARGIN``; then every id must be equal whatever the load.
"""

import dataclasses
import random
from collections.abc import Callable

import numpy as np
import torch

from espnet2_vllm.backends.pytorch import PyTorchEngine
from espnet2_vllm.backends.vllm import VllmEngine
from espnet2_vllm.engine.noise import gumbel
from espnet2_vllm.layout import Layout
from espnet2_vllm.plan import Continuous, RowRequest, RowResult
from espnet2_vllm.protocol import PHASES, BagpiperRules, ModalityRules, OpusLMRules, Rules, Sampling, replay

MARGIN = 1e-3
LOGPROB_TOLERANCE = 5e-4  # logits of some of the models reach 70: the last bits of float32, over temperature 0.5
CONTEXT, BLOCK, SEATS = 256, 32, 12
HIDDEN = 64  # of all recorded models
# Fewer blocks than as many requests need, so that a full batch preempts.
TIGHT = {"max_model_len": CONTEXT, "block_size": BLOCK, "max_num_seqs": SEATS, "num_gpu_blocks_override": 10}
DRAWN = Sampling(0.8, 20)


# -- requests ----------------------------------------------------------------------------------------------------------
def text_rows(layout: Layout, rng: random.Random, count: int) -> np.ndarray:
    rows = np.full((count, layout.num_streams), layout.pad, dtype=np.int32)
    rows[:, 0] = [rng.randrange(*layout.text) for _ in range(count)]
    return rows


def audio_rows(layout: Layout, rng: random.Random, count: int) -> np.ndarray:
    columns = [range(*layout.streams[0]), *layout.auxiliary_candidates()]
    return np.array([[rng.choice(ids) for ids in columns] for _ in range(count)], dtype=np.int32).reshape(count, -1)


def header(layout: Layout, modality: str) -> np.ndarray:
    """The last row of a prompt."""
    rows = np.full((1, layout.num_streams), layout.pad, dtype=np.int32)
    rows[0, 0] = layout.specials["assistant"] if layout.family == "bagpiper" else layout.modality_token(modality)
    return rows


def prompt(layout: Layout, rng: random.Random, rows: int, modality: str = "audio") -> np.ndarray:
    """[rows, S]: runs of text and of audio, then the row that announces what is generated."""
    parts, left = [], rows - 1
    while left > 0:
        count = min(left, rng.randint(1, 30))
        parts.append(rng.choice((text_rows, audio_rows))(layout, rng, count))
        left -= count
    return np.concatenate([*parts, header(layout, modality)])


def sampling(rng: random.Random) -> Sampling:
    return rng.choice([Sampling(), DRAWN, Sampling(1.2, 3), Sampling(0.5, 50)])


def rules(layout: Layout, rng: random.Random, modality: str = "audio", longest: int = 40) -> Rules:
    if layout.family == "opuslm":
        high = rng.randint(layout.num_streams, layout.num_streams + longest)
        return OpusLMRules(layout, modality, sampling(rng), rng.randint(0, high), high)

    def block() -> ModalityRules:
        high = rng.randint(1, longest)
        return ModalityRules(sampling(rng), rng.randint(0, high), high, 1.0, rng.random() < 0.1)

    enforce = [rng.choice(["text", "audio", "audio", "image"]) for _ in range(rng.randint(0, 3))]
    return BagpiperRules(layout, tuple(enforce), block(), block() if rng.random() < 0.9 else None)


def sound(rng: random.Random, start: int, count: int) -> Continuous:
    """Continuous rows as an encoder might give them."""
    generator = torch.Generator().manual_seed(rng.getrandbits(63))
    return Continuous(start, count, vectors=torch.randn(count, HIDDEN, generator=generator))


def with_sound(layout: Layout, request: RowRequest, *parts: Continuous) -> RowRequest:
    """``request`` with continuous rows in its prompt."""
    rows = request.prompt.copy()
    for part in parts:
        rows[part.start : part.start + part.count] = layout.pad
    return dataclasses.replace(request, prompt=rows, continuous=parts)


def cropped(continuous: tuple[Continuous, ...], start: int, stop: int) -> tuple[Continuous, ...]:
    """What lies within rows [start, stop), counted from there."""
    kept = []
    for part in continuous:
        low, high = max(part.start, start), min(part.start + part.count, stop)
        if low < high:
            vectors = part.vectors[low - part.start : high - part.start]
            kept.append(Continuous(low - start, high - low, vectors=vectors))
    return tuple(kept)


def random_request(layout: Layout, rng: random.Random, name: str, **options) -> RowRequest:
    modality = rng.choice(["text", "audio", "audio"])
    rows = prompt(layout, rng, rng.randint(2, 70), modality)
    made = RowRequest(name, rows, rules(layout, rng, modality, **options), rng.getrandbits(63))
    if layout.family == "opuslm" or rng.random() < 0.5 or len(rows) < 6:
        return made
    marks = sorted(rng.sample(range(len(rows)), rng.choice([2, 4])))
    parts = [sound(rng, a, b - a) for a, b in zip(marks[::2], marks[1::2], strict=True)]
    return with_sound(layout, made, *parts)


def relative(layout: Layout, rng: random.Random, name: str, other: RowRequest) -> RowRequest:
    """A request whose prompt begins as ``other``'s, but for one auxiliary id or the sound of a clip perhaps."""
    made = random_request(layout, rng, name)
    rows = other.prompt[: rng.randint(1, len(other.prompt))].copy()
    heard = list(cropped(other.continuous, 0, len(rows)))
    if heard and rng.random() < 0.5:
        place = rng.randrange(len(heard))
        heard[place] = sound(rng, heard[place].start, heard[place].count)
    elif rng.random() < 0.5:
        stream = rng.randint(1, layout.num_streams - 1)
        rows[rng.randrange(len(rows)), stream] = rng.choice(layout.auxiliary_candidates()[stream - 1])
    heard += [dataclasses.replace(part, start=part.start + len(rows)) for part in made.continuous]
    rows = np.concatenate([rows, made.prompt])
    first = max(len(rows) - CONTEXT // 2, 0)
    return replaced(made, name, prompt=rows[first:], continuous=cropped(tuple(heard), first, len(rows)))


def forced_request(layout: Layout, rng: random.Random, name: str) -> RowRequest:
    """Teacher forcing (OpusLM)."""
    modality = rng.choice(["text", "audio"])
    count = rng.randint(layout.num_streams, 90)
    reference = (audio_rows if modality == "audio" else text_rows)(layout, rng, count)
    made = OpusLMRules(layout, modality, Sampling(), count + 1, count)
    return RowRequest(name, prompt(layout, rng, rng.randint(2, 70), modality), made, reference=reference)


# -- what must come out ------------------------------------------------------------------------------------------------
def _gap(values: np.ndarray, ids: np.ndarray, how: Sampling, seed: int, position: int, stream: int) -> float:
    """By how much the chosen id won, in units of logit / temperature."""
    order = np.argsort(-values, kind="stable")
    values, ids = values[order], ids[order]
    if how.greedy:
        return float(values[0] - values[1]) if len(values) > 1 else np.inf
    key = torch.tensor([seed]), torch.tensor([position])
    noise = gumbel(*key, stream, torch.as_tensor(ids)[None]).numpy()[0]
    scores, count = values / how.temperature + noise, min(how.topk, len(values))
    winner = int(scores[:count].argmax())
    near = values >= values[count - 1] - MARGIN  # whoever might be among the best elsewhere
    near[winner] = False
    gap = float(scores[winner] - scores[near].max()) if near.any() else np.inf
    return gap if count == len(values) else min(gap, float(values[winner] - values[count]))


def smallest_gap(request: RowRequest, result: RowResult) -> float:
    """Of all choices of a result that has its logits."""
    layout, state, gaps = request.rules.layout, request.rules.start(), [np.inf]
    auxiliary_ids = [np.array(ids) for ids in layout.auxiliary_candidates()]
    for index, (row, forced) in enumerate(zip(result.rows, result.forced, strict=True)):
        constraint, (primary, auxiliary) = request.rules.constraint(state), result.logits[index]
        where = constraint.sampling, request.seed, len(request.prompt) + index
        if not forced[0]:
            ids = np.concatenate([np.arange(*span) for span in constraint.primary])
            gaps.append(_gap(primary[ids], ids, *where, 0))
        for stream, ids in enumerate(auxiliary_ids, 1):
            if not forced[stream]:
                gaps.append(_gap(auxiliary[stream - 1, : len(ids)], ids, *where, stream))
        if request.reference is None:
            state, _ = request.rules.advance(state, tuple(row.tolist()))
    return min(gaps)


class Oracle:
    """The pytorch backend on a model, and requests all of whose choices are clear.

    Attributes:
        expected: results of every request made, by id; with raw logits.
    """

    def __init__(self, checkpoint) -> None:
        # Models so small are many times slower with more threads than idle cores. vLLM takes this function away as it starts.
        torch.set_num_threads(1)
        self.layout = checkpoint.layout
        self._engine = PyTorchEngine(checkpoint, device="cpu", max_rows=CONTEXT, keep_logits=True)
        # vLLM, once it has served an OLMo-2, looks for this on every such model of transformers in the process.
        self._engine._network._backbone.do_not_compile = True
        self.expected: dict[str, RowResult] = {}

    def decode(self, request: RowRequest) -> RowResult:
        self._engine.submit(request)
        ((_, result),) = self._engine.step()
        return result

    def clear(self, make: Callable[[], RowRequest]) -> RowRequest:
        """The first of the requests that ``make`` gives whose choices are clear."""
        for _ in range(50):
            request = make()
            result = self.decode(request)
            if smallest_gap(request, result) > MARGIN:
                self.expected[request.request_id] = result
                return request
        raise AssertionError("50 requests in a row have a close choice: the margin asked for is too large")

    def requests(self, rng: random.Random, count: int) -> list[RowRequest]:
        """Half of them begin like another one."""
        made: list[RowRequest] = []
        for index in range(count):
            name = f"r{index}"
            if made and rng.random() < 0.5:
                other = rng.choice(made)
                made.append(self.clear(lambda: relative(self.layout, rng, name, other)))  # noqa: B023
            else:
                made.append(self.clear(lambda: random_request(self.layout, rng, name)))  # noqa: B023
        return made


def assert_same(found: object, expected: RowResult, what: str) -> None:
    """Every id of every stream, what was forced, why it ended; log-probabilities, which are 0 where an id was forced."""
    assert isinstance(found, RowResult), f"{what}: {found!r}"
    common = min(len(found.rows), len(expected.rows))
    differing = np.flatnonzero((found.rows[:common] != expected.rows[:common]).any(axis=1))
    where = f"{what}: {len(found.rows)} rows, expected {len(expected.rows)}"
    assert not len(differing), (
        f"{where}; row {differing[0]}: {found.rows[differing[0]]}, not {expected.rows[differing[0]]}"
    )
    assert found.rows.shape == expected.rows.shape, where
    assert found.finish == expected.finish, what
    assert np.array_equal(found.forced, expected.forced), what
    assert not found.logprobs[found.forced].any(), what
    worst = np.abs(found.logprobs - expected.logprobs).max(initial=0.0)
    assert worst <= LOGPROB_TOLERANCE, f"{what}: log-probabilities differ by {worst:.3g}"


def phase_before(request: RowRequest, expected: RowResult, row: int) -> str:
    """What the request is about to do when ``row`` of its rows are there."""
    state, _ = replay(request.rules, map(tuple, expected.rows[:row].tolist()))
    if request.rules.layout.family == "bagpiper":
        return PHASES[state.phase]
    return "drain" if state.finish >= 0 else request.rules.modality


# -- the engine, watched -----------------------------------------------------------------------------------------------
class Served:
    """A ``VllmEngine`` and what its scheduler does meanwhile.

    Attributes:
        known: vLLM's own ``Request`` of each of ours since ``forget``, also after its end.
        hits: per id the rows that came from the prefix cache when it was first admitted.
        preempted: (id, rows that it had) of each preemption.
        on_schedule: called with each ``SchedulerOutput``.
    """

    def __init__(self, checkpoint, *, asynchronous: bool = False, **options) -> None:
        self.engine = VllmEngine(checkpoint, asynchronous=asynchronous, **{**TIGHT, **options})
        self.core = self.engine._engine.engine_core.engine_core
        assert (self.core.batch_queue is not None) == asynchronous
        self.scheduler = self.core.scheduler
        self.runner = self.core.model_executor.driver_worker.worker.model_runner
        self.scheduler.schedule = self._watch(self.scheduler.schedule)
        self.forget()

    def forget(self) -> None:
        self.known, self.hits, self.preempted, self.on_schedule = {}, {}, [], None

    def _watch(self, schedule: Callable) -> Callable:
        def watched(*args, **kwargs):
            before = {
                name: (request.num_preemptions, request.num_output_tokens) for name, request in self.known.items()
            }
            output = schedule(*args, **kwargs)
            for name, (count, rows) in before.items():
                self.preempted += [(name, rows)] * (self.known[name].num_preemptions - count)
            names = {request.request_id: name for name, request in self.known.items()}
            for data in output.scheduled_new_reqs:
                self.hits.setdefault(names[data.req_id], data.num_computed_tokens)
            if self.on_schedule is not None:
                self.on_schedule(output)
            return output

        return watched

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
            assert steps < 20_000, f"stuck: running {self.scheduler.running}, waiting {len(self.scheduler.waiting)}"
        return outcomes

    def preempt_all(self) -> None:
        """Takes its blocks from every running request, by vLLM's own means."""
        for request in self.scheduler.running:
            self.preempted += [(name, request.num_output_tokens) for name, one in self.known.items() if one is request]
        self.engine._engine.reset_prefix_cache(reset_running_requests=True)

    def assert_empty(self) -> None:
        """Nothing is left of any request, on either side."""
        assert self.engine.unfinished == 0
        self.engine._engine.step()  # tells the worker what ended since its last step
        assert not self.engine._engine.has_unfinished_requests()
        scheduler = self.scheduler
        left = {
            "requests": list(scheduler.requests), "running": scheduler.running, "waiting": list(scheduler.waiting),
            "history": list(scheduler.history), "prompts": list(scheduler._prompts), "text": scheduler._text,
            "streams": scheduler._streams, "continuous": scheduler._continuous,
            **self._left_in_runner(),
        }  # fmt: skip
        assert not any(left.values()), {name: value for name, value in left.items() if value}
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free == scheduler.cache_config.num_gpu_blocks - 1, "one block is vLLM's own"

    def _left_in_runner(self) -> dict[str, object]:
        if hasattr(self.runner, "model_state"):  # V2
            state, free = self.runner.model_state, self.runner.req_states.free_indices
            own = {"slots": state.slot_of, "wanted": self.runner.prompt_logprobs_worker._wanted}
            core = state.core
        else:
            free, core = self.runner._free_slots, self.runner.core
            own = {"slots": self.runner._slots, "wanted": self.runner._predictions, "known": self.runner.requests}
        return own | {
            "topk": core._topk,
            "mates": core.pairs._slots,
            "sound": core.continuous._slots,
            "seats": set(range(SEATS)) - set(free),
        }

    def close(self) -> None:
        self.engine.close()


def replaced(request: RowRequest, name: str, **changes) -> RowRequest:
    return dataclasses.replace(request, request_id=name, **changes)


class World:
    """A model: its oracle, requests with their rows, and engines in several settings, each started once.

    They end together: closing one takes vLLM's process groups from every other in this process, which holds nothing else.

    Args:
        settings: options of ``Served`` by name.
    """

    def __init__(self, checkpoint, settings: dict[str, dict], *, seed: int, requests: int) -> None:
        self.checkpoint, self.settings = checkpoint, settings
        self.oracle = Oracle(checkpoint)
        self.layout = self.oracle.layout
        self.seed, self.rng = seed, random.Random(seed)
        self.requests = self.oracle.requests(self.rng, requests)
        self._engines: dict[str, Served] = {}

    def engine(self, setting: str) -> Served:
        """Idle, with an empty prefix cache."""
        if setting not in self._engines:
            self._engines[setting] = Served(self.checkpoint, **self.settings[setting])
        served = self._engines[setting]
        assert served.engine.unfinished == 0
        served.engine._engine.reset_prefix_cache()
        served.forget()
        return served

    def add(self, name: str, rows: np.ndarray, made: Rules, *parts: Continuous) -> RowRequest:
        """A request with clear choices, of a seed that gives some; ``parts`` are its continuous rows."""
        return self.oracle.clear(
            lambda: with_sound(self.layout, RowRequest(name, rows, made, self.rng.getrandbits(63)), *parts)
        )

    def forced(self, count: int) -> list[RowRequest]:
        """Teacher forcing (OpusLM)."""
        return [
            self.oracle.clear(lambda: forced_request(self.layout, self.rng, f"forced {i}"))  # noqa: B023
            for i in range(count)
        ]

    def fixed(self, modality: str, rows: int, low: int | None = None) -> Rules:
        """One drawn segment of ``rows`` rows (``low`` to ``rows``, if given)."""
        low = rows if low is None else low
        if self.layout.family == "opuslm":
            return OpusLMRules(self.layout, modality, DRAWN, low, rows)
        block = ModalityRules(DRAWN, low, rows)
        return BagpiperRules(self.layout, (modality,), block, block)

    def chain(self) -> list[RowRequest]:
        """Requests that pass through every phase."""
        if self.layout.family == "opuslm":
            return [
                self.add(f"chain {kind}", prompt(self.layout, self.rng, 40, kind), self.fixed(kind, 24, 6))
                for kind in ("text", "audio")
            ]
        block = ModalityRules(DRAWN, 3, 9)
        made = BagpiperRules(self.layout, ("text", "audio", "text"), block, block)
        return [self.add(f"chain {i}", prompt(self.layout, self.rng, rows), made) for i, rows in enumerate((7, 33))]

    def check(self, found: dict[str, object]) -> None:
        """Outcomes by id, which may have a copy's mark behind a slash."""
        for name, outcome in found.items():
            assert_same(outcome, self.oracle.expected[name.split("/")[0]], f"seed {self.seed}: {name}")

    def close(self) -> None:
        for served in [*self._engines.values()][:1]:
            served.close()
        self._engines.clear()
