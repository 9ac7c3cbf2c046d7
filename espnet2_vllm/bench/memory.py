"""An engine's device memory: whose it is, and giving it back."""

from __future__ import annotations

import gc
import sys
from typing import Any


def runner_of(llm_engine: Any) -> Any:
    """The model runner of a vLLM engine in this process; None if it runs in another, as all of several ranks do."""
    core = getattr(llm_engine.engine_core, "engine_core", None)
    worker = None if core is None else getattr(core.model_executor, "driver_worker", None)
    return None if worker is None else worker.worker.model_runner


def steps_seen(llm_engine: Any) -> bool:
    """Whether a ``step`` of it is one of the model: its scheduler is in this process."""
    return hasattr(llm_engine.engine_core, "engine_core")


def free_device() -> int:
    """Gives memory back after an engine was closed and let go; bytes that torch still holds on the GPU."""
    import torch

    gc.collect()
    if "vllm" in sys.modules:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()
