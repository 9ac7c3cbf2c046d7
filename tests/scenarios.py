"""What an engine must bear, whatever its settings: each function plays one such thing on a stage and asserts.

The tests of the vllm backend call them; ``served_check.py`` does where a process of its own is needed.
"""

import random
from dataclasses import replace

import numpy as np
from fuzz import draws, oracle
from fuzz.draws import DRAWN, replaced
from fuzz.served import Served
from stage import BLOCK, CONTEXT, Stage

from espnet2_vllm.plan import RowRequest
from espnet2_vllm.protocol import EVERY, BagpiperRules, ModalityRules, OpusLMRules, Sampling


def together(stage: Stage, served: Served) -> None:
    """More requests than there are seats, in both orders."""
    for order in (stage.requests, stage.requests[::-1]):
        stage.check(served.run(*order))
    served.assert_empty()


def alone(stage: Stage, served: Served, count: int = 10) -> None:
    for request in stage.requests[:count]:
        stage.check(served.run(request))
    assert not served.preempted
    served.assert_empty()


# -- preemption --------------------------------------------------------------------------------------------------------
def preempted_at_every_row(stage: Stage, served: Served) -> None:
    """Through all phases."""
    phases = set()
    for request in stage.chain():
        served.forget()
        expected, rows = stage.oracle.expected[request.request_id], [-1]

        def preempt(request=request, rows=rows):
            now = served.known[request.request_id].num_output_tokens
            if now != rows[0]:
                served.preempt_all()
                rows[0] = now

        stage.check(served.run(request, before_step=preempt))
        at = {row for _, row in served.preempted}
        assert at >= set(range(1, len(expected.rows))), "a row was left out"
        phases |= {oracle.phase_before(request, expected, row) for row in at}
    wanted = {"bagpiper": {"modality", "text", "audio", "bridge"}, "opuslm": {"text", "audio", "drain"}}
    assert phases - {"done"} == wanted[stage.layout.family]
    served.assert_empty()


def preempted_beside_neighbours(stage: Stage, served: Served, count: int = 12) -> None:
    rng = random.Random(stage.seed)

    def preempt():
        if rng.random() < 0.08:
            served.preempt_all()

    stage.check(served.run(*stage.requests[:count], before_step=preempt))
    names = [name for name, _ in served.preempted]
    assert any(names.count(name) > 1 for name in names), "nobody was preempted twice"
    served.assert_empty()


def preempted_for_want_of_blocks(stage: Stage, served: Served) -> None:
    stage.check(served.run(*stage.requests))
    assert served.preempted
    served.assert_empty()


# -- rows before the end -------------------------------------------------------------------------------------------
def streamed(stage: Stage, served: Served, count: int = 10) -> None:
    """Half of the requests hand out rows as they come, preempted or not; the others only at the end."""
    rng = random.Random(stage.seed)
    requests, made = stage.requests[:count] + stage.chain(), {}
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
    stage.check(found)
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
def same_prompt_again(stage: Stage, served: Served) -> None:
    """The engine tells of its hits."""
    request, told = max(stage.requests, key=lambda one: len(one.prompt)), served.engine.prefix_cache
    requests, rows, cached = told.requests, told.rows, told.hits
    for _ in range(2):
        stage.check(served.run(request))
        hits = served.hits[request.request_id]
        cached += hits
        served.forget()
    assert hits == (len(request.prompt) - 1) // BLOCK * BLOCK > 0
    assert (told.requests, told.rows, told.hits) == (requests + 2, rows + 2 * len(request.prompt), cached)


def other(stage: Stage, rows: np.ndarray, row: int, stream: int) -> np.ndarray:
    """``rows`` with another auxiliary id at one place."""
    return draws.altered(stage.layout, stage.rng, rows, row, stream)


def equal_primary_ids(stage: Stage, served: Served, places: tuple[int, ...]) -> None:
    """Prompts that differ in one auxiliary id share nothing behind it."""
    layout, streams = stage.layout, stage.layout.num_streams
    audio = draws.audio_rows(layout, stage.rng, 3 * BLOCK)
    rows, rules = np.concatenate([audio, draws.header(layout, "audio")]), stage.fixed("audio", 12, 0)
    first = stage.add("first", rows, rules)
    stage.check(served.run(first))
    for row in places:
        for stream in {1, streams - 1}:
            name = f"row {row} stream {stream}"
            stage.check(served.run(stage.add(name, other(stage, rows, row, stream), rules)))
            assert served.hits[name] == row // BLOCK * BLOCK, name
    silent = rows.copy()
    silent[:, 1:] = layout.pad
    stage.check(served.run(stage.add("silent", silent, rules)))
    assert served.hits["silent"] == 0, "no auxiliary ids at all"
    stage.check(served.run(replaced(first, "first/again")))
    assert served.hits["first/again"] == 3 * BLOCK


