"""The scheduler's side: history, block hashes, what it tells the worker, and what it refuses."""

import types

import numpy as np
import pytest
import scenarios
from conftest import golden_models
from fuzz.draws import audio_rows, cropped, replaced
from stage import BLOCK, Stage

from espnet2_vllm.checkpoint import ensure_converted
from espnet2_vllm.engine import channel
from espnet2_vllm.engine.core import EXTRA_ARGS
from espnet2_vllm.engine.history import History
from espnet2_vllm.engine.scheduler import SpeechScheduler
from espnet2_vllm.errors import EngineError

SEED = 20261005
MODELS = {"bagpiper": "qwen3-s8-cb64", "opuslm": "tiny-llama"}
SETTINGS = {
    "roomy": {"max_num_batched_tokens": 256, "num_gpu_blocks_override": 200},
    "async": {"max_num_batched_tokens": 64, "asynchronous": True},
}
FAMILIES = pytest.mark.parametrize("family", MODELS)


@pytest.fixture(scope="module")
def stages():
    made = {}
    for family, name in MODELS.items():
        (directory,) = (path for path in golden_models(family) if path.name == name)
        made[family] = Stage(ensure_converted(directory), SETTINGS, seed=SEED, requests=14)
    yield made
    for stage in made.values():
        stage.close()


