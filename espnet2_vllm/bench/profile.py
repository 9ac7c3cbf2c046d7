"""Where a decode step goes: host time by part, device time by kind of kernel."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ..errors import ConfigError
from .workload import Unit

_STEPS = 16  # decode steps that are looked at, once for the host and once for the device
_LEAST_OUTPUT = 4 * _STEPS

# Host parts in the order of a step.
HOST_PARTS = ("schedule", "launch", "wait", "update", "front end")
# First match counts. Names are those of cuBLAS, FlashAttention, vLLM and ``engine.kernels``.
_KERNELS = (
    ("streams", r"embed_kernel|auxiliary_kernel|text_kernel|primary_kernel|partners_kernel|bagpiper_kernel|opuslm_kernel"),
    ("attention", r"flash|fmha|attention|reshape_and_cache|reduce_segments"),
    ("sampling", r"gumbel|topk|top_k|softmax|sample|sort|radix|penalt"),
    ("matmul", r"gemm|nvjet|cutlass|cublas|splitK|gemv|matmul"),
)  # fmt: skip
DEVICE_PARTS = (*(name for name, _ in _KERNELS), "other")


def kernel_part(name: str) -> str:
    """Which of ``DEVICE_PARTS`` a kernel counts to."""
    return next((part for part, pattern in _KERNELS if re.search(pattern, name, re.IGNORECASE)), "other")


def profile_steps(system: Any, units: list[Unit], output: int) -> dict[str, Any]:
    """Runs ``units`` at once until half of their rows are there, looks at the steps that follow, and aborts the rest.

    Args:
        system: one whose model runner is in this process.
        output: rows of each unit.

    Returns:
        Milliseconds a step: ``step_ms``; ``host_ms`` by part (``wait`` is for the device); on CUDA ``device_ms`` by kind of
        kernel, ``busy_ms`` (some kernel runs), and ``kernels``: the ten that take longest, with their launches a step.

    Raises:
        ConfigError: if ``output`` is too short for it.
    """
    if output < _LEAST_OUTPUT:
        raise ConfigError(f"a profile needs outputs of at least {_LEAST_OUTPUT} rows, not {output}")
    requests = [next(unit) for unit in units]
    started: set[str] = set()
    try:
        for request in requests:
            system.submit(request)
        while len(started) < len(requests):
            _only_rows(system.step())
            started.update(system.first_rows())
        for _ in range(output // 2 - 2 * _STEPS):
            _only_rows(system.step())
        return {**_host(system), **_device(system)}
    finally:
        system.abort([request.request_id for request in requests])
        # What is in flight must have come back before the next load's prompts are looked at.
        system.settle()


def _only_rows(finished: list[Any]) -> None:
    if finished:
        raise ConfigError(f"{finished[0][0]} ended before its steps could be looked at; give longer outputs")


def _host(system: Any) -> dict[str, Any]:
    with _timed(system.llm_engine) as spent:
        begun = time.perf_counter()
        for _ in range(_STEPS):
            _only_rows(system.step())
        total = time.perf_counter() - begun
    return {"step_ms": total / _STEPS * 1e3, "host_ms": {part: spent[part] / _STEPS * 1e3 for part in HOST_PARTS}}


@contextmanager
def _timed(llm_engine: Any) -> Iterator[dict[str, float]]:
    """Seconds by part of what runs inside; waiting for the device is taken out of the part that waits."""
    import torch

    core = llm_engine.engine_core.engine_core
    spent = dict.fromkeys(HOST_PARTS, 0.0)

    def wrap(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            waited, begun = spent["wait"], time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                inner = 0.0 if part == "wait" else spent["wait"] - waited
                spent[part] += time.perf_counter() - begun - inner

        return timed

    places = [
        ("schedule", core.scheduler, "schedule"),
        ("launch", core.model_executor, "execute_model"),
        ("launch", core.model_executor, "sample_tokens"),
        ("update", core.scheduler, "update_from_output"),
        ("front end", llm_engine.output_processor, "process_outputs"),
    ]
    if torch.cuda.is_available():
        places.append(("wait", torch.cuda.Event, "synchronize"))
    with ExitStack() as stack:
        for part, owner, name in places:
            stack.enter_context(_replaced(owner, name, lambda function, part=part: wrap(part, function)))
        yield spent


@contextmanager
def _replaced(owner: Any, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    own = vars(owner).get(name)
    setattr(owner, name, change(getattr(owner, name)))
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _device(system: Any) -> dict[str, Any]:
    """Kernels of some steps; nothing on a CPU, whose kernels are the host's own time."""
    import torch

    if not torch.cuda.is_available():
        return {}
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(_STEPS):
            _only_rows(system.step())
        torch.cuda.synchronize()
    kernels = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
    ]
    return summarize(kernels, _STEPS)


def summarize(kernels: Iterable[tuple[str, float, float]], steps: int) -> dict[str, Any]:
    """Milliseconds a step of ``kernels`` (name, start and end in microseconds) that ran in ``steps`` steps."""
    parts = dict.fromkeys(DEVICE_PARTS, 0.0)
    by_name: dict[str, list[float]] = {}
    busy, reached = 0.0, float("-inf")
    for name, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        parts[kernel_part(name)] += end - start
        total = by_name.setdefault(name, [0.0, 0])
        total[0] += end - start
        total[1] += 1
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    longest = sorted(by_name.items(), key=lambda item: -item[1][0])[:10]
    return {
        "busy_ms": busy / steps / 1e3,
        "device_ms": {part: total / steps / 1e3 for part, total in parts.items()},
        "kernels": [
            {"name": name, "ms": total / steps / 1e3, "launches": count / steps} for name, (total, count) in longest
        ],
    }
