"""Faults that other engines have shown with models of several streams, each provoked on the vllm backend (CPU).

Which fault is which, and the tests that hold the others: tests/CLAIMS.md.
"""

import numpy as np
import pytest
import torch
from conftest import golden_models
from fuzz import draws
from fuzz.draws import DRAWN, replaced
from stage import Stage

from espnet2_vllm.checkpoint import ensure_converted
from espnet2_vllm.engine.pairs import Pairs, merge
from espnet2_vllm.errors import AbortError
from espnet2_vllm.protocol import TEXT, BagpiperRules, ModalityRules, Sampling

pytest.importorskip("vllm")

SEED = 20261130
SEATS = 64
SETTINGS = {
    "wide": {"max_num_seqs": SEATS, "max_num_batched_tokens": 80, "num_gpu_blocks_override": 400, "asynchronous": True}
}
GREEDY = Sampling()


@pytest.fixture(scope="module")
def stage():
    (directory,) = (path for path in golden_models("bagpiper") if path.name == "qwen3-s8-cb64")
    made = Stage(ensure_converted(directory), SETTINGS, seed=SEED, requests=8)
    yield made
    made.close()


def asked(stage, name, enforce, text=GREEDY, audio=DRAWN, rows=20, scale=1.0, prompt=12):
    """A request of fixed lengths whose choices are clear."""
    blocks = ModalityRules(text, rows, rows), ModalityRules(audio, rows, rows, scale)
    return stage.add(name, draws.prompt(stage.layout, stage.rng, prompt), BagpiperRules(stage.layout, enforce, *blocks))


