"""Masks and heads by interval."""

from __future__ import annotations

import torch

from ..layout import Layout
from ..protocol import AUDIO, BRIDGE, DONE, MODALITY, PHASES, TEXT


def primary_masks(layout: Layout, device: torch.device) -> torch.Tensor:
    """Ids that stream 0 may take in each phase, end tokens excluded: [phases, V] bool.

    Forced and finished phases allow the pad alone, so that every row has a finite logit; what they choose is overwritten.
    """
    masks = torch.zeros(len(PHASES), layout.vocab_size, dtype=torch.bool)
    for phase, name in ((TEXT, "text"), (AUDIO, "audio")):
        for span in layout.primary_spans(name):
            masks[phase, span.start : span.stop] = True
    if layout.family == "bagpiper":
        masks[MODALITY, layout.modality_span.start : layout.modality_span.stop] = True
    else:
        masks[MODALITY, layout.pad] = True
    masks[[BRIDGE, DONE], layout.pad] = True
    return masks.to(device)


class AuxiliaryHeads:
    """Logits of all auxiliary streams over their own candidates, by one product.

    ``lm_head(h + e_s)`` restricted to the candidates of stream s is ``W_s h`` plus the constant ``W_s e_s``.

    Attributes:
        ids: [S-1, W] vocabulary ids of the columns; streams with fewer candidates repeat their pad.
        valid: [S-1, W] bool, False at repeated columns.
    """

    def __init__(self, layout: Layout, head: torch.Tensor, stream_emb: torch.Tensor) -> None:
        """``head``: [V or more, H] rows of ``lm_head``; ``stream_emb``: [S, H]."""
        candidates = layout.auxiliary_candidates()
        width = max(map(len, candidates), default=1)
        padded = [ids + ids[:1] * (width - len(ids)) for ids in candidates]
        device = head.device
        self.ids = torch.tensor(padded, dtype=torch.int64, device=device).reshape(len(candidates), width)
        self.valid = torch.tensor(
            [[i < len(ids) for i in range(width)] for ids in candidates], dtype=torch.bool, device=device
        ).reshape(len(candidates), width)
        rows = head.detach()[self.ids.flatten()]
        self.weight = rows.t().contiguous()
        stacked = rows.view(*self.ids.shape, head.shape[1])
        bias = torch.einsum("swh,sh->sw", stacked.float(), stream_emb.detach()[1:].float())
        self.bias = bias.flatten()

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, H] to [B, S-1, W] float32, -inf at columns that are not valid."""
        logits = (hidden @ self.weight).float() + self.bias
        logits = logits.view(len(hidden), *self.ids.shape)
        return logits.masked_fill(~self.valid, -torch.inf)