def shared_text(stage: Stage, served: Served) -> None:
    """The text in front of different clips is shared."""
    layout = stage.layout
    text = draws.text_rows(layout, stage.rng, 2 * BLOCK + 3)
    for name in ("clip 1", "clip 2"):
        audio = draws.audio_rows(layout, stage.rng, BLOCK)
        rows = np.concatenate([text, audio, draws.header(layout, "audio")])
        stage.check(served.run(stage.add(name, rows, stage.fixed("audio", 12, 0))))
    assert served.hits == {"clip 1": 0, "clip 2": 2 * BLOCK}


def same_sound(stage: Stage, served: Served) -> None:
    """A clip that comes again is found in the cache, one that sounds otherwise is not, and clips are told apart by their place."""
    layout, rng = stage.layout, stage.rng
    rows = np.concatenate([draws.text_rows(layout, rng, BLOCK + 7 + 2 * BLOCK + 5), draws.header(layout, "audio")])
    rules, clip = stage.fixed("audio", 12, 0), stage.sound(BLOCK + 7, 2 * BLOCK)
    vectors = clip.vectors.clone()
    vectors[-1] *= 0.5
    first = stage.add("clip", rows, rules, clip)
    requests = [
        (first, 0),
        (replaced(first, "clip/again"), 3 * BLOCK),
        (stage.add("other", rows, rules, stage.sound(clip.start, clip.count)), BLOCK),
        (stage.add("end altered", rows, rules, replace(clip, vectors=vectors)), BLOCK),
        (stage.add("a row later", rows, rules, replace(clip, start=clip.start + 1)), BLOCK),
    ]
    for request, hits in requests:
        stage.check(served.run(request))
        assert served.hits[request.request_id] == hits, request.request_id
    served.assert_empty()


def fed_rows(stage: Stage, request: RowRequest) -> np.ndarray:
    """Generated rows as the model saw them."""
    return oracle.fed_rows(request, stage.oracle.expected[request.request_id])


def second_turn(stage: Stage, served: Served) -> None:
    """A dialogue's second request finds the rows that the first one generated, as long as they are the same in all streams."""
    layout, rng = stage.layout, stage.rng
    rules = stage.fixed("audio", 40)
    first = stage.add("turn 1", draws.prompt(layout, rng, 30), rules)
    stage.check(served.run(first))
    known = np.concatenate([first.prompt, fed_rows(stage, first)])
    turn = draws.prompt(layout, rng, 20)
    stage.check(served.run(stage.add("turn 2", np.concatenate([known, turn]), rules)))
    # The last row was never fed, and vLLM was shown its stop token there.
    assert served.hits["turn 2"] == (len(known) - 1) // BLOCK * BLOCK > len(first.prompt)
    row = len(first.prompt) + 12
    altered = np.concatenate([other(stage, known, row, layout.num_streams - 1), turn])
    stage.check(served.run(stage.add("turn 2 altered", altered, rules)))
    assert served.hits["turn 2 altered"] == row // BLOCK * BLOCK


def as_fed_not_as_emitted(stage: Stage, served: Served) -> None:
    """Bagpiper feeds the last row of a segment with empty auxiliary streams: that is what is in the cache."""
    layout = stage.layout
    rules = BagpiperRules(layout, ("audio", "audio"), None, ModalityRules(DRAWN, BLOCK, BLOCK))
    first = stage.add("as emitted", draws.prompt(layout, stage.rng, 5), rules)
    stage.check(served.run(first))
    emitted, fed = stage.oracle.expected["as emitted"].rows, fed_rows(stage, first)
    end = BLOCK  # row 0 announces, rows 1..BLOCK are the first segment
    assert emitted[end, 1:].any() and not fed[end, 1:].any()
    for name, rows, same in (("like emitted", emitted, end), ("like fed", fed, len(fed) - 1)):
        request = stage.add(name, np.concatenate([first.prompt, rows, draws.header(layout, "audio")]), rules)
        stage.check(served.run(request))
        assert served.hits[name] == (len(first.prompt) + same) // BLOCK * BLOCK, name


# -- sampling ----------------------------------------------------------------------------------------------------------
def seeds(stage: Stage, served: Served) -> None:
    """The same rows alone, in a crowd, on other slots; another seed gives others."""
    rows, rules = draws.prompt(stage.layout, stage.rng, 20), stage.fixed("audio", 25)
    one, two = (stage.add(name, rows, rules) for name in ("seed 1", "seed 2"))
    assert one.seed != two.seed
    drawn = [stage.oracle.expected[name].rows for name in ("seed 1", "seed 2")]
    assert (drawn[0] != drawn[1]).any(axis=1).mean() > 0.5, "two seeds give the same"
    stage.check(served.run(one))
    copies = [replaced(one, f"seed 1/{i}") for i in range(5)]
    stage.check(served.run(*stage.requests[:5], *copies, two))
    served.assert_empty()


