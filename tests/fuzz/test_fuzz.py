"""A minute of worlds, and the fuzzer itself: that it finds faults, makes them small, and keeps its books."""

import dataclasses
import json
import pathlib
import random
import re
import subprocess
import sys

import pytest
from conftest import REPO

from espnet2_vllm.engine.history import History
from fuzz import ledger
from fuzz.groups import NAMES, WORLDS_A_DECK, model_groups
from fuzz.playing import without
from fuzz.running import Bench, Place, run
from fuzz.shrinking import shrink
from fuzz.world import SEATS, SETTINGS, Entry, World, draw

SEED = 7_000_000  # behind all that the ledger will ever count


def fuzz(*options):
    """Output of ``python -m tests.fuzz`` with options; it must have found nothing."""
    command = [sys.executable, "-m", "tests.fuzz", "--no-ledger", *map(str, options)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and "0 failures" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("options", [["--worlds", 0], ["--minutes", 0], ["--seeds", 5, 3], ["--soak", 0]], ids=str)
def test_a_run_of_no_worlds_is_no_success(options):
    with pytest.raises(AssertionError, match="must be above 0|FIRST is above LAST"):
        fuzz(*options)


# -- worlds ------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_worlds_on_v1():
    out = fuzz("--small", "--seeds", SEED, SEED + 59, "--shrink", 30)
    assert out.count(": equal, ") == 60
    played = {name for name in NAMES if f"({name}, " in out}
    settings = {name for name in SETTINGS if f", {name}): " in out}
    assert len(played) > 3 and len(settings) > 3, "too few models or settings"
    for what in ("companions", "preempted", "cached", "aborted", "streamed"):
        assert sum(map(int, re.findall(rf"\b{what} (\d+)", out))) > 0, f"{what}: no world has any"


@pytest.mark.slow
def test_worlds_on_v1_in_a_model_of_its_own_process():
    fuzz("--small", "--seeds", SEED, SEED + 4, "--models", "tiny-olmo2", "--shrink", 30)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [(), ("--fused",)])
def test_worlds_on_v2(kernels):
    """Under Triton's interpreter, with the plain step and with the kernels; guided requests among them."""
    out = fuzz("--runner", "v2", "--seeds", SEED, SEED + 3, "--models", "bagpiper-s2", "--shrink", 60, *kernels)
    assert out.count(": equal, ") == 4
    assert sum(map(int, re.findall(r"\bcompanions (\d+)", out))) > 0


