"""Choosing ids: the ``topk`` best of the allowed ones, divided by the temperature, one draw."""

from __future__ import annotations

import torch

from .noise import gumbel


def choose(
    logits: torch.Tensor,
    ids: torch.Tensor,
    topk: torch.Tensor,
    temperature: torch.Tensor,
    max_topk: int,
    seed: torch.Tensor,
    position: torch.Tensor,
    stream: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One id per row.

    Args:
        logits: [N, C] float32, -inf where forbidden; at least one finite value a row.
        ids: [N, C] int64 (or [1, C]) vocabulary id of each column; the noise depends on the id, not on the column.
        topk: [N] int64, 1 is the argmax.
        temperature: [N] float32.
        max_topk: no row's ``topk`` is larger (known on the host, so that nothing waits for the device).
        seed, position, stream: [N] int64, see ``noise.gumbel``.

    Returns:
        Column of the choice [N] int64, and its log-probability after mask, top-k and temperature [N] float32.
    """
    best = logits.argmax(-1)
    if max_topk == 1:
        return best, torch.zeros_like(temperature)
    k = min(max_topk, logits.shape[-1])
    values, columns = torch.topk(logits, k, dim=-1)
    rank = torch.arange(k, device=logits.device)
    scores = torch.where(rank < topk.unsqueeze(-1), values / temperature.unsqueeze(-1), -torch.inf)
    logprobs = torch.log_softmax(scores, -1)
    noise = gumbel(seed, position, stream, ids.expand(len(logits), -1).gather(-1, columns))
    pick = (scores + noise).argmax(-1, keepdim=True)
    greedy = topk == 1
    column = torch.where(greedy, best, columns.gather(-1, pick).squeeze(-1))
    logprob = torch.where(greedy, 0.0, logprobs.gather(-1, pick).squeeze(-1))
    return column, logprob