def _cut(stage: Stage, name: str, sampling: Sampling, modality: str, guidance: float) -> RowRequest:
    made = stage.fixed(modality, 12, 6)
    if isinstance(made, OpusLMRules):
        made = replace(made, sampling=sampling)
    else:
        block = replace(getattr(made, modality), sampling=sampling, guidance=guidance)
        made = BagpiperRules(stage.layout, (modality, "text"), block, block)
    return stage.add(name, draws.prompt(stage.layout, stage.rng, 15, modality), made)


def top_p_beside_top_k(stage: Stage, served: Served, others: int = 10) -> None:
    """Rows cut by top-p, with a top-k and without, guided or not, in one step with rows of top-k alone."""
    samplings = [Sampling(1.0, EVERY, 0.8), Sampling(0.7, EVERY, 0.3), Sampling(1.3, 20, 0.9), Sampling(1.0, EVERY)]
    made = []
    for sampling in [*samplings, Sampling(1.0, EVERY, 0.0)]:
        for modality, guidance in (("audio", 1.0), ("text", 1.5)):
            made.append(_cut(stage, f"cut {len(made)}", sampling, modality, guidance))
    rng = random.Random(stage.seed)

    def preempt():
        if rng.random() < 0.03:
            served.preempt_all()

    mixed = [*made, *stage.requests[:others]]
    rng.shuffle(mixed)
    stage.check(served.run(*mixed, before_step=preempt))
    with_topk = made[2 * samplings.index(Sampling(1.3, 20, 0.9))]
    stage.check(served.run(replaced(with_topk, f"{with_topk.request_id}/alone")))
    served.assert_empty()


# -- ends --------------------------------------------------------------------------------------------------------------
def aborts(stage: Stage, served: Served) -> None:
    """Leave nothing and disturb nobody."""
    rng, aborted = random.Random(stage.seed), set()
    names = {request.request_id for request in stage.requests}

    def abort():
        if rng.random() < 0.15 and len(aborted) < 10:
            gone = rng.sample(sorted(names - aborted), 2)  # some have finished
            served.engine.abort([*gone, "unknown"])
            aborted.update(gone)

    found = served.run(*stage.requests, before_step=abort)
    assert aborted and found.keys() >= names - aborted
    stage.check(found)
    again = [replaced(request, f"{request.request_id}/again") for request in stage.requests[:6]]
    served.submit(*again)
    for _ in range(3):
        served.engine.step()
    served.engine.abort([request.request_id for request in again])
    assert served.engine.step() == []
    served.assert_empty()


def context_cuts(stage: Stage, served: Served) -> None:
    """What does not fit into the context is cut, with all that was there."""
    for room in (1, 2, 12):
        name = f"room {room}"
        request = stage.add(name, draws.prompt(stage.layout, stage.rng, CONTEXT - room), stage.fixed("audio", 40))
        expected = stage.oracle.expected[name]
        assert (expected.finish, len(expected.rows)) == ("length", room)
        stage.check(served.run(request))
    served.assert_empty()


def segments_without_rules(stage: Stage, served: Served) -> None:
    """Modalities that have no rules, or cannot be decoded at all, end a Bagpiper request."""
    layout, block = stage.layout, ModalityRules(Sampling(), 0, 3)
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
        stage.add(f"ends {i}", draws.prompt(layout, stage.rng, 9), BagpiperRules(layout, *variant))
        for i, variant in enumerate(variants)
    ]
    assert len({len(stage.oracle.expected[request.request_id].rows) for request in requests}) > 2
    stage.check(served.run(*requests))
    served.assert_empty()


# -- teacher forcing ---------------------------------------------------------------------------------------------------
def teacher_forcing(stage: Stage, served: Served, forced: list[RowRequest]) -> None:
    """Alone, twice, and beside requests that generate."""
    for request in forced[:2] * 2:
        stage.check(served.run(request))
    mixed = [*stage.requests[:6], *forced]
    random.Random(stage.seed).shuffle(mixed)
    stage.check(served.run(*mixed))
    served.assert_empty()


def teacher_forcing_preempted(stage: Stage, served: Served, forced: list[RowRequest]) -> None:
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

    found = served.run(*forced, *stage.requests[:6], before_step=preempt)
    stage.check(found)
    for name in left:
        assert found[name].logits is None or len(found[name].logits) == len(found[name].rows)
    assert not all(left.values()), "no prompt was long enough"
    served.assert_empty()


# -- what the worker is told -------------------------------------------------------------------------------------------
def text_rows_are_announced(stage: Stage, served: Served) -> None:
    """The worker skips the whole vocabulary in steps of which the scheduler says that no row is in the text phase."""
    by_id = {request.request_id: request for request in stage.requests}
    phases = {
        name: [oracle.phase_before(request, expected, row) for row in range(len(expected.rows))]
        for name, request in by_id.items()
        for expected in [stage.oracle.expected[name]]
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
    stage.check(served.run(*stage.requests))
    # One audio request alone: behind its first rows there is nothing to do but audio.
    audio = next(name for name in by_id if "text" not in phases[name] and phases[name].count("audio") > 3)
    said.clear()
    stage.check(served.run(by_id[audio]))
    served.on_schedule = None
    assert (False, True) in said
