"""Tensor parallelism: what every rank must hold, and what all ranks must agree on.

vLLM shards the backbone, the embedding and ``lm_head``, and gives every rank the hidden states and the logits of all rows, so every
rank samples. All that is S streams wide (history, phases, pairs, auxiliary heads) is small and kept whole on each rank.
"""

from __future__ import annotations

import torch
from vllm.distributed import get_tensor_model_parallel_world_size, get_tp_group, tensor_model_parallel_all_gather


def all_rows(weight: torch.Tensor) -> torch.Tensor:
    """All rows, on every rank, of a [V', H] weight that vLLM shards by rows; itself where it does not. vLLM's padding comes last.

    To be called on all ranks or on none.
    """
    if get_tensor_model_parallel_world_size() == 1:
        return weight
    return tensor_model_parallel_all_gather(weight.detach().contiguous(), dim=0)


class FirstRank:
    """Puts the ids that the first rank chose in the place of every rank's own.

    Ranks compute them from equal numbers and with equal noise, but no library promises that equal sums are rounded alike on all
    ranks, and a rank whose history differs in one id would go on with another sequence: unseen, since the first rank's output is
    what counts. Nothing waits for the device.
    """

    def __init__(self) -> None:
        group = get_tp_group()
        self._communicator = group.device_communicator if group.world_size > 1 else None

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """``ids``, contiguous; overwritten on all ranks but the first."""
        return ids if self._communicator is None else self._communicator.broadcast(ids, 0)
