"""Preemption and resumption at chosen rows, beside neighbours that go on: every id as if nothing had happened (V1 runner)."""

import pytest
from conftest import golden_models
from fuzz import draws
from fuzz.draws import DRAWN
from fuzz.oracle import phase_before
from stage import BLOCK, Stage

from espnet2_vllm.checkpoint import ensure_converted
from espnet2_vllm.protocol import BagpiperRules, ModalityRules

SEED = 20261130
MODELS = {"bagpiper": "qwen3-s8-cb64", "opuslm": "tiny-llama"}
ROOM = {"num_gpu_blocks_override": 60}  # nobody is preempted but by the test
SETTINGS = {
    "sync": {"max_num_batched_tokens": 64, **ROOM},
    "async, replayed in chunks": {"asynchronous": True, "max_num_batched_tokens": 13, **ROOM},
}
BOTH = pytest.mark.parametrize("setting", SETTINGS)
NEIGHBOURS = 3
APART = 4  # rows between two preemptions of one run: with rows in flight a request is back two steps later


@pytest.fixture(scope="module")
def stages():
    made = {}
    for family, name in MODELS.items():
        (directory,) = (path for path in golden_models(family) if path.name == name)
        made[family] = Stage(ensure_converted(directory), SETTINGS, seed=SEED, requests=NEIGHBOURS)
    yield made
    for stage in made.values():
        stage.close()


class Case:
    """A request that passes through every phase of its family, and what it is about to do at each of its rows."""

    def __init__(self, stage, name, guidance=1.0, modality="audio"):
        layout = stage.layout
        if layout.family == "bagpiper":
            block = ModalityRules(DRAWN, 12, 14, guidance)
            made = BagpiperRules(layout, ("text", "audio", "text", "audio"), block, block)
        else:
            made = stage.fixed(modality, 40, 24)
        self.stage = stage
        self.request = stage.add(name, draws.prompt(layout, stage.rng, BLOCK - 9, modality), made)
        self.expected = stage.oracle.expected[name]
        self.rows = range(1, len(self.expected.rows))
        self.phases = {row: phase_before(self.request, self.expected, row) for row in self.rows}

    def at(self, *phases):
        return [row for row, phase in self.phases.items() if phase in phases]

    def preempted_at(self, served, rows):
        """Plays the request beside neighbours, preempted for want of blocks when it has so many rows; takes several runs."""
        assert rows, f"seed {SEED}: no such row"
        name = self.request.request_id
        for group in apart(rows):
            served.engine._engine.reset_prefix_cache()
            served.forget()
            left = set(group)

            def preempt(left=left):
                if served.rows_of(name) in left and served.runs(name):
                    left.remove(served.rows_of(name))
                    served.preempt(name)

            found = served.run(self.request, *self.stage.requests, before_step=preempt)
            self.stage.check(found)
            assert {row for who, row in served.preempted if who == name} == set(group), served.preempted
            served.assert_empty()


def apart(rows):
    """``rows`` in groups in which they are at least ``APART`` from each other."""
    groups = []
    for row in sorted(set(rows)):
        group = next((group for group in groups if row - group[-1] >= APART), None)
        if group is None:
            groups.append([row])
        else:
            group.append(row)
    return groups


@pytest.fixture(scope="module")
def cases(stages):
    bagpiper, opuslm = stages["bagpiper"], stages["opuslm"]
    return {
        "bagpiper": Case(bagpiper, "chain"),
        "guided bagpiper": Case(bagpiper, "guided chain", guidance=1.5),
        "opuslm": Case(opuslm, "audio"),
        "opuslm text": Case(opuslm, "text", modality="text"),
    }


def served_for(stages, case, setting):
    return stages["bagpiper" if "bagpiper" in case else "opuslm"].engine(setting)


AUDIO = pytest.mark.parametrize("case", ["bagpiper", "guided bagpiper", "opuslm"])


@BOTH
@pytest.mark.parametrize("case", ["bagpiper", "guided bagpiper", "opuslm text"])
def test_in_text(stages, cases, case, setting):
    cases[case].preempted_at(served_for(stages, case, setting), cases[case].at("text")[1::5])


@BOTH
@pytest.mark.parametrize("case", ["bagpiper", "guided bagpiper"])
def test_at_a_bridge_and_at_a_modality_row(stages, cases, case, setting):
    cases[case].preempted_at(served_for(stages, case, setting), cases[case].at("bridge", "modality"))


@BOTH
@AUDIO
def test_in_the_first_rows_of_audio_where_streams_start_one_after_the_other(stages, cases, case, setting):
    rows = cases[case].at("audio")[: stages["opuslm"].layout.num_streams]
    cases[case].preempted_at(served_for(stages, case, setting), rows)


@BOTH
@AUDIO
def test_in_mid_audio(stages, cases, case, setting):
    audio = cases[case].at("audio")
    cases[case].preempted_at(served_for(stages, case, setting), audio[len(audio) // 2 :][:2])


@BOTH
@AUDIO
def test_around_the_boundary_of_a_block(stages, cases, case, setting):
    start = len(cases[case].request.prompt)
    rows = [row for row in cases[case].rows if (start + row + 1) % BLOCK in (0, 1, 2)]
    cases[case].preempted_at(served_for(stages, case, setting), rows)


@BOTH
def test_in_the_drain(stages, cases, setting):
    cases["opuslm"].preempted_at(stages["opuslm"].engine(setting), cases["opuslm"].at("drain"))


@BOTH
@AUDIO
def test_many_times(stages, cases, case, setting):
    """Each time more rows are replayed."""
    rows = list(cases[case].rows)[:: APART + 1]
    assert len(rows) > 4
    cases[case].preempted_at(served_for(stages, case, setting), rows)


@BOTH
@AUDIO
def test_with_the_cache_emptied(stages, cases, case, setting):
    """All requests at once, and what they replay has no prefix hit."""
    served, name = served_for(stages, case, setting), cases[case].request.request_id
    left = set(list(cases[case].rows)[3::9])

    def reset():
        if served.rows_of(name) in left:
            left.remove(served.rows_of(name))
            served.preempt_all()

    cases[case].stage.check(served.run(cases[case].request, *cases[case].stage.requests, before_step=reset))
    assert not left
    served.assert_empty()
