"""What an engine must bear, whatever its settings: each function plays one such thing on a world and asserts.

The tests of the vllm backend call them; ``served_check.py`` does where a process of its own is needed.
"""

import random
from dataclasses import replace

import numpy as np
import served as cases
from served import BLOCK, CONTEXT, DRAWN, Served, World, replaced

from espnet2_vllm.protocol import BagpiperRules, ModalityRules, Sampling, replay


def together(world: World, served: Served) -> None:
    """More requests than there are seats, in both orders."""
    for order in (world.requests, world.requests[::-1]):
        world.check(served.run(*order))
    served.assert_empty()


def alone(world: World, served: Served, count: int = 10) -> None:
    for request in world.requests[:count]:
        world.check(served.run(request))
    assert not served.preempted
    served.assert_empty()


# -- preemption --------------------------------------------------------------------------------------------------------
def preempted_at_every_row(world: World, served: Served) -> None:
    """Through all phases."""
    phases = set()
    for request in world.chain():
        served.forget()
        expected, rows = world.oracle.expected[request.request_id], [-1]

        def preempt(request=request, rows=rows):
            now = served.known[request.request_id].num_output_tokens
            if now != rows[0]:
                served.preempt_all()
                rows[0] = now

        world.check(served.run(request, before_step=preempt))
        at = {row for _, row in served.preempted}
        assert at >= set(range(1, len(expected.rows))), "a row was left out"
        phases |= {cases.phase_before(request, expected, row) for row in at}
    wanted = {"bagpiper": {"modality", "text", "audio", "bridge"}, "opuslm": {"text", "audio", "drain"}}
    assert phases - {"done"} == wanted[world.layout.family]
    served.assert_empty()


def preempted_beside_neighbours(world: World, served: Served, count: int = 12) -> None:
    rng = random.Random(world.seed)

    def preempt():
        if rng.random() < 0.08:
            served.preempt_all()

    world.check(served.run(*world.requests[:count], before_step=preempt))
    names = [name for name, _ in served.preempted]
    assert any(names.count(name) > 1 for name in names), "nobody was preempted twice"
    served.assert_empty()


def preempted_for_want_of_blocks(world: World, served: Served) -> None:
    world.check(served.run(*world.requests))
    assert served.preempted
    served.assert_empty()


# -- rows before the end -------------------------------------------------------------------------------------------
def streamed(world: World, served: Served, count: int = 10) -> None:
    """Half of the requests hand out rows as they come, preempted or not; the others only at the end."""
    rng = random.Random(world.seed)
    requests, made = world.requests[:count] + world.chain(), {}
    for index, request in enumerate(requests):
        stream = None if index % 2 else (rng.randint(1, 6), rng.randint(1, 4))
        made[request.request_id] = replaced(request, request.request_id, stream=stream)
    handed: dict[str, list[np.ndarray]] = {}

    def step():
        for name, rows in served.engine.take_rows():
            handed.setdefault(name, []).append(rows)
        if rng.random() < 0.05:
            served.preempt_all()

    found = served.run(*made.values(), before_step=step)
    step()
    world.check(found)
    streaming = {name for name, request in made.items() if request.stream is not None and len(found[name].rows) > 1}
    assert set(handed) == streaming
    for name, parts in handed.items():
        assert all(map(len, parts)), name
        rows, (first, then) = np.concatenate(parts), made[name].stream
        assert np.array_equal(rows, found[name].rows[: len(rows)]), name
        # What is left for the end is less than an interval, or an audio segment that had not reached its first.
        assert len(found[name].rows) - len(rows) <= first + then, name
    served.assert_empty()


# -- prefix cache ------------------------------------------------------------------------------------------------------
def same_prompt_again(world: World, served: Served) -> None:
    request = max(world.requests, key=lambda one: len(one.prompt))
    for _ in range(2):
        world.check(served.run(request))
        hits = served.hits[request.request_id]
        served.forget()
    assert hits == (len(request.prompt) - 1) // BLOCK * BLOCK > 0