@pytest.mark.slow
def test_soak():
    """Half of the requests are aborted: nothing is left in any table, and memory is flat."""
    command = [sys.executable, "-m", "tests.fuzz", "--soak", "400"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and done.stdout.count("nothing left in any table") == 2, done.stdout[-3000:]
    assert int(re.search(r"(\d+) companions came and went", done.stdout)[1]) > 100


# -- the fuzzer itself -------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_fault_is_found_shrunk_and_replayed(tmp_path, monkeypatch):
    """Preempted requests come back without their auxiliary ids."""
    right = History.fed

    def forgetful(self, request_id, start, stop):
        return right(self, request_id, start, stop) * (stop - start < 2)

    bench = Bench(Place(), tmp_path)
    quiet = Entry(0)
    entries = (quiet, Entry(1, arrival=3), Entry(2, preempt=(3, 8)), Entry(3, stream=(2, 2)), Entry(5, preempt=(4,)))
    world = World(SEED, "bagpiper-s5", "async-16", "usual", SEED, 7, 60, (40, 9), entries)
    assert not run(bench, [world], shrinking=0).failures
    monkeypatch.setattr(History, "fed", forgetful)
    report = run(bench, [world], shrinking=60)
    (failure,) = report.failures
    smallest = World.from_json(json.dumps(failure["world"]))
    assert len(smallest.entries) == 1 and len(smallest.entries[0].preempt) == 1
    assert (smallest.seats, smallest.budgets) == (SEATS, (256,))
    assert bench.fails(smallest)
    monkeypatch.setattr(History, "fed", right)
    assert not bench.fails(smallest)


def test_shrinking_leaves_what_makes_a_world_fail():
    for seed in range(30):
        world = draw(SEED + seed, NAMES, "usual")
        if not any(entry.preempt for entry in world.entries):
            continue
        row = next(entry.preempt[0] for entry in world.entries if entry.preempt)
        smallest = shrink(world, lambda w, row=row: any(row in entry.preempt for entry in w.entries), 10)
        (entry,) = smallest.entries
        assert dataclasses.replace(entry, card=0) == Entry(0, preempt=(row,), prompt=2, rows=2)
        assert smallest.seats == SEATS and smallest.setting.startswith("sync")


def test_an_entry_that_is_taken_out_hands_on_what_it_waited_for():
    world = draw(SEED, NAMES, "usual")
    entries = (Entry(0), Entry(1, after=0), Entry(2, after=1), Entry(3, after=2))
    rest = without(dataclasses.replace(world, entries=entries), 1).entries
    assert [(entry.card, entry.after) for entry in rest] == [(0, None), (2, 0), (3, 1)]


@pytest.mark.parametrize("scale", ["usual", "small"])
def test_a_world_is_a_function_of_its_seed_and_survives_json(scale):
    seen = set()
    for seed in range(60):
        world = draw(seed, NAMES, scale)
        assert world == draw(seed, NAMES, scale) == World.from_json(world.to_json())
        assert world.model == draw(seed // WORLDS_A_DECK[scale] * WORLDS_A_DECK[scale], NAMES, scale).model
        for index, entry in enumerate(world.entries):
            assert entry.after is None or entry.after < index
        assert 2 <= world.seats <= SEATS and min(world.budgets) >= world.seats
        seen.add(world.to_json())
    assert len(seen) == 60


def test_models_that_change_vllm_have_a_process_of_their_own():
    groups = model_groups(None, "v1", "cpu")
    assert sorted({name for group in groups for name in group}) == sorted(NAMES)
    assert all(group == ["tiny-olmo2"] or "tiny-olmo2" not in group for group in groups)
    with pytest.raises(ValueError, match="model 'tiny' is unknown; expected some of qwen3-s8-cb64"):
        model_groups(["tiny"], "v1", "cpu")


# -- the ledger --------------------------------------------------------------------------------------------------------
def test_the_ledger_adds_up(tmp_path):
    path, rng = tmp_path / "ledger.jsonl", random.Random(SEED)
    assert ledger.read(path) == [] and ledger.next_seed([], "v1", "cpu", False, 25) == 0
    total, first = 0, 0
    for _ in range(5):
        worlds = rng.randint(1, 60)
        counts = dict.fromkeys(ledger.COUNTED, 2) | {"worlds": worlds}
        run = {"seeds": [first, first + worlds - 1], "runner": "v1", "device": "cpu", "small": False, "failures": []}
        ledger.append(counts | run, path)
        total += worlds
        first = ledger.next_seed(ledger.read(path), "v1", "cpu", False, 25)
        assert first % 25 == 0 and first > run["seeds"][1]
    assert ledger.totals(ledger.read(path))["v1", "cpu"]["worlds"] == total
    assert ledger.next_seed(ledger.read(path), "v2", "cuda", False, 25) == 0
    assert ledger.next_seed(ledger.read(path), "v1", "cpu", True, 5) == 0
    path.write_text("{}\nno json\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"ledger\.jsonl:2: "):
        ledger.read(path)


def test_the_readme_tells_what_the_ledger_has():
    """Rows of the README's table: runner, device, worlds; the ledger may have more."""
    text = (REPO / "README.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| (V[12]) \| (cpu|cuda) \| ([\d,]+) \|", text, flags=re.MULTILINE)
    totals = ledger.totals(ledger.read())
    assert {("V1", "cpu"), ("V2", "cpu")} <= {(runner, device) for runner, device, _ in told}
    for runner, device, worlds in told:
        assert int(worlds.replace(",", "")) <= totals[runner.lower(), device]["worlds"], (runner, device)


def test_every_failure_of_the_ledger_has_become_a_test():
    for one in ledger.read():
        for failure in one["failures"]:
            path, _, name = failure["test"].partition("::")
            assert f"def {name}(" in (REPO / path).read_text(encoding="utf-8"), failure["test"]


def test_no_two_runs_of_the_ledger_played_the_same_seeds():
    played: dict[tuple, list] = {}
    for one in ledger.read():
        ranges = played.setdefault((one["runner"], one["device"], one["small"]), [])
        assert all(one["seeds"][0] > last or one["seeds"][1] < first for first, last in ranges), one["seeds"]
        ranges.append(one["seeds"])
    assert pathlib.Path(ledger.LEDGER).exists()
