"""Device memory of an engine by owner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

OWNERS = ("weights", "kv_cache", "history_table", "auxiliary_heads", "other")


def memory_by_owner(runner: Any) -> dict[str, int | None]:
    """Bytes by owner; each storage is counted once, for the first owner that holds it.

    ``other`` is what torch has allocated on the GPU besides (activations, CUDA graphs, vLLM's own buffers); None on a CPU.
    """
    import torch

    core, fused = _speech_parts(runner)
    counted: set[int] = set()
    # Under tensor parallelism the core's embedding is not the model's, which is sharded.
    embedding = [] if core is None else [core.embedding]
    owners: dict[str, int | None] = {
        "weights": _size([*runner.model.parameters(), *runner.model.buffers(), *embedding], counted),
        "kv_cache": _size(_flat(runner.kv_caches), counted),
        "history_table": 0 if core is None else _size([core.history], counted),
        "auxiliary_heads": 0 if core is None else _size(_tensors_of(core.heads, fused), counted),
        "other": None,
    }
    if torch.cuda.is_available():
        owners["other"] = torch.cuda.memory_allocated() - sum(size or 0 for size in owners.values())
    return owners


def described(owners: dict[str, int | None]) -> str:
    """One line for the log."""
    parts = [f"{owner.replace('_', ' ')} {size / 2**20:,.0f} MiB" for owner, size in owners.items() if size is not None]
    return f"{', '.join(parts)}; {sum(size or 0 for size in owners.values()) / 2**20:,.0f} MiB in all"


def _speech_parts(runner: Any) -> tuple[Any, Any]:
    """The core and its fused step path; None each where there is none."""
    state = getattr(runner, "model_state", runner)
    return getattr(state, "core", None), getattr(state, "fused", None)


def _tensors_of(*holders: Any) -> Iterator[Any]:
    import torch

    for holder in holders:
        if holder is not None:
            yield from (value for value in vars(holder).values() if isinstance(value, torch.Tensor))


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    elif value is not None:
        yield value


def _size(tensors: Iterable[Any], counted: set[int]) -> int:
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            total += storage.nbytes()
    return total
