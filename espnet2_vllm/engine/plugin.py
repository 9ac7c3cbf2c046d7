"""Entry point of the group ``vllm.general_plugins``: makes the model classes known. vLLM calls it in each of its processes."""

from __future__ import annotations

ARCHITECTURES = ("SpeechLMQwen3ForCausalLM", "SpeechLMLlamaForCausalLM", "SpeechLMOlmo2ForCausalLM")


def register() -> None:
    """Registers lazily by name, so that nothing heavy is imported and no device is touched here; may be called often."""
    from vllm import ModelRegistry

    known = ModelRegistry.get_supported_archs()
    for name in ARCHITECTURES:
        if name not in known:
            ModelRegistry.register_model(name, f"espnet2_vllm.engine.models:{name}")