def other(world: World, rows: np.ndarray, row: int, stream: int) -> np.ndarray:
    """``rows`` with another auxiliary id at one place."""
    changed = rows.copy()
    choices = [i for i in world.layout.auxiliary_candidates()[stream - 1] if i != rows[row, stream]]
    changed[row, stream] = world.rng.choice(choices)
    return changed


def equal_primary_ids(world: World, served: Served, places: tuple[int, ...]) -> None:
    """Prompts that differ in one auxiliary id share nothing behind it."""
    layout, streams = world.layout, world.layout.num_streams
    audio = cases.audio_rows(layout, world.rng, 3 * BLOCK)
    rows, rules = np.concatenate([audio, cases.header(layout, "audio")]), world.fixed("audio", 12, 0)
    first = world.add("first", rows, rules)
    world.check(served.run(first))
    for row in places:
        for stream in {1, streams - 1}:
            name = f"row {row} stream {stream}"
            world.check(served.run(world.add(name, other(world, rows, row, stream), rules)))
            assert served.hits[name] == row // BLOCK * BLOCK, name
    silent = rows.copy()
    silent[:, 1:] = layout.pad
    world.check(served.run(world.add("silent", silent, rules)))
    assert served.hits["silent"] == 0, "no auxiliary ids at all"
    world.check(served.run(replaced(first, "first/again")))
    assert served.hits["first/again"] == 3 * BLOCK


def shared_text(world: World, served: Served) -> None:
    """The text in front of different clips is shared."""
    layout = world.layout
    text = cases.text_rows(layout, world.rng, 2 * BLOCK + 3)
    for name in ("clip 1", "clip 2"):
        audio = cases.audio_rows(layout, world.rng, BLOCK)
        rows = np.concatenate([text, audio, cases.header(layout, "audio")])
        world.check(served.run(world.add(name, rows, world.fixed("audio", 12, 0))))
    assert served.hits == {"clip 1": 0, "clip 2": 2 * BLOCK}


def same_sound(world: World, served: Served) -> None:
    """A clip that comes again is found in the cache, one that sounds otherwise is not, and clips are told apart by their place."""
    layout, rng = world.layout, world.rng
    rows = np.concatenate([cases.text_rows(layout, rng, BLOCK + 7 + 2 * BLOCK + 5), cases.header(layout, "audio")])
    rules, clip = world.fixed("audio", 12, 0), cases.sound(rng, BLOCK + 7, 2 * BLOCK)
    vectors = clip.vectors.clone()
    vectors[-1] *= 0.5
    first = world.add("clip", rows, rules, clip)
    requests = [
        (first, 0),
        (replaced(first, "clip/again"), 3 * BLOCK),
        (world.add("other", rows, rules, cases.sound(rng, clip.start, clip.count)), BLOCK),
        (world.add("end altered", rows, rules, replace(clip, vectors=vectors)), BLOCK),
        (world.add("a row later", rows, rules, replace(clip, start=clip.start + 1)), BLOCK),
    ]
    for request, hits in requests:
        world.check(served.run(request))
        assert served.hits[request.request_id] == hits, request.request_id
    served.assert_empty()


def fed_rows(world: World, request: cases.RowRequest) -> np.ndarray:
    """Generated rows as the model saw them."""
    _, steps = replay(request.rules, map(tuple, world.oracle.expected[request.request_id].rows.tolist()))
    return np.array([step.fed for step in steps], dtype=np.int32)


def second_turn(world: World, served: Served) -> None:
    """A dialogue's second request finds the rows that the first one generated, as long as they are the same in all streams."""
    layout, rng = world.layout, world.rng
    rules = world.fixed("audio", 40)
    first = world.add("turn 1", cases.prompt(layout, rng, 30), rules)
    world.check(served.run(first))
    known = np.concatenate([first.prompt, fed_rows(world, first)])
    turn = cases.prompt(layout, rng, 20)
    world.check(served.run(world.add("turn 2", np.concatenate([known, turn]), rules)))
    # The last row was never fed, and vLLM was shown its stop token there.
    assert served.hits["turn 2"] == (len(known) - 1) // BLOCK * BLOCK > len(first.prompt)
    row = len(first.prompt) + 12
    altered = np.concatenate([other(world, known, row, layout.num_streams - 1), turn])
    world.check(served.run(world.add("turn 2 altered", altered, rules)))
    assert served.hits["turn 2 altered"] == row // BLOCK * BLOCK


