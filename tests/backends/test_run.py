"""``decode`` over a scripted engine: one honest outcome a key, whatever finishes or fails when."""

import itertools
import random

import numpy as np
import pytest

from espnet2_vllm.backends import Engine, decode, make_engine
from espnet2_vllm.backends.base import check_fits
from espnet2_vllm.decoding import load_decoding
from espnet2_vllm.errors import ConfigError, DataError, EngineError
from espnet2_vllm.layout import NUM_SPECIALS, Layout
from espnet2_vllm.plan import Given, RowRequest, RowResult, Utterance, Wanted

SEED = 20260


class ScriptedEngine:
    """Runs the protocol on made-up choices, ``speed`` rows of every request a step; finishes in no particular order.

    Args:
        choose: (request, row number, constraint) -> row of S ids, or None for a draw that depends on the request's seed only.
    """

    def __init__(self, layout, *, max_rows=4096, choose=None, refuse=(), fail=(), order=SEED):
        self.layout, self.max_rows = layout, max_rows
        self.choose, self.refuse, self.fail = choose, refuse, fail
        self.random = random.Random(order)
        self.waiting, self.aborted, self.submitted, self.closed = {}, [], [], False

    @property
    def unfinished(self):
        return len(self.waiting)

    def submit(self, request):
        check_fits(request, self.max_rows)
        self.submitted.append(request.request_id)
        if request.request_id in self.refuse:
            raise EngineError(f"{request.request_id}: refused by the script")
        self.waiting[request.request_id] = request

    def step(self):
        if not self.waiting:
            return []
        chosen = self.random.sample(sorted(self.waiting), self.random.randint(1, len(self.waiting)))
        return [(name, self._run(self.waiting.pop(name))) for name in chosen]

    def take_rows(self):
        return []

    def abort(self, ids):
        for name in ids:
            if self.waiting.pop(name, None) is not None:
                self.aborted.append(name)

    def close(self):
        self.closed = True

    def _run(self, request):
        if request.request_id in self.fail:
            return EngineError(f"{request.request_id}: failed by the script")
        rules, state, steps = request.rules, request.rules.start(), []
        draw = random.Random(request.seed)
        while not (steps and steps[-1].done) and len(request.prompt) + len(steps) < self.max_rows:
            constraint = rules.constraint(state)
            row = self.choose(request, len(steps), constraint) if self.choose else None
            state, step = rules.advance(state, row or self._draw(draw, constraint))
            steps.append(step)
        rows = np.array([step.emitted for step in steps], dtype=np.int32)
        forced = np.array([step.forced for step in steps], dtype=bool)
        finish = "stop" if steps[-1].done else "length"
        return RowResult(rows, np.where(forced, 0, -1).astype(np.float32), forced, finish)

    def _draw(self, draw, constraint):
        if constraint.forced is not None:
            return (constraint.forced, *[0] * (self.layout.num_streams - 1))
        span = draw.choice(constraint.primary)
        row = [draw.randrange(span.start, span.stop)]
        for ids in self.layout.auxiliary_candidates():
            row.append(draw.choice(ids) if constraint.audio else 0)
        return tuple(row)


def bagpiper(streams=3):
    return Layout.bagpiper(text_size=20, stream_sizes=[5] * streams)


def opuslm():
    names = [f"<unused_{i}>" for i in range(NUM_SPECIALS)]
    for place, name in enumerate(("<pad>", "<unk>")):
        names[place] = name
    names[5], names[8], names[9], names[10] = "<sos/eos>", "<system_prompt>", "<user_input>", "<assistant_output>"
    names[34], names[35], names[37] = "<codec_ssl_start/end>", "<text_bpe_start/end>", "<spk_start/end>"
    return Layout.opuslm(names, {"ssl": [256, 266], "codec": [266, 282], "text_bpe": [282, 302]}, 3)


def rows(layout, *primary):
    result = np.zeros((len(primary), layout.num_streams), dtype=np.int32)
    result[:, 0] = primary
    return result


def question(layout, key, text=(7, 8, 9)):
    """A Bagpiper utterance of a few text rows."""
    prompt = rows(layout, *(layout.text.start + t for t in text))
    return Utterance(key, (Given(prompt), Wanted(rows(layout, layout.specials["assistant"]))))


