"""Choosing ids: the ``topk`` best of the allowed ones, divided by the temperature, cut by top-p, one draw."""

from __future__ import annotations

import torch

from .noise import gumbel

# Values that are ranked at once: without a top-k a row has as many as the vocabulary, a full batch of them more than is free.
MOST_RANKED = 1 << 22


def choose(
    logits: torch.Tensor,
    ids: torch.Tensor,
    topk: torch.Tensor,
    temperature: torch.Tensor,
    max_topk: int,
    seed: torch.Tensor,
    position: torch.Tensor,
    stream: torch.Tensor,
    top_p: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One id per row.

    Args:
        logits: [N, C] float32, -inf where forbidden; at least one finite value a row.
        ids: [N, C] int64 (or [1, C]) vocabulary id of each column; the noise depends on the id, not on the column.
        topk: [N] int64, 1 is the argmax.
        temperature: [N] float32.
        max_topk: no row's ``topk`` is larger (known on the host, so that nothing waits for the device).
        seed, position, stream: [N] int64, see ``noise.gumbel``.
        top_p: [N] float32, 1 leaves nothing out; None if no row's is smaller (known on the host as well).

    Returns:
        Column of the choice [N] int64, and its log-probability after mask, top-k, temperature and top-p [N] float32.
    """
    best = logits.argmax(-1)
    if max_topk == 1:
        return best, torch.zeros_like(temperature)
    k = min(max_topk, logits.shape[-1])
    rows = (logits, ids.expand(len(logits), -1), topk, temperature, seed, position, stream)
    rows = (*rows, torch.ones_like(temperature) if top_p is None else top_p)
    size = max(MOST_RANKED // k, 1)
    parts = [_draw(k, top_p is not None, *part) for part in zip(*(x.split(size) for x in rows), strict=True)]
    column, logprob = (torch.cat(part) if len(parts) > 1 else part[0] for part in zip(*parts, strict=True))
    greedy = topk == 1
    return torch.where(greedy, best, column), torch.where(greedy, 0.0, logprob)


def _draw(
    k: int,
    cut: bool,
    logits: torch.Tensor,
    ids: torch.Tensor,
    topk: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    stream: torch.Tensor,
    top_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Column and log-probability of a draw from the ``k`` best, of which each row takes its own number."""
    values, columns = torch.topk(logits, k, dim=-1)
    rank = torch.arange(k, device=logits.device)
    scores = torch.where(rank < topk.unsqueeze(-1), values / temperature.unsqueeze(-1), -torch.inf)
    if cut:
        # In float64: a device may add the terms of a running sum in any order.
        share = torch.softmax(scores, -1).double().cumsum(-1)
        limit = top_p.unsqueeze(-1)
        scores = scores.masked_fill((share > limit) & (limit < 1) & (rank > 0), -torch.inf)
    logprobs = torch.log_softmax(scores, -1)
    pick = (scores + gumbel(seed, position, stream, ids.gather(-1, columns))).argmax(-1, keepdim=True)
    return columns.gather(-1, pick).squeeze(-1), logprobs.gather(-1, pick).squeeze(-1)