# -- history -----------------------------------------------------------------------------------------------------------
def test_history_keeps_what_was_recorded_while_it_grows():
    rng = np.random.default_rng(SEED)
    streams, rows, count = 4, 20, 50
    history = History(streams, rows, rows=2)
    ids = rng.integers(0, 1000, (count, rows, streams))
    empty = rng.random((count, rows)) < 0.3
    logprobs = rng.random((count, rows, streams)).astype(np.float32)
    names = [f"r{i}" for i in range(count)]
    for row in range(rows):
        chosen = [i for i in range(count) if i <= row * 3]  # more and more of them
        for i in chosen:
            history.open(names[i])
        codes = channel.encode(
            ids[chosen, row], np.zeros((len(chosen), streams), int), empty[chosen, row].astype(int),
            np.zeros(len(chosen), int), np.array(channel.stream_codes(streams)),
        )  # fmt: skip
        history.record([names[i] for i in chosen], [row] * len(chosen), codes, logprobs[chosen, row])
    assert len(history) == count and set(history) == set(names)
    for i, name in enumerate(names):
        first = -(-i // 3)
        assert np.array_equal(history.emitted(name, first, rows), ids[i, first:])
        assert np.array_equal(history.logprobs(name, first, rows), logprobs[i, first:])
        fed = np.where(empty[i, first:, None], 0, ids[i, first:, 1:])
        assert np.array_equal(history.fed(name, first, rows), fed)
        assert history.fed(name, rows, rows).shape == (0, streams - 1)


def test_rows_of_the_history_are_used_again():
    history = History(2, 5, rows=4)
    for turn in range(20):
        given = {history.open(f"{turn}.{i}") for i in range(4)}
        assert given == {0, 1, 2, 3}
        assert history.open(f"{turn}.0") in given, "opening twice changes nothing"
        for i in range(4):
            history.close(f"{turn}.{i}")
        history.close("unknown")
    assert len(history) == 0


# -- block hashes ------------------------------------------------------------------------------------------------------
def heard(request, rows, hidden):
    """The continuous rows among the first ``rows`` of a prompt, and where they are."""
    vectors = np.zeros((rows, hidden), dtype=np.float32)
    for part in cropped(request.continuous, 0, rows):
        vectors[part.start : part.start + part.count] = part.vectors
    return vectors.tobytes()


@FAMILIES
def test_block_hashes_are_equal_where_all_streams_are_and_only_there(stages, family):
    """Prompt and generated rows as the model saw them, from the first row on."""
    stage = stages[family]
    served, stop = stage.engine("roomy"), stage.layout.stop_token
    base = max(stage.requests, key=lambda one: len(one.prompt))
    audio = audio_rows(stage.layout, stage.rng, len(base.prompt))
    relatives = [base.prompt, audio, scenarios.other(stage, audio, BLOCK + 3, 1), scenarios.other(stage, audio, 2, 1)]
    rules = stage.fixed("audio", 40)
    requests = [*stage.requests, *(stage.add(f"relative {i}", rows, rules) for i, rows in enumerate(relatives))]
    requests.append(replaced(requests[-1], f"{requests[-1].request_id}/twin"))
    stage.check(served.run(*requests))
    content_of, hash_of, primaries, blocks = {}, {}, {}, 0
    for request in requests:
        generated = stage.oracle.expected[request.request_id.split("/")[0]].rows.copy()
        generated[:, 1:] = scenarios.fed_rows(stage, replaced(request, request.request_id.split("/")[0]))[:, 1:]
        generated[-1, 0] = stop
        rows, hashes = np.concatenate([request.prompt, generated]), served.known[request.request_id].block_hashes
        assert len(hashes) == len(rows) // BLOCK
        for index, block_hash in enumerate(hashes):
            ids = rows[: (index + 1) * BLOCK]
            content = ids.tobytes() + heard(request, len(ids), stage.oracle.hidden)
            assert content_of.setdefault(block_hash, content) == content, request.request_id
            assert hash_of.setdefault(content, block_hash) == block_hash, request.request_id
            primaries.setdefault(ids[:, 0].tobytes(), set()).add(block_hash)
            blocks += 1
    assert len(content_of) < blocks, "nothing was shared"
    assert max(map(len, primaries.values())) > 1, "no two blocks differ in their auxiliary ids alone"


# -- what the worker is told -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("setting", SETTINGS)
@FAMILIES
def test_text_rows_are_announced(stages, family, setting):
    scenarios.text_rows_are_announced(stages[family], stages[family].engine(setting))


# -- refusals ----------------------------------------------------------------------------------------------------------
def configuration(**changes):
    """What ``_check_configuration`` looks at, as far as it is supported."""
    values = {"policy": "fcfs", "stages": 1, "speculative": None, "connector": None, "groups": 1} | changes
    scheduler = SpeechScheduler.__new__(SpeechScheduler)
    scheduler.vllm_config = types.SimpleNamespace(
        parallel_config=types.SimpleNamespace(pipeline_parallel_size=values["stages"]),
        scheduler_config=types.SimpleNamespace(policy=values["policy"]),
        speculative_config=values["speculative"],
        kv_transfer_config=values["connector"],
        lora_config=None,
        use_v2_model_runner=True,
    )
    scheduler.kv_cache_config = types.SimpleNamespace(kv_cache_groups=[None] * values["groups"])
    return scheduler


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "priority"}, "scheduling policy must be fcfs"),
        ({"stages": 2}, "pipeline_parallel_size 2 is not supported"),
        ({"speculative": object()}, "speculative decoding is not supported"),
        ({"connector": object()}, "KV connectors are not supported"),
        ({"groups": 2}, "more than one KV cache group"),
    ],
)
def test_configurations_that_cannot_be_served(changes, message):
    configuration()._check_configuration()
    with pytest.raises(EngineError, match=message):
        configuration(**changes)._check_configuration()


@FAMILIES
def test_requests_that_are_not_ours_are_refused(stages, family):
    from vllm import SamplingParams

    stage = stages[family]
    served = stage.engine("roomy")
    engine, prompt = served.engine._engine, {"prompt_token_ids": [1, 2, 3]}
    rules = stage.fixed("audio", 20).to_dict()
    for args, message in (
        (None, r"needs SamplingParams.extra_args\['speechlm'\]"),
        ({EXTRA_ARGS: {"rules": rules, "seed": 1, "auxiliary": bytes(8)}}, "2 auxiliary ids for 3 prompt rows"),
    ):
        with pytest.raises(EngineError, match=message):
            engine.add_request("foreign", prompt, SamplingParams(detokenize=False, extra_args=args))
        engine.abort_request(["foreign"])
    stage.check(served.run(*stage.requests[:3]))
    served.assert_empty()