def task(layout, key, modality="codec_ssl", role="", text=(1, 2, 3)):
    """An OpusLM utterance: text rows, then one segment to generate."""
    special = layout.specials
    given = rows(layout, special["eos"], *(layout.text.start + t for t in text), *[0] * layout.num_streams)
    header = [special["assistant"]] * bool(role) + [special[f"modality/{modality}"]]
    return Utterance(key, (Given(given, "text_bpe", role), Wanted(rows(layout, *header), modality, role)))


def bagpiper_config(enforce=(), **blocks):
    defaults = {"temperature": 1.0, "topk": 20, "cfg": 1, "max_step": 12}
    config = {name: {**defaults, **blocks.get(name, {})} for name in ("text", "audio")}
    return load_decoding({"enforce_modality": list(enforce), **config}, "bagpiper")


def opuslm_config(**block):
    defaults = {"search_algo": "topk_sampling", "sampling_temperature": 1.0, "topk": 5, "length_method": "absolute"}
    block = {**defaults, "maxlen": 12, "minlen": 1, **block}
    return load_decoding({"codec_ssl": block, "text_bpe": block}, "opuslm")


def run(engine, utterances, config, **options):
    """Results by key."""
    results = list(decode(engine, utterances, config, seed=SEED, **options))
    assert engine.unfinished == 0
    keys = [result.key for result in results]
    assert len(keys) == len(set(keys)), keys
    return {result.key: result for result in results}


def emitted(result):
    return [[segment.rows.tolist() for segment in h.segments] for h in result.hypotheses]


def test_the_scripted_engine_is_an_engine():
    assert isinstance(ScriptedEngine(bagpiper()), Engine)


@pytest.mark.parametrize("in_flight", [1, 3, 100])
@pytest.mark.parametrize("family", ["bagpiper", "opuslm"])
def test_results_depend_on_neither_order_nor_number_in_flight(family, in_flight):
    layout = bagpiper() if family == "bagpiper" else opuslm()
    make, config = (question, bagpiper_config()) if family == "bagpiper" else (task, opuslm_config())
    reference = run(ScriptedEngine(layout), [make(layout, f"u{i}") for i in range(12)], config, in_flight=1)
    shuffled = [make(layout, f"u{i}") for i in range(12)]
    random.Random(SEED).shuffle(shuffled)
    found = run(ScriptedEngine(layout, order=SEED + 1), shuffled, config, in_flight=in_flight)
    assert set(found) == set(reference)
    assert all(emitted(found[key]) == emitted(reference[key]) for key in reference)
    assert len({str(emitted(result)) for result in found.values()}) > 1, "every utterance has its own seed"


def test_utterances_are_read_only_as_there_is_room():
    layout, read = opuslm(), []

    def utterances():
        for i in range(20):
            read.append(i)
            yield task(layout, f"u{i}")

    results = decode(ScriptedEngine(layout), utterances(), opuslm_config(), seed=SEED, in_flight=4)
    next(results)
    assert len(read) == 4
    assert len(list(results)) == 19


def test_what_cannot_be_read_is_told_at_once():
    read = []

    def utterances():
        for i in range(20):
            read.append(i)
            yield f"u{i}", DataError("unreadable")

    results = decode(ScriptedEngine(opuslm()), utterances(), opuslm_config(), seed=SEED, in_flight=4)
    assert next(results).key == "u0"
    assert read == [0]


def test_nbest_gives_independent_hypotheses_in_order():
    layout = opuslm()
    (result,) = run(ScriptedEngine(layout), [task(layout, "u")], opuslm_config(), nbest=3).values()
    assert [h.requests[0][0].request_id for h in result.hypotheses] == ["u/0/1", "u/1/1", "u/2/1"]
    assert len({h.requests[0][0].seed for h in result.hypotheses}) == 3
    alone = run(ScriptedEngine(layout), [task(layout, "u")], opuslm_config())["u"]
    assert emitted(alone)[0] == emitted(result)[0]