def as_fed_not_as_emitted(world: World, served: Served) -> None:
    """Bagpiper feeds the last row of a segment with empty auxiliary streams: that is what is in the cache."""
    layout = world.layout
    rules = BagpiperRules(layout, ("audio", "audio"), None, ModalityRules(DRAWN, BLOCK, BLOCK))
    first = world.add("as emitted", cases.prompt(layout, world.rng, 5), rules)
    world.check(served.run(first))
    emitted, fed = world.oracle.expected["as emitted"].rows, fed_rows(world, first)
    end = BLOCK  # row 0 announces, rows 1..BLOCK are the first segment
    assert emitted[end, 1:].any() and not fed[end, 1:].any()
    for name, rows, same in (("like emitted", emitted, end), ("like fed", fed, len(fed) - 1)):
        request = world.add(name, np.concatenate([first.prompt, rows, cases.header(layout, "audio")]), rules)
        world.check(served.run(request))
        assert served.hits[name] == (len(first.prompt) + same) // BLOCK * BLOCK, name


# -- sampling ----------------------------------------------------------------------------------------------------------
def seeds(world: World, served: Served) -> None:
    """The same rows alone, in a crowd, on other slots; another seed gives others."""
    rows, rules = cases.prompt(world.layout, world.rng, 20), world.fixed("audio", 25)
    one, two = (world.add(name, rows, rules) for name in ("seed 1", "seed 2"))
    assert one.seed != two.seed
    drawn = [world.oracle.expected[name].rows for name in ("seed 1", "seed 2")]
    assert (drawn[0] != drawn[1]).any(axis=1).mean() > 0.5, "two seeds give the same"
    world.check(served.run(one))
    copies = [replaced(one, f"seed 1/{i}") for i in range(5)]
    world.check(served.run(*world.requests[:5], *copies, two))
    served.assert_empty()


# -- ends --------------------------------------------------------------------------------------------------------------
def aborts(world: World, served: Served) -> None:
    """Leave nothing and disturb nobody."""
    rng, aborted = random.Random(world.seed), set()
    names = {request.request_id for request in world.requests}

    def abort():
        if rng.random() < 0.15 and len(aborted) < 10:
            gone = rng.sample(sorted(names - aborted), 2)  # some have finished
            served.engine.abort([*gone, "unknown"])
            aborted.update(gone)

    found = served.run(*world.requests, before_step=abort)
    assert aborted and found.keys() >= names - aborted
    world.check(found)
    again = [replaced(request, f"{request.request_id}/again") for request in world.requests[:6]]
    served.submit(*again)
    for _ in range(3):
        served.engine.step()
    served.engine.abort([request.request_id for request in again])
    assert served.engine.step() == []
    served.assert_empty()


def context_cuts(world: World, served: Served) -> None:
    """What does not fit into the context is cut, with all that was there."""
    for room in (1, 2, 12):
        name = f"room {room}"
        request = world.add(name, cases.prompt(world.layout, world.rng, CONTEXT - room), world.fixed("audio", 40))
        expected = world.oracle.expected[name]
        assert (expected.finish, len(expected.rows)) == ("length", room)
        world.check(served.run(request))
    served.assert_empty()


def segments_without_rules(world: World, served: Served) -> None:
    """Modalities that have no rules, or cannot be decoded at all, end a Bagpiper request."""
    layout, block = world.layout, ModalityRules(Sampling(), 0, 3)
    last = ModalityRules(DRAWN, 0, 1, last=True)
    variants = [
        (("text",), None, block),
        (("text", "audio"), block, None),
        ((), block, block),
        (("image", "audio"), block, block),
        (("audio",) * 5, block, block),
        (("audio",) * 5, block, last),
    ]
    requests = [
        world.add(f"ends {i}", cases.prompt(layout, world.rng, 9), BagpiperRules(layout, *variant))
        for i, variant in enumerate(variants)
    ]
    assert len({len(world.oracle.expected[request.request_id].rows) for request in requests}) > 2
    world.check(served.run(*requests))
    served.assert_empty()


