"""Convolutions' precision when threads come and go."""

import threading

import pytest
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


@pytest.fixture
def settings():
    """torch's, put back behind the test."""
    backends = torch.backends
    before = backends.fp32_precision, backends.cudnn.fp32_precision
    yield backends
    backends.fp32_precision, backends.cudnn.fp32_precision = before
    backends.cudnn.allow_tf32 = True


@pytest.mark.parametrize(
    "chosen", [{}, {"all": "tf32"}, {"all": "ieee"}, {"conv": "ieee"}, {"conv": "ieee", "rnn": "ieee"}, {"rnn": "ieee"}]
)
def test_whatever_else_set_torchs_newer_switches(settings, chosen):
    """As vLLM does where it is told to be batch invariant; and torch refuses the older switch where they differ."""
    for name, precision in chosen.items():
        (settings if name == "all" else getattr(settings.cudnn, name)).fp32_precision = precision
    before = settings.cudnn.conv.fp32_precision, settings.cudnn.rnn.fp32_precision
    for tf32 in (False, True):
        with convolutions(GPU, tf32=tf32):
            precision = "tf32" if tf32 else "ieee"
            assert (settings.cudnn.conv.fp32_precision, settings.cudnn.rnn.fp32_precision) == (precision, precision)
            assert settings.cudnn.allow_tf32 is tf32, "and the older switch says the same"
        assert (settings.cudnn.conv.fp32_precision, settings.cudnn.rnn.fp32_precision) == before