def test_num_hypo_repeats_the_last_segment_of_a_bagpiper_answer():
    layout = bagpiper()
    config = bagpiper_config(["text", "audio"], audio={"num_hypo": 3, "min_step": 5})
    result = run(ScriptedEngine(layout), [question(layout, "u")], config)["u"]
    texts = {str(h.segments[0].rows.tolist()) for h in result.hypotheses}
    audios = {str(h.segments[1].rows.tolist()) for h in result.hypotheses}
    assert (len(result.hypotheses), len(texts), len(audios)) == (3, 1, 3)


def test_what_cannot_be_read_or_decoded_is_refused_and_the_rest_goes_on():
    layout = opuslm()
    one_row = Utterance("short", (Wanted(rows(layout, layout.specials["modality/codec_ssl"]), "codec_ssl"),))
    unread = ("unread", DataError("wav.ark is cut short"))
    items = [task(layout, "a"), unread, one_row, task(layout, "rejected"), task(layout, "failed"), task(layout, "b")]
    engine = ScriptedEngine(layout, refuse={"rejected/0/1"}, fail={"failed/0/1"})
    found = run(engine, items, opuslm_config(), in_flight=2)
    assert {key: result.outcome for key, result in found.items()} == {
        "a": "ok", "unread": "refused", "short": "refused", "rejected": "refused", "failed": "refused", "b": "ok"
    }  # fmt: skip
    assert found["unread"].reason == "wav.ark is cut short"
    assert "short: nothing stands before segment 0" in found["short"].reason
    assert "refused by the script" in found["rejected"].reason
    assert "failed by the script" in found["failed"].reason


def test_a_prompt_beyond_the_context_is_refused_with_rows_and_limit():
    layout = opuslm()
    found = run(ScriptedEngine(layout, max_rows=20), [task(layout, "long", text=range(15))], opuslm_config())
    assert found["long"].outcome == "refused"
    assert "20 prompt rows leave no room in the context of 20 rows" in found["long"].reason


@pytest.mark.parametrize("failing", ["u/0/1", "u/1/1", "u/2/1"])
def test_one_refused_hypothesis_refuses_its_utterance_once_and_drops_the_others(failing):
    layout = opuslm()
    for order, how in itertools.product(range(6), ("refuse", "fail")):
        engine = ScriptedEngine(layout, order=order, **{how: {failing}})
        found = run(engine, [task(layout, "u"), task(layout, "v")], opuslm_config(), nbest=3)
        assert (found["u"].outcome, found["u"].hypotheses, found["v"].outcome) == ("refused", (), "ok")


def test_a_dropped_request_is_not_success():
    class Dropping(ScriptedEngine):
        def _run(self, request):
            result = super()._run(request)
            return RowResult(result.rows, result.logprobs, result.forced, "abort")

    layout = opuslm()
    found = run(Dropping(layout), [task(layout, "u")], opuslm_config())
    assert (found["u"].outcome, found["u"].reason) == ("abort", "u: the engine dropped the request")


def test_a_key_that_comes_twice_is_an_error():
    layout = opuslm()
    engine = ScriptedEngine(layout)
    with pytest.raises(DataError, match="utterance u comes twice"):
        run(engine, [task(layout, "u"), task(layout, "v"), task(layout, "u")], opuslm_config())
    assert engine.unfinished == 0


# -- outcomes ----------------------------------------------------------------------------------------------------------
def never_ending(request, number, constraint):
    """Content only."""
    layout = request.rules.layout
    if constraint.forced is not None:
        return None
    span = constraint.primary[-1]
    row = [ids[1] if constraint.audio else 0 for ids in layout.auxiliary_candidates()]
    return (span.start + 1, *row)


def eos_at(last):
    """Content, and the end at row ``last`` of the segment."""

    def choose(request, number, constraint):
        if constraint.forced is None and number - 1 == last:
            return (request.rules.layout.specials["eos"], *[0] * (request.rules.layout.num_streams - 1))
        return never_ending(request, number, constraint)

    return choose


