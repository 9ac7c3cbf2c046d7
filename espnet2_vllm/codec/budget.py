"""The device's memory shared between codec and engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError

log = logging.getLogger(__name__)

SHARE = "gpu_memory_utilization"
_WORK = 1 << 29  # bytes beyond the codec's captured graphs: features, longer clips, the allocator's leftovers


def make_room(options: Mapping[str, Any], taken: int, total: int) -> dict[str, Any]:
    """Engine options with the codec's memory taken out of vLLM's share, and a line in the log that says so.

    Args:
        options: of the engine.
        taken: bytes of the device that the codec holds (``CodecService.prepare``); 0 changes nothing.
        total: bytes of the device.

    Raises:
        ConfigError: if nothing would be left.
    """
    if not taken:
        return dict(options)
    from vllm.engine.arg_utils import EngineArgs

    share = options.get(SHARE, EngineArgs.gpu_memory_utilization)
    left = round(share - (taken + _WORK) / total, 4)
    if left <= 0:
        raise ConfigError(
            f"{SHARE} {share} of {total / 2**30:.0f} GiB leaves nothing beside the codec, which takes "
            f"{(taken + _WORK) / 2**30:.1f} GiB; raise it, or put the codec elsewhere (--device cpu)"
        )
    log.info(
        "memory: %.2f GiB of %.0f are kept for the codec, so vLLM's share is %.3f instead of %.3f",
        (taken + _WORK) / 2**30, total / 2**30, left, share,
    )  # fmt: skip
    return {**options, SHARE: left}
