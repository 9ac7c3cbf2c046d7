"""The vllm backend against the pytorch backend: every id of every stream, whatever the load (CPU, V1 runner)."""

import functools
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import scenarios
import served as cases
from conftest import golden_files, golden_models
from golden_cases import EXACT, GUIDANCE, Model, replay
from served import CONTEXT, World, assert_same, replaced

from espnet2_vllm.backends import Engine
from espnet2_vllm.checkpoint import ensure_converted
from espnet2_vllm.engine.tap import TAP
from espnet2_vllm.errors import DataError, EngineError

SEED = 20261003
MODELS = {"bagpiper": "qwen3-s8-cb64", "opuslm": "tiny-llama"}
SETTINGS = {
    "sync": {"max_num_batched_tokens": 64},
    "async": {"asynchronous": True, "max_num_batched_tokens": 13},
    "uncached": {"asynchronous": True, "max_num_batched_tokens": 32, "enable_prefix_caching": False},
    "whole": {"max_num_batched_tokens": 1024, "num_gpu_blocks_override": 200},
    "sync logits": {"keep_logits": True, "max_num_batched_tokens": 32},
    "async logits": {"keep_logits": True, "max_num_batched_tokens": 32, "asynchronous": True},
}
FAMILIES = pytest.mark.parametrize("family", MODELS)
ALL = pytest.mark.parametrize("setting", ["sync", "async", "uncached", "whole"])
TIGHT = pytest.mark.parametrize("setting", ["sync", "async", "uncached"])
CACHED = pytest.mark.parametrize("setting", ["whole", "async"])


@functools.cache
def directory_of(name):
    (directory,) = (path for family in MODELS for path in golden_models(family) if path.name == name)
    return directory


class Worlds(dict):
    """By family or model, made when first asked for."""

    def __missing__(self, name):
        checkpoint = ensure_converted(directory_of(MODELS.get(name, name)))
        self[name] = World(checkpoint, SETTINGS, seed=SEED, requests=24 if name in MODELS else 14)
        return self[name]


@pytest.fixture(scope="module")
def worlds():
    made = Worlds()
    yield made
    for world in made.values():
        world.close()


# -- whatever the load -------------------------------------------------------------------------------------------------
@ALL
@FAMILIES
def test_many_at_once(worlds, family, setting):
    """Prefilled in chunks, in a cache too small for them, but for the last setting."""
    served = worlds[family].engine(setting)
    scenarios.together(worlds[family], served)
    assert bool(served.preempted) == (setting != "whole")
    assert any(served.hits.values()) or setting != "whole"
    assert not any(served.hits.values()) or setting != "uncached"


@FAMILIES
def test_alone(worlds, family):
    scenarios.alone(worlds[family], worlds[family].engine("sync"))


@pytest.mark.parametrize("setting", ["sync", "async"])
@FAMILIES
def test_preempted_at_every_row(worlds, family, setting):
    scenarios.preempted_at_every_row(worlds[family], worlds[family].engine(setting))


@TIGHT
@FAMILIES
def test_preempted_beside_neighbours(worlds, family, setting):
    scenarios.preempted_beside_neighbours(worlds[family], worlds[family].engine(setting))


@pytest.mark.parametrize("setting", ["sync", "async"])
@FAMILIES
def test_rows_leave_before_the_end_where_they_are_streamed(worlds, family, setting):
    scenarios.streamed(worlds[family], worlds[family].engine(setting))


# -- prefix cache ------------------------------------------------------------------------------------------------------
@CACHED
@FAMILIES
def test_the_same_prompt_again_is_not_computed_again(worlds, family, setting):
    scenarios.same_prompt_again(worlds[family], worlds[family].engine(setting))


@FAMILIES
def test_equal_primary_ids_with_other_auxiliary_ids_share_nothing_behind_the_difference(worlds, family):
    block = cases.BLOCK
    places = (0, 1, block - 1, block, 2 * block - 1, 2 * block + 5)
    scenarios.equal_primary_ids(worlds[family], worlds[family].engine("whole"), places)


@CACHED
@FAMILIES
def test_text_in_front_of_different_audio_is_shared(worlds, family, setting):
    scenarios.shared_text(worlds[family], worlds[family].engine(setting))


@CACHED
@FAMILIES
def test_a_second_turn_finds_the_rows_that_the_first_one_generated(worlds, family, setting):
    scenarios.second_turn(worlds[family], worlds[family].engine(setting))


@CACHED
def test_rows_are_cached_as_fed_not_as_emitted(worlds, setting):
    scenarios.as_fed_not_as_emitted(worlds["bagpiper"], worlds["bagpiper"].engine(setting))


@CACHED
def test_sound_is_shared_with_the_same_sound_only(worlds, setting):
    scenarios.same_sound(worlds["bagpiper"], worlds["bagpiper"].engine(setting))


# -- sampling ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("setting", ["sync", "async"])
@FAMILIES
def test_a_seed_gives_the_same_rows_anywhere_and_another_seed_others(worlds, family, setting):
    scenarios.seeds(worlds[family], worlds[family].engine(setting))


# -- ends --------------------------------------------------------------------------------------------------------------
@TIGHT
@FAMILIES
def test_aborted_requests_leave_nothing_and_disturb_nobody(worlds, family, setting):
    scenarios.aborts(worlds[family], worlds[family].engine(setting))


@FAMILIES
def test_what_does_not_fit_is_refused_and_others_go_on(worlds, family):
    world = worlds[family]
    served, request = world.engine("sync"), world.requests[0]
    served.submit(request)
    long = replaced(request, "long", prompt=cases.prompt(world.layout, world.rng, CONTEXT))
    with pytest.raises(DataError, match=f"long: {CONTEXT} prompt rows leave no room in the context of {CONTEXT} rows"):
        served.engine.submit(long)
    assert served.engine.unfinished == 1
    world.check(served.run())
    served.assert_empty()