@pytest.mark.parametrize(
    ("choose", "max_step", "outcome"),
    [
        (eos_at(0), 9, "no_audio"),
        (eos_at(2), 9, "no_audio"),
        (never_ending, 2, "no_audio"),
        (never_ending, 3, "length"),
        (eos_at(3), 9, "ok"),
    ],
)
def test_bagpiper_audio_of_fewer_rows_than_streams_is_no_audio(choose, max_step, outcome):
    layout = bagpiper(streams=3)
    config = bagpiper_config(["audio"], audio={"min_step": 0, "max_step": max_step})
    found = run(ScriptedEngine(layout, choose=choose), [question(layout, "u")], config)["u"]
    assert found.outcome == outcome, found.reason
    assert len(found.hypotheses) == 1
    if outcome == "no_audio":
        assert "segment 0 (audio)" in found.reason


def test_opuslm_audio_without_a_frame_is_no_audio():
    layout = opuslm()
    config = opuslm_config(maxlen=layout.num_streams)  # the end is forced at row 1, which drops row 0
    found = run(ScriptedEngine(layout), [task(layout, "u")], config)["u"]
    assert (found.outcome, found.hypotheses[0].segments[-1].end) == ("no_audio", "forced")
    text = run(ScriptedEngine(layout), [task(layout, "u", "text_bpe")], config)["u"]
    assert text.outcome == "length", "an empty text is a text"


def test_every_way_to_end_has_an_outcome_of_its_own():
    """End, most rows, context, no frame, given up by the engine: of both families."""

    class Dropping(ScriptedEngine):
        def _run(self, request):
            result = super()._run(request)
            return RowResult(result.rows, result.logprobs, result.forced, "abort")

    def eos_of_opuslm(request, number, constraint):
        return (
            (request.rules.layout.specials["eos"], 1, 1) if number == 5 else never_ending(request, number, constraint)
        )

    small = {"max_rows": 16}
    layout = bagpiper()
    one = lambda engine, **audio: run(  # noqa: E731
        engine, [question(layout, "u")], bagpiper_config(["audio"], audio={"max_step": 40, **audio})
    )["u"]
    ends = [
        (one(ScriptedEngine(layout, choose=eos_at(6))), "ok", "eos", 6),
        (one(ScriptedEngine(layout, choose=never_ending)), "length", "max_rows", 40),
        (one(ScriptedEngine(layout, choose=never_ending, **small)), "length", "context", 11),
        (one(ScriptedEngine(layout, choose=eos_at(1))), "no_audio", "eos", 1),
        (one(Dropping(layout)), "abort", None, 0),
    ]
    layout = opuslm()
    one = lambda engine, maxlen=40: run(engine, [task(layout, "u")], opuslm_config(maxlen=maxlen))["u"]  # noqa: E731
    ends += [
        (one(ScriptedEngine(layout, choose=eos_of_opuslm)), "ok", "eos", 5),
        (one(ScriptedEngine(layout, choose=never_ending)), "length", "forced", 37),
        (one(ScriptedEngine(layout, choose=never_ending, max_rows=30)), "length", "context", None),
        (one(ScriptedEngine(layout), layout.num_streams), "no_audio", "forced", 0),
        (one(Dropping(layout)), "abort", None, 0),
    ]
    for number, (found, outcome, end, rows) in enumerate(ends):
        assert found.outcome == outcome, (number, found)
        assert bool(found.reason) == (outcome != "ok")
        if end is None:
            assert found.hypotheses == ()
            continue
        segment = found.hypotheses[0].segments[-1]
        assert segment.end == end and (rows is None or len(segment.rows) == rows), (number, end, len(segment.rows))


def test_what_the_context_cuts_is_length():
    layout = bagpiper()
    config = bagpiper_config(["text"], text={"max_step": 500})
    engine = ScriptedEngine(layout, max_rows=30, choose=never_ending)
    found = run(engine, [question(layout, "u")], config)["u"]
    assert (found.outcome, found.hypotheses[0].segments[0].end) == ("length", "context")
    assert "cut after 25 rows" in found.reason


def test_audio_that_the_context_leaves_no_room_for_is_no_audio():
    layout = bagpiper()
    config = bagpiper_config(["text", "audio"], text={"max_step": 500})
    engine = ScriptedEngine(layout, max_rows=30, choose=never_ending)
    found = run(engine, [question(layout, "u")], config)["u"]
    assert (found.outcome, found.reason) == (
        "no_audio", "enforce_modality asks for audio, but the answer ended after text"
    )  # fmt: skip