# -- teacher forcing ---------------------------------------------------------------------------------------------------
def teacher_forcing(world: World, served: Served, forced: list[cases.RowRequest]) -> None:
    """Alone, twice, and beside requests that generate."""
    for request in forced[:2] * 2:
        world.check(served.run(request))
    mixed = [*world.requests[:6], *forced]
    random.Random(world.seed).shuffle(mixed)
    world.check(served.run(*mixed))
    served.assert_empty()


def teacher_forcing_preempted(world: World, served: Served, forced: list[cases.RowRequest]) -> None:
    """Within the prompt, which is longer than a chunk."""
    left = {request.request_id: 2 for request in forced}

    def preempt():
        # vLLM itself fails if it drops the step that ends such a prompt.
        if any(served.known[name].num_output_placeholders for name in left):
            return
        for name in left:
            request = served.known[name]
            if left[name] and 0 < request.num_computed_tokens < request.num_prompt_tokens:
                left[name] -= 1
                served.preempt_all()
                return

    found = served.run(*forced, *world.requests[:6], before_step=preempt)
    world.check(found)
    for name in left:
        assert found[name].logits is None or len(found[name].logits) == len(found[name].rows)
    assert not all(left.values()), "no prompt was long enough"
    served.assert_empty()


# -- everything at random ----------------------------------------------------------------------------------------------
def play(world: World, served: Served, seed: int) -> None:
    """Admissions, aborts, preemptions, and chunk sizes at random; what finishes is compared."""
    print(f"world {seed}", flush=True)
    rng = random.Random(seed)
    waiting = [replaced(request, f"{request.request_id}/{i}") for i in range(2) for request in world.requests]
    rng.shuffle(waiting)
    running, found = set(), {}
    budget = served.scheduler.max_num_scheduled_tokens
    busy = rng.uniform(0.05, 0.6)
    while waiting or running:
        while waiting and rng.random() < busy:
            served.submit(waiting[-1])
            running.add(waiting.pop().request_id)
        if running and rng.random() < 0.01:
            gone = rng.sample(sorted(running), min(2, len(running)))
            served.engine.abort(gone)
            running.difference_update(gone)
        if rng.random() < 0.02:
            served.preempt_all()
        if rng.random() < 0.05:
            served.scheduler.max_num_scheduled_tokens = rng.randint(cases.SEATS, budget)
        for name, outcome in served.engine.step():
            found[name] = outcome
            running.remove(name)
    served.scheduler.max_num_scheduled_tokens = budget
    assert len(found) > len(world.requests) // 2, "too few were left to compare"
    world.check(found)
    served.assert_empty()


def text_rows_are_announced(world: World, served: Served) -> None:
    """The worker skips the whole vocabulary in steps of which the scheduler says that no row is in the text phase."""
    by_id = {request.request_id: request for request in world.requests}
    phases = {
        name: [cases.phase_before(request, expected, row) for row in range(len(expected.rows))]
        for name, request in by_id.items()
        for expected in [world.oracle.expected[name]]
    }
    said = []

    def look(output):
        names = {served.known[name].request_id: name for name in served.known}
        coming = []
        for request_id in output.num_scheduled_tokens:
            name, request = names[request_id], served.scheduler.requests[request_id]
            row = request.num_output_tokens + request.num_output_placeholders - 1
            if request.num_output_placeholders and row < len(phases[name]):
                coming.append(phases[name][row])
        assert output.speechlm_text_rows or "text" not in coming, coming
        said.append((output.speechlm_text_rows, bool(coming)))

    served.on_schedule = look
    world.check(served.run(*world.requests))
    # One audio request alone: behind its first rows there is nothing to do but audio.
    audio = next(name for name in by_id if "text" not in phases[name] and phases[name].count("audio") > 3)
    said.clear()
    world.check(served.run(by_id[audio]))
    served.on_schedule = None
    assert (False, True) in said
