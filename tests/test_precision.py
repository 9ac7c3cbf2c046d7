"""Convolutions' precision when threads come and go."""

import threading

import torch

from espnet2_vllm.precision import convolutions

GPU = torch.device("cuda", 0)  # named, not used


def flags():
    return torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark


def test_a_thread_that_leaves_does_not_change_what_another_computes_in():
    before, entered, leave, left = flags(), threading.Event(), threading.Event(), threading.Event()

    def other():
        with convolutions(GPU):
            entered.set()
            leave.wait(60)
        left.set()

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(60)
    with convolutions(GPU):
        leave.set()
        assert left.wait(60)
        thread.join()
        assert flags() == (False, False)
        with convolutions(GPU, tf32=True, tune=True):
            assert flags() == (True, True)
        assert flags() == (False, False)
    assert flags() == before


def test_nothing_changes_on_a_cpu_or_after_an_error():
    before = flags()
    with convolutions(torch.device("cpu"), tf32=not before[0]):
        assert flags() == before
    try:
        with convolutions(GPU):
            raise ValueError
    except ValueError:
        pass
    assert flags() == before
