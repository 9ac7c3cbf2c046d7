"""Rows in the form that vLLM carries them: log-probability tensors, of a step or over a prompt (teacher forcing)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from vllm.v1.outputs import LogprobsTensors

from .core import Sampled, SpeechCore


def channel_tensors(sampled: Sampled) -> LogprobsTensors:
    """[B, S + 1] columns: vLLM's token, then one code per stream."""
    ids = torch.cat([sampled.tokens.unsqueeze(1), sampled.codes], 1).to(torch.int32)
    logprobs = torch.cat([sampled.logprobs[:, :1], sampled.logprobs], 1)
    return LogprobsTensors(ids, logprobs, torch.ones(len(ids), dtype=torch.int32, device=ids.device))


class Predictions:
    """Masked argmax rows over a prompt, gathered as its chunks run. Entry i predicts row i + 1."""

    CHUNK = 1024  # rows of full-vocabulary logits at a time

    def __init__(self, num_streams: int) -> None:
        self.num_streams = num_streams
        self._parts: list[LogprobsTensors] = []

    def extend(
        self, core: SpeechCore, hidden: torch.Tensor, compute_logits: Callable[[torch.Tensor], torch.Tensor], slot: int
    ) -> None:
        """Adds the predictions of ``hidden`` [n, H], the outputs of the next n prompt rows."""
        for start in range(0, len(hidden), self.CHUNK):
            part = hidden[start : start + self.CHUNK]
            slots = torch.full((len(part),), slot, dtype=torch.int64, device=part.device)
            tensors = channel_tensors(core.predict(part, compute_logits(part), slots))
            self._parts.append(LogprobsTensors(*(t.cpu() for t in tensors[:3])))

    def tensors(self) -> LogprobsTensors:
        if not self._parts:
            return LogprobsTensors.empty_cpu(0, self.num_streams + 1)
        return LogprobsTensors(*(torch.cat([part[i] for part in self._parts]) for i in range(3)))
