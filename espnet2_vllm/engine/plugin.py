"""Entry point of the group ``vllm.general_plugins``: makes model classes and attention known. vLLM calls it in each process."""

from __future__ import annotations

import multiprocessing

from ..logs import in_process_of_vllm
from ..orphans import end_with

_OF_VLLM = ("EngineCore", "VllmWorker", "Worker")  # beginnings of the names of its processes
ARCHITECTURES = ("SpeechLMQwen3ForCausalLM", "SpeechLMLlamaForCausalLM", "SpeechLMOlmo2ForCausalLM")


def register() -> None:
    """Registers lazily by name, so that nothing heavy is imported and no device is touched here; may be called often."""
    from vllm import ModelRegistry

    from .attention import register_own
    from .compat import let_modules_be_scanned

    in_process_of_vllm()
    parent = multiprocessing.parent_process()
    if parent is not None and multiprocessing.current_process().name.startswith(_OF_VLLM):
        end_with(parent.pid)  # an engine or a rank in a process of its own, which is there for its parent alone
    let_modules_be_scanned()
    register_own()
    known = ModelRegistry.get_supported_archs()
    for name in ARCHITECTURES:
        if name not in known:
            ModelRegistry.register_model(name, f"espnet2_vllm.engine.models:{name}")


def register_classes() -> None:
    """Registers the classes themselves. vLLM looks at a lazy one in a process of its own, whose imports take half of a start.

    For an engine in this process, where there is no device that importing could touch before its time.
    """
    from vllm import ModelRegistry

    from . import models

    for name in ARCHITECTURES:
        ModelRegistry.register_model(name, getattr(models, name))