def test_a_modality_that_cannot_be_decoded_is_refused():
    layout = bagpiper()

    def choose(request, number, constraint):
        return (layout.specials["image"], 0, 0)

    found = run(ScriptedEngine(layout, choose=choose), [question(layout, "u")], bagpiper_config())["u"]
    assert found.outcome == "refused"
    assert "segment 0 (image) was announced by the model" in found.reason


# -- stopping ----------------------------------------------------------------------------------------------------------
def test_an_interrupt_passes_through_and_leaves_nothing_in_the_engine():
    class Interrupted(ScriptedEngine):
        def step(self):
            raise KeyboardInterrupt

    layout = opuslm()
    engine = Interrupted(layout)
    with pytest.raises(KeyboardInterrupt):
        list(decode(engine, [task(layout, f"u{i}") for i in range(5)], opuslm_config(), seed=SEED, in_flight=3))
    assert (engine.unfinished, len(engine.aborted)) == (0, 3)


def test_a_caller_who_stops_listening_leaves_nothing_in_the_engine():
    layout = opuslm()
    engine = ScriptedEngine(layout)
    results = decode(engine, [task(layout, f"u{i}") for i in range(30)], opuslm_config(), seed=SEED, in_flight=8)
    next(results)
    results.close()
    assert engine.unfinished == 0


def test_an_engine_that_dies_raises():
    class Dead(ScriptedEngine):
        def step(self):
            raise EngineError("the engine is gone")

    layout = opuslm()
    with pytest.raises(EngineError, match="the engine is gone"):
        list(decode(Dead(layout), [task(layout, "u")], opuslm_config(), seed=SEED))


def test_progress_counts_results_and_rows():
    layout, calls = opuslm(), []
    items = [("x", DataError("unread")), *(task(layout, f"u{i}") for i in range(6))]
    engine = ScriptedEngine(layout)
    found = run(engine, items, opuslm_config(), in_flight=2, on_progress=lambda *counts: calls.append(counts))
    total = sum(len(h.requests[0][1].rows) for result in found.values() for h in result.hypotheses)
    assert calls[-1] == (7, total)
    assert calls == sorted(set(calls))


# -- usage -------------------------------------------------------------------------------------------------------------
def test_usage_errors():
    layout = opuslm()
    with pytest.raises(ConfigError, match="u: nbest 2, but a dialogue"):
        run(ScriptedEngine(layout), [task(layout, "u", role="assistant")], opuslm_config(), nbest=2)
    with pytest.raises(ConfigError, match="bagpiper checkpoint takes num_hypo"):
        run(ScriptedEngine(bagpiper()), [], bagpiper_config(), nbest=2)
    with pytest.raises(ConfigError, match="in_flight 0 must be at least 1"):
        run(ScriptedEngine(layout), [], opuslm_config(), in_flight=0)
    with pytest.raises(ConfigError, match="backend 'pytorh' is unknown.*did you mean 'pytorch'"):
        make_engine("pytorh", None, "float32")
    with pytest.raises(ConfigError, match="dtype 'float31' is unknown"):
        make_engine("pytorch", None, "float31")
    with pytest.raises(ConfigError, match="option of the pytorch backend 'devise'.*did you mean 'device'"):
        make_engine("pytorch", None, "float32", devise="cpu")


def test_an_empty_prompt_is_a_bug_not_a_data_error():
    layout = bagpiper()
    with pytest.raises(AssertionError, match="the prompt is empty"):
        check_fits(RowRequest("r", rows(layout), None), 100)


def test_without_a_seed_one_is_drawn_and_logged(caplog):
    caplog.set_level("INFO")
    layout, config = bagpiper(), bagpiper_config(["audio"])

    def drawn(seed):
        (result,) = decode(ScriptedEngine(layout), [question(layout, "a")], config, seed=seed)
        return result.hypotheses[0].requests[0][1].rows.tolist()

    runs = [drawn(None) for _ in range(3)]
    seeds = [int(message.rsplit(" ", 1)[1]) for message in caplog.messages if "drew seed" in message]
    assert len(set(seeds)) == 3 and all(a != b for a, b in zip(runs, runs[1:], strict=False))
    assert [drawn(seed) for seed in seeds] == runs
