"""Spares the scheduler the block manager's work in steps where a request's blocks cannot change.

A decoding request fills one position a step; only around a block's boundary is there a block to allocate or to cache. At
hundreds of requests these calls are most of what a step costs the host.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.request import Request, RequestStatus

# Positions behind a boundary that still go through the manager: with tokens in flight a full block is cached late.
MARGIN = 3


class QuietBlocks:
    """Stands in front of vLLM's ``KVCacheManager`` and passes on every call but those that would change nothing.

    Only for one KV cache group with full attention and no speculative tokens, as ``SpeechScheduler`` checks.
    """

    def __init__(self, manager: Any, block_size: int) -> None:
        self._manager = manager
        self.block_size = block_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_manager"], name)

    def allocate_slots(self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        place = request.num_computed_tokens % self.block_size
        if num_new_tokens == 1 and place >= MARGIN and request.status is RequestStatus.RUNNING:
            # The block that holds the last computed token has room for one more.
            return self._manager.empty_kv_cache_blocks
        return self._manager.allocate_slots(request, num_new_tokens, *args, **kwargs)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        if num_computed_tokens % self.block_size < MARGIN or request.is_prefill_chunk:
            self._manager.cache_blocks(request, num_computed_tokens)
