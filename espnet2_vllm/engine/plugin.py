"""Entry point of the group ``vllm.general_plugins``: makes model classes and attention known. vLLM calls it in each process."""

from __future__ import annotations

import logging

ARCHITECTURES = ("SpeechLMQwen3ForCausalLM", "SpeechLMLlamaForCausalLM", "SpeechLMOlmo2ForCausalLM")


def register() -> None:
    """Registers lazily by name, so that nothing heavy is imported and no device is touched here; may be called often."""
    from vllm import ModelRegistry

    from .attention import register_own
    from .compat import let_modules_be_scanned

    _set_up_logging()
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


def _set_up_logging() -> None:
    """In a process that vLLM started nobody has set up logging but vLLM, for itself: what it shows, it shows of ours too."""
    own, theirs = logging.getLogger("espnet2_vllm"), logging.getLogger("vllm")
    if own.hasHandlers() or not theirs.handlers:
        return
    for handler in theirs.handlers:
        own.addHandler(handler)
    own.setLevel(theirs.getEffectiveLevel())
