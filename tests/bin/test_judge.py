"""ESPnet itself is the judge: recorded requests and random ones, decoded by it and by us, give the same ids, texts and sounds.

All of ESPnet's runs are in one process of its own, started once for this file, all of vLLM's in another. ``JUDGE_SEED`` draws the
requests of another day again, ``JUDGE_CASES`` so many.
"""

import datetime
import json
import os
import pathlib
import random
import subprocess
import sys

import pytest
from commands import environment
from conftest import REPO
from judged import EQUAL, LOST, TIED, as_of_today, digits_sets, judge, random_set, recorded_sets
from shared_engine import run_bagpiper_apart

SEED = int(os.environ.get("JUDGE_SEED") or datetime.datetime.now(datetime.UTC).strftime("%Y%m%d"))
CASES = int(os.environ.get("JUDGE_CASES") or 30)
PER_SET = 3
GOLDEN = REPO / "tests" / "golden" / "bagpiper"
pytestmark = pytest.mark.slow
DIGITS = REPO / "egs" / "digits" / "speechlm1" / "models" / "bagpiper"
STREAMS = {"qwen3-s8-cb64": 8, "qwen3-s4-cb32-contaudio": 4}
TASKS = ("text_to_audio", "audio_to_text", "text_only", "dialogue", "dialogue")


@pytest.fixture(scope="module")
def court(tmp_path_factory):
    """The sets, and the folder with what each of the two makes of them."""
    print(f"JUDGE_SEED={SEED} JUDGE_CASES={CASES}")
    folder, rng = tmp_path_factory.mktemp("judge"), random.Random(SEED)
    models = {name: as_of_today(GOLDEN / name, folder / name) for name in STREAMS}
    sets = [
        one for name, model in models.items() for one in recorded_sets(GOLDEN / name, model, folder / f"sets-{name}")
    ]
    sets += digits_sets(DIGITS, rng, folder / "digits")
    sets += drawn_sets(rng, models, folder)
    judged_by_espnet(sets, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ESPNET2_VLLM_CACHE", str(folder / "converted"))
        yield sets, folder


def drawn_sets(rng, models, folder):
    sets = []
    for number in range(-(-CASES // PER_SET)):
        name = rng.choice(list(models))
        count = min(PER_SET, CASES - number * PER_SET)
        task = TASKS[number % len(TASKS)]
        sets.append(random_set(rng, f"random{number}", task, models[name], STREAMS[name], folder / "sets", count))
    return sets


def judged_by_espnet(sets, folder):
    (folder / "choices").mkdir()
    runs = [
        {
            "words": one.words(folder / "espnet" / one.model.name),
            "cwd": str(one.model),
            "choices": str(choices_of(one, folder)),
        }
        for one in sets
    ]
    (folder / "runs.json").write_text(json.dumps(runs), encoding="utf-8")
    command = [sys.executable, str(pathlib.Path(__file__).with_name("espnet_judge.py")), str(folder / "runs.json")]
    done = subprocess.run(command, capture_output=True, text=True, env={**environment(), "HOME": str(folder)})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def choices_of(one, folder):
    return folder / "choices" / f"{one.model.name}-{one.name}.npz"


def agree(sets, folder, backend):
    verdicts = {}
    for one in sets:
        found = judge(
            one, folder / "espnet" / one.model.name, folder / backend / one.model.name, choices_of(one, folder)
        )
        verdicts |= {f"{one.model.name} {one.name} {key}": verdict for key, verdict in found.items()}
    print("\n".join(f"{key}: {verdict}" for key, verdict in verdicts.items()))
    tally = {verdict: list(verdicts.values()).count(verdict) for verdict in (EQUAL, TIED, LOST)}
    print(f"JUDGE_SEED={SEED}: {backend}: {tally}")
    assert tally[TIED] + tally[LOST] <= len(verdicts) // 10, tally


def test_our_plain_loop_says_what_espnet_says(court):
    sets, folder = court
    decoded(sets, folder, "pytorch")
    agree(sets, folder, "pytorch")


def test_the_engine_says_what_espnet_says(court):
    pytest.importorskip("vllm")
    sets, folder = court
    decoded(sets, folder, "vllm", "--max-model-len", "512", "--max-num-seqs", "8")
    agree(sets, folder, "vllm")


def decoded(sets, folder, backend, *more):
    """Our command lines, in a process in which only they have run."""
    runs = [
        (str(one.model), [*one.words(folder / backend / one.model.name), "--backend", backend, "--write-scores", *more])
        for one in sets
    ]
    run_bagpiper_apart(runs)