@pytest.mark.parametrize("setting", ["sync", "async"])
@FAMILIES
def test_the_context_cuts(worlds, family, setting):
    scenarios.context_cuts(worlds[family], worlds[family].engine(setting))


def test_a_segment_without_rules_ends_the_request(worlds):
    scenarios.segments_without_rules(worlds["bagpiper"], worlds["bagpiper"].engine("async"))


def test_an_idle_engine_does_nothing(worlds):
    engine = worlds["opuslm"].engine("sync").engine
    assert isinstance(engine, Engine)
    assert engine.step() == []
    engine.abort(["unknown"])
    assert engine.unfinished == 0


# -- teacher forcing ---------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def forced(worlds):
    return worlds["opuslm"].forced(6)


@ALL
def test_teacher_forcing(worlds, forced, setting):
    scenarios.teacher_forcing(worlds["opuslm"], worlds["opuslm"].engine(setting), forced)


@pytest.mark.parametrize("setting", ["sync", "async", "async logits"])
def test_teacher_forcing_goes_on_after_preemption_within_its_prompt(worlds, forced, setting):
    scenarios.teacher_forcing_preempted(worlds["opuslm"], worlds["opuslm"].engine(setting), forced)


def test_what_does_not_fit_with_its_reference_is_refused(worlds, forced):
    served = worlds["opuslm"].engine("sync")
    reference = np.tile(forced[0].reference, (CONTEXT, 1))[: CONTEXT - len(forced[0].prompt)]
    with pytest.raises(DataError, match="reference rows leave no room in the context"):
        served.engine.submit(replaced(forced[0], "long", reference=reference))
    served.assert_empty()


# -- raw logits --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("family", "setting"), [("bagpiper", "sync logits"), ("opuslm", "async logits")])
def test_kept_logits_are_those_of_the_pytorch_backend(worlds, family, setting, forced):
    world = worlds[family]
    served = world.engine(setting)
    requests = world.requests[:14] + (forced if family == "opuslm" else [])
    served.submit(replaced(requests[0], "gone"))
    for _ in range(4):
        served.engine.step()
    served.engine.abort(["gone"])
    for request_id, found in served.run(*requests).items():
        expected = world.oracle.expected[request_id]
        assert_same(found, expected, request_id)
        for place in (0, 1):
            mine, theirs = (np.stack([np.asarray(row[place]) for row in one.logits]) for one in (found, expected))
            assert mine.shape == theirs.shape, request_id
            finite = np.isfinite(theirs) & np.isfinite(mine)
            assert np.abs(mine[finite] - theirs[finite]).max() < 1e-3, request_id
    assert served.preempted
    assert not TAP.active
    served.assert_empty()


# -- everything at random ----------------------------------------------------------------------------------------------
@pytest.mark.slow
@TIGHT
@FAMILIES
def test_random_worlds(worlds, family, setting):
    served = worlds[family].engine(setting)
    scenarios.play(worlds[family], served, SEED)
    assert served.preempted


OTHERS = [path.name for family in MODELS for path in golden_models(family) if path.name not in MODELS.values()]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OTHERS if "olmo2" not in name] or ["none recorded here"])
def test_random_worlds_of_other_models(worlds, name):
    if name not in OTHERS:
        pytest.skip(name)
    scenarios.play(worlds[name], worlds[name].engine("async"), SEED)


def check(name, *settings, env=None):
    """The scenarios of ``served_check.py`` on a model."""
    script = pathlib.Path(cases.__file__).with_name("served_check.py")
    command = [sys.executable, script, directory_of(name), *settings]
    done = subprocess.run(command, env=os.environ | (env or {}), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and "all equal" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.slow
def test_olmo2():
    """In a process of its own: vLLM serves OLMo-2 by transformers' classes, which are not the same afterwards."""
    check("tiny-olmo2", "async", "roomy")


@pytest.mark.slow
def test_an_engine_in_a_process_of_its_own():
    """As on a GPU: requests and rows travel between processes."""
    check("tiny-llama", "apart", env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": "1"})


# -- recorded cases ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def recorded_models(worlds):
    made = {}
    yield made
    for model in made.values():
        model.engine.close()


@FAMILIES
def test_recorded_cases(recorded_models, family):
    """Through the public interface, with the model's own context and chunks of 64 rows."""
    paths = golden_files(f"{family}/{MODELS[family]}/cases/*.json")
    model = recorded_models[family] = Model(paths[0].parent.parent, "vllm", max_num_batched_tokens=64, max_num_seqs=8)
    verdicts = [replay(model, path) for path in paths]
    wrong = [str(v) for v in verdicts if v.verdict not in (EXACT, GUIDANCE)]
    assert not wrong
    assert sum(v.verdict == EXACT for v in verdicts) >= len(paths) // 2


# -- refusals ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "x"}, "engine option model is set by the backend itself"),
        ({"scheduler_cls": "x"}, "engine option scheduler_cls is set by the backend itself"),
        ({"max_num_seq": 3}, "vLLM refused the engine options .*max_num_seq"),
        ({"max_model_len": 10**7}, "vLLM refused the engine options .*max_model_len"),
        ({"scheduling_policy": "priority"}, "scheduling policy must be fcfs"),
    ],
)
def test_options_that_cannot_be_used(worlds, options, message):
    with pytest.raises(EngineError, match=message):
        cases.VllmEngine(worlds["bagpiper"].checkpoint, **options)
