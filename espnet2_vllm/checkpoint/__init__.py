"""Checkpoints: ESPnet's in every layout, and the converted directories that vLLM and transformers load.

A converted directory holds ``config.json`` and safetensors shards with transformers' names (``stream_emb.weight`` besides),
``tokenizer/``, ``codec/`` and ``continuous_audio/`` where the checkpoint has them, and ``speechlm.json``, which says what
the ids mean and what it was made from.
"""

from .caching import ensure_converted
from .conversion import Report, convert
from .opening import Checkpoint, is_converted, open_checkpoint

__all__ = ["Checkpoint", "Report", "convert", "ensure_converted", "is_converted", "open_checkpoint"]
