"""The vllm backend against the pytorch backend: every id of every stream, whatever the load (CPU, V1 runner)."""

import functools
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import scenarios
from conftest import golden_files, golden_models
from fuzz.draws import prompt, replaced
from fuzz.oracle import assert_same
from golden_cases import EXACT, GUIDANCE, Model, replay
from stage import BLOCK, CONTEXT, Stage

from espnet2_vllm.backends import Engine
from espnet2_vllm.backends.vllm import VllmEngine
from espnet2_vllm.checkpoint import ensure_converted
from espnet2_vllm.engine.tap import TAP
from espnet2_vllm.errors import ConfigError, DataError, EngineError

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


class Stages(dict):
    """By family or model, made when first asked for."""

    def __missing__(self, name):
        checkpoint = ensure_converted(directory_of(MODELS.get(name, name)))
        self[name] = Stage(checkpoint, SETTINGS, seed=SEED, requests=24 if name in MODELS else 14)
        return self[name]


@pytest.fixture(scope="module")
def stages():
    made = Stages()
    yield made
    for stage in made.values():
        stage.close()


# -- whatever the load -------------------------------------------------------------------------------------------------
@ALL
@FAMILIES
def test_many_at_once(stages, family, setting):
    """Prefilled in chunks, in a cache too small for them, but for the last setting."""
    served = stages[family].engine(setting)
    scenarios.together(stages[family], served)
    assert bool(served.preempted) == (setting != "whole")
    assert any(served.hits.values()) or setting != "whole"
    assert not any(served.hits.values()) or setting != "uncached"


@FAMILIES
def test_alone(stages, family):
    scenarios.alone(stages[family], stages[family].engine("sync"))


@pytest.mark.parametrize("setting", ["sync", "async"])
@FAMILIES
def test_preempted_at_every_row(stages, family, setting):
    scenarios.preempted_at_every_row(stages[family], stages[family].engine(setting))


@TIGHT
@FAMILIES
def test_preempted_beside_neighbours(stages, family, setting):
    scenarios.preempted_beside_neighbours(stages[family], stages[family].engine(setting))


@pytest.mark.parametrize("setting", ["sync", "async"])
@FAMILIES
def test_rows_leave_before_the_end_where_they_are_streamed(stages, family, setting):
    scenarios.streamed(stages[family], stages[family].engine(setting))


# -- prefix cache ------------------------------------------------------------------------------------------------------
@CACHED
@FAMILIES
def test_the_same_prompt_again_is_not_computed_again(stages, family, setting):
    scenarios.same_prompt_again(stages[family], stages[family].engine(setting))


@FAMILIES
def test_equal_primary_ids_with_other_auxiliary_ids_share_nothing_behind_the_difference(stages, family):
    block = BLOCK
    places = (0, 1, block - 1, block, 2 * block - 1, 2 * block + 5)
    scenarios.equal_primary_ids(stages[family], stages[family].engine("whole"), places)


@CACHED
@FAMILIES
def test_text_in_front_of_different_audio_is_shared(stages, family, setting):
    scenarios.shared_text(stages[family], stages[family].engine(setting))


@CACHED
@FAMILIES
def test_a_second_turn_finds_the_rows_that_the_first_one_generated(stages, family, setting):
    scenarios.second_turn(stages[family], stages[family].engine(setting))


@CACHED
def test_rows_are_cached_as_fed_not_as_emitted(stages, setting):
    scenarios.as_fed_not_as_emitted(stages["bagpiper"], stages["bagpiper"].engine(setting))


@CACHED
def test_sound_is_shared_with_the_same_sound_only(stages, setting):
    scenarios.same_sound(stages["bagpiper"], stages["bagpiper"].engine(setting))


# -- sampling ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("setting", ["sync", "async"])
@FAMILIES
def test_a_seed_gives_the_same_rows_anywhere_and_another_seed_others(stages, family, setting):
    scenarios.seeds(stages[family], stages[family].engine(setting))


@pytest.mark.parametrize("setting", ["sync", "async"])
@FAMILIES
def test_top_p_beside_top_k(stages, family, setting):
    scenarios.top_p_beside_top_k(stages[family], stages[family].engine(setting))