def test_a_batch_of_64(stage):
    """All in one step, on all seats, and each as alone."""
    served, widest = stage.engine("wide"), []
    served.on_schedule = lambda output: widest.append(len(output.num_scheduled_tokens))
    eight = [asked(stage, f"wide {i}", ("text", "audio"), text=DRAWN, rows=40 + i, prompt=5 + i) for i in range(8)]
    copies = [replaced(request, f"{request.request_id}/{i}") for i in range(SEATS // 8) for request in eight]
    stage.check(served.run(*copies))
    assert max(widest) == SEATS
    served.on_schedule = None
    served.assert_empty()


def test_phases_end_in_steps_that_also_carry_prompts(stage):
    """Requests arrive all the time, with audio in their prompts: every step of the others holds a chunk of a prompt too."""
    served = stage.engine("wide")
    mains = [asked(stage, f"main {i}", ("text", "audio", "text"), prompt=9 + i) for i in range(3)]
    long = asked(stage, "arrival", ("audio",), rows=2, prompt=150)
    arrivals, mixed = [0], []

    def look(output):
        counts = sorted(output.num_scheduled_tokens.values())
        mixed.append(counts[0] == 1 and counts[-1] > 1)

    def arrive():
        if any(name in served.known and not served.known[name].is_finished() for name in names):
            arrivals[0] += 1
            served.submit(replaced(long, f"arrival/{arrivals[0]}"))

    names = [main.request_id for main in mains]
    served.on_schedule = look
    found = served.run(*mains, before_step=arrive)
    served.on_schedule = None
    assert sum(mixed) > 50, "decoding and prompts were hardly ever in one step"
    stage.check(found)
    served.assert_empty()


def test_the_phase_decides_the_mask_whatever_the_logits_say(stage):
    """Where the best id of all is one of the other modality, an allowed one is taken."""
    served, outside = stage.engine("wide"), {True: 0, False: 0}
    requests = [asked(stage, f"mask {i}", ("text", "audio"), text=DRAWN) for i in range(4)]
    found = served.run(*requests)
    stage.check(found)
    for request in requests:
        state = request.rules.start()
        for row, (primary, _) in zip(
            found[request.request_id].rows, stage.oracle.expected[request.request_id].logits, strict=True
        ):
            constraint = request.rules.constraint(state)
            allowed = (
                np.concatenate([np.arange(*span) for span in constraint.primary]) if constraint.primary else [row[0]]
            )
            assert row[0] in allowed
            if constraint.forced is None:
                outside[constraint.phase == TEXT] += int(np.argmax(primary)) not in allowed
            state, _ = request.rules.advance(state, tuple(row.tolist()))
    assert all(outside.values()), f"the models never wanted what is forbidden: {outside}"


def test_greedy_text_beside_sampled_audio(stage):
    """Each phase has its own temperature and top-k: whatever the seed the text is the same, the audio is not."""
    served = stage.engine("wide")
    one = asked(stage, "seed 0", ("text", "audio"))
    others = []
    while len(others) < 4:
        request = stage.oracle.clear(lambda: replaced(one, f"seed {len(others) + 1}", seed=stage.rng.getrandbits(63)))
        others.append(request)
    found = served.run(one, *others)
    stage.check(found)
    rows = np.stack([found[request.request_id].rows for request in (one, *others)])
    text, audio = rows[:, :21], rows[:, 23:]
    assert (text == text[0]).all()
    assert len({sample.tobytes() for sample in audio}) == len(rows)
    logprobs = np.stack([found[request.request_id].logprobs for request in (one, *others)])
    assert not logprobs[:, :21].any() and (logprobs[:, 23:] < 0).mean() > 0.9


# -- pairs -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("companion", ["waits", "is never made"])
def test_a_row_without_its_companion_is_an_error_not_a_token(stage, monkeypatch, companion):
    """The scheduler forgets about pairs for a while: the client is told, and nobody else notices."""
    served = stage.engine("wide")
    guided = asked(stage, "guided", ("audio",), scale=2.0)
    neighbour = asked(stage, "neighbour", ("text", "audio"))
    monkeypatch.setattr(served.scheduler, "_needs_pair", lambda main: False)
    if companion == "is never made":
        monkeypatch.setattr(served.scheduler, "_spawn", lambda *_: None)
    found = served.run(guided, neighbour)
    assert isinstance(found["guided"], AbortError), found["guided"]
    assert "without its companion" in str(found["guided"])
    stage.check({"neighbour": found["neighbour"]})
    monkeypatch.undo()
    served.assert_empty()
    stage.check(served.run(replaced(guided, "guided/again")))
    served.assert_empty()


def test_a_companion_at_another_position_is_never_merged():
    """Slots 0 and 1 are a main and its companion; slot 2 is somebody else."""
    pairs = Pairs(4, torch.device("cpu"))
    pairs.add("main", 0, None)
    pairs.add("companion", 1, "main")
    pairs.add("other", 2, None)
    pairs.flush()
    slots, emit = torch.tensor([2, 1, 0]), torch.ones(3, dtype=torch.bool)
    wanted = torch.tensor([False, True, True])
    logits, scale = torch.randn(3, 5, generator=torch.Generator().manual_seed(SEED)), torch.full((3,), 2.0)

    together = pairs.partners(slots, torch.tensor([4, 9, 9]), emit, wanted)
    assert together.guided.tolist() == [False, False, True] and not together.split.any()
    merged = merge(logits, together, scale)
    assert torch.equal(merged[:2], logits[:2]) and torch.allclose(merged[2], 2 * logits[2] - logits[1])

    cases = {
        "behind": ([4, 8, 9], [True] * 3),
        "ahead": ([4, 10, 9], [True] * 3),
        "in a chunk": ([4, 9, 9], [True, False, True]),
    }
    for name, (positions, emits) in cases.items():
        apart = pairs.partners(slots, torch.tensor(positions), torch.tensor(emits), wanted)
        assert apart.split.tolist() == [False, False, True], name
        assert not apart.guided.any() and torch.equal(merge(logits, apart, scale), logits), name
    pairs.remove("companion")
    pairs.flush()
    alone = pairs.partners(slots[[0, 2]], torch.tensor([4, 9]), emit[:2], wanted[[0, 2]])
    assert alone.split.tolist() == [False, True]
