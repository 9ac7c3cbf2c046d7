"""Sound is encoded ahead of the engine: order, batches, errors, and an engine that goes on meanwhile."""

import threading

import numpy as np
import pytest
import torch

from espnet2_vllm.audio.ahead import encoded
from espnet2_vllm.errors import CheckpointError, DataError
from espnet2_vllm.plan import LATER, Continuous, Given, Utterance, Wanted

ROWS = np.zeros((9, 2), np.int32)


def utterance(key: str, *clips: int) -> Utterance:
    """One part with clips of so many samples."""
    heard = tuple(Continuous(i, 1, wav=np.full(n, i, np.float32)) for i, n in enumerate(clips))
    return Utterance(key, (Given(ROWS, continuous=heard), Wanted(ROWS[:1])))


class Tower:
    """Gives the number of samples as vectors; remembers its batches."""

    def __init__(self):
        self.batches = []
        self.go = threading.Event()
        self.go.set()

    def encode(self, prompts):
        self.go.wait(20)
        self.batches.append(len(prompts))
        return [[torch.full((1, 2), float(len(wav))) for wav in clips] for clips in prompts]


def drain(items):
    return [item for item in items if item is not LATER]


def test_order_and_vectors():
    tower = Tower()
    unreadable = ("x", DataError("no such file"))
    items = [utterance("a", 10, 20), utterance("b"), unreadable, utterance("c", 30)]
    found = drain(encoded(items, lambda: tower))
    assert found[1:3] == items[1:3]
    assert [found[0].key, found[3].key] == ["a", "c"]
    assert [part.vectors[0, 0].item() for part in found[0].parts[0].continuous] == [10, 20]
    assert [part.count for part in found[0].parts[0].continuous] == [1, 1]
    assert found[0].parts[1] is items[0].parts[1]


def test_batches_are_bounded_by_utterances_and_seconds():
    tower = Tower()
    drain(encoded([utterance(str(i), 160) for i in range(10)], lambda: tower, together=4))
    assert tower.batches == [4, 4, 2]
    tower.batches.clear()
    drain(encoded([utterance(str(i), 400 * 16000) for i in range(5)], lambda: tower))
    assert tower.batches == [2, 2, 1]


def test_no_tower_without_sound():
    def make():
        raise AssertionError("made")

    assert [item.key for item in encoded([utterance("a"), utterance("b")], make)] == ["a", "b"]
    assert list(encoded([], make)) == []


def test_whoever_waits_is_told_so():
    tower = Tower()
    tower.go.clear()
    stream = encoded([utterance("a", 10)], lambda: tower)
    assert [next(stream) for _ in range(5)] == [LATER] * 5
    tower.go.set()
    assert [item.key for item in drain(stream)] == ["a"]


def test_a_tower_that_cannot_be_had_ends_the_run():
    """It is the checkpoint's fault, and would be every utterance's."""
    made = []

    def make():
        made.append(1)
        raise CheckpointError("no encoder")

    with pytest.raises(CheckpointError, match="no encoder"):
        drain(encoded([utterance(str(i), 10) for i in range(9)], make, together=2))
    assert len(made) <= 2  # another batch may have been begun


def test_one_that_cannot_be_encoded_refuses_nobody_else():
    class Picky(Tower):
        def encode(self, prompts):
            if any(len(wav) == 50 for clips in prompts for wav in clips):
                raise ValueError("cannot hear 50 samples")
            return super().encode(prompts)

    found = drain(encoded([utterance(str(i), n) for i, n in enumerate((40, 50, 60, 0, 70))], Picky))
    assert [item.key for item in found if not isinstance(item, tuple)] == list("0234")
    ((key, error),) = (item for item in found if isinstance(item, tuple))
    assert key == "1" and str(error) == "1: its audio could not be encoded: ValueError: cannot hear 50 samples"


def test_for_want_of_memory_fewer_are_encoded_together():
    class Small(Tower):
        def encode(self, prompts):
            if sum(len(wav) for clips in prompts for wav in clips) > 100:
                raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")
            return super().encode(prompts)

    tower = Small()
    found = drain(encoded([utterance(str(i), n) for i, n in enumerate((40, 50, 500, 60, 30, 99))], lambda: tower))
    assert [item[0] if isinstance(item, tuple) else item.key for item in found] == list("012345")
    assert isinstance(found[2], tuple) and "lower gpu_memory_utilization" in str(found[2][1])
    assert sum(tower.batches) == 5


def test_leaving_early_leaves_no_thread():
    tower = Tower()
    before = threading.active_count()
    stream = encoded([utterance(str(i), 160) for i in range(9)], lambda: tower, together=1)
    drained = next(item for item in stream if item is not LATER)
    assert drained.key == "0"
    stream.close()
    assert threading.active_count() == before
