"""Which attention the engine decodes with: by the backbone's heads and the device, from measurements."""

from __future__ import annotations

import logging
import os
from typing import Any, NamedTuple

from .compat import engine_version
from .symbols import ATTENTION, missing_symbols

log = logging.getLogger(__name__)

OWN = "CUSTOM"  # vLLM's name for a backend that others bring
OWN_CLASS = "espnet2_vllm.engine.attention_backend.SpeechAttentionBackend"
# Where ``benchmarks/h200_attention.md`` was measured; elsewhere vLLM's choice stands until somebody measures.
MEASURED_VERSION = "0.26."
MEASURED_CAPABILITY = (9, 0)


class Heads(NamedTuple):
    """Of one layer on one rank."""

    query_heads: int
    kv_heads: int
    head_size: int

    def __str__(self) -> str:
        return f"{self.query_heads} query heads on {self.kv_heads} KV heads of {self.head_size}"


class Choice(NamedTuple):
    """A backend of vLLM by name, or None for vLLM's own choice; and the reason."""

    backend: str | None
    reason: str


def choose_attention(
    heads: Heads, *, capability: tuple[int, int] | None, kv_cache_dtype: str = "auto", plain: bool = True
) -> Choice:
    """The fastest of the backends that were measured for these heads on this device.

    Args:
        capability: compute capability of the GPU; None where there is none.
        kv_cache_dtype: as in vLLM's options.
        plain: every row attends to all rows before it: no windows, caps or biases.
    """
    from .decode_attention import fits

    if capability is None:
        return Choice(None, "no CUDA device")
    if capability != MEASURED_CAPABILITY:
        return Choice(None, f"nothing was measured on compute capability {'.'.join(map(str, capability))}")
    if not engine_version().startswith(MEASURED_VERSION):
        return Choice(None, f"nothing was measured under vLLM {engine_version()}")
    if kv_cache_dtype not in ("auto", "bfloat16", "float16"):
        return Choice(None, f"a cache in {kv_cache_dtype}")
    if os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
        return Choice(None, "VLLM_BATCH_INVARIANT is set")
    if not plain:
        return Choice(None, "layers with a sliding window")
    if heads.query_heads % heads.kv_heads or not fits(heads.query_heads // heads.kv_heads, heads.head_size):
        return Choice(None, f"{heads} are no shape of the decode kernel")
    return Choice(OWN, f"prompts by FlashAttention, single rows by a kernel for {heads}")


def register_own() -> bool:
    """Tells vLLM of this package's backend, by name; whether it stands for ``CUSTOM`` now. May be called often."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum[OWN]
    if not custom.is_overridden():
        register_backend(custom, OWN_CLASS)
    return custom.get_path() == OWN_CLASS


def set_attention(config: Any) -> Choice:
    """Sets the backend in vLLM's configuration (``VllmConfig``), unless it names one by the user's will, and logs it."""
    attention = config.attention_config
    if attention.backend is not None or attention.backend_per_kind:
        choice = Choice(None, "as the engine options say")
    else:
        choice = choose_attention(heads_of(config), **_circumstances(config))
    if choice.backend is not None:
        if missing := missing_symbols(ATTENTION):
            choice = Choice(None, f"vLLM lacks {', '.join(missing)}")
        elif not register_own():
            choice = Choice(None, f"another package's backend has the name {OWN}")
    if choice.backend is not None:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        attention.backend = AttentionBackendEnum[choice.backend]
    named = getattr(attention.backend, "name", None) or "vLLM's own choice"
    log.info("attention: %s (%s)", "this package's" if named == OWN else named, choice.reason)
    return choice


def heads_of(config: Any) -> Heads:
    model, parallel = config.model_config, config.parallel_config
    return Heads(model.get_num_attention_heads(parallel), model.get_num_kv_heads(parallel), model.get_head_size())


def _circumstances(config: Any) -> dict[str, Any]:
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    text = config.model_config.hf_text_config
    kinds = set(getattr(text, "layer_types", None) or ())
    return {
        "capability": None if capability is None else (capability.major, capability.minor),
        "kv_cache_dtype": config.cache_config.cache_dtype,
        "plain": kinds <= {"full_attention"} and not getattr(text, "use_sliding_window", False),
    }