# -- ends --------------------------------------------------------------------------------------------------------------
@TIGHT
@FAMILIES
def test_aborted_requests_leave_nothing_and_disturb_nobody(stages, family, setting):
    scenarios.aborts(stages[family], stages[family].engine(setting))


@FAMILIES
def test_what_does_not_fit_is_refused_and_others_go_on(stages, family):
    stage = stages[family]
    served, request = stage.engine("sync"), stage.requests[0]
    served.submit(request)
    long = replaced(request, "long", prompt=prompt(stage.layout, stage.rng, CONTEXT))
    with pytest.raises(DataError, match=f"long: {CONTEXT} prompt rows leave no room in the context of {CONTEXT} rows"):
        served.engine.submit(long)
    assert served.engine.unfinished == 1
    stage.check(served.run())
    served.assert_empty()


@pytest.mark.parametrize("setting", ["sync", "async"])
@FAMILIES
def test_the_context_cuts(stages, family, setting):
    scenarios.context_cuts(stages[family], stages[family].engine(setting))


def test_a_segment_without_rules_ends_the_request(stages):
    scenarios.segments_without_rules(stages["bagpiper"], stages["bagpiper"].engine("async"))


def test_an_idle_engine_does_nothing(stages):
    engine = stages["opuslm"].engine("sync").engine
    assert isinstance(engine, Engine)
    assert engine.step() == []
    engine.abort(["unknown"])
    assert engine.unfinished == 0


# -- teacher forcing ---------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def forced(stages):
    return stages["opuslm"].forced(6)


@ALL
def test_teacher_forcing(stages, forced, setting):
    scenarios.teacher_forcing(stages["opuslm"], stages["opuslm"].engine(setting), forced)


@pytest.mark.parametrize("setting", ["sync", "async", "async logits"])
def test_teacher_forcing_goes_on_after_preemption_within_its_prompt(stages, forced, setting):
    scenarios.teacher_forcing_preempted(stages["opuslm"], stages["opuslm"].engine(setting), forced)


def test_what_does_not_fit_with_its_reference_is_refused(stages, forced):
    served = stages["opuslm"].engine("sync")
    reference = np.tile(forced[0].reference, (CONTEXT, 1))[: CONTEXT - len(forced[0].prompt)]
    with pytest.raises(DataError, match="reference rows leave no room in the context"):
        served.engine.submit(replaced(forced[0], "long", reference=reference))
    served.assert_empty()


# -- raw logits --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("family", "setting"), [("bagpiper", "sync logits"), ("opuslm", "async logits")])
def test_kept_logits_are_those_of_the_pytorch_backend(stages, family, setting, forced):
    stage = stages[family]
    served = stage.engine(setting)
    requests = stage.requests + (forced if family == "opuslm" else [])
    served.submit(replaced(requests[0], "gone"))
    for _ in range(4):
        served.engine.step()
    served.engine.abort(["gone"])
    for request_id, found in served.run(*requests).items():
        expected = stage.oracle.expected[request_id]
        assert_same(found, expected, request_id)
        for place in (0, 1):
            mine, theirs = (np.stack([np.asarray(row[place]) for row in one.logits]) for one in (found, expected))
            assert mine.shape == theirs.shape, request_id
            finite = np.isfinite(theirs) & np.isfinite(mine)
            assert np.abs(mine[finite] - theirs[finite]).max() < 1e-3, request_id
    assert served.preempted
    assert not TAP.active
    served.assert_empty()


# -- in a process of their own -----------------------------------------------------------------------------------------
def check(name, *settings, env=None):
    """The scenarios of ``served_check.py`` on a model."""
    script = pathlib.Path(scenarios.__file__).with_name("served_check.py")
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-s8-cb64", "tiny-olmo2"])
def test_two_ranks(name):
    """Tensor parallelism: half of the heads and of the vocabulary each, of which neither is whole blocks; equal tables."""
    check(name, "ranks", env={"OMP_NUM_THREADS": "1"})


# -- recorded cases ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def recorded_models(stages):
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
def test_options_that_cannot_be_used(stages, options, message):
    with pytest.raises(EngineError if "fcfs" in message else ConfigError, match=message):
        VllmEngine(stages["bagpiper"].checkpoint, **options)
