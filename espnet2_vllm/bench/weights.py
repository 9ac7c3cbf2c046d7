"""Random weights under which decisions are not ties, for comparisons of precisions at the geometry of a large model.

Plain random weights make every distribution flat: the best two of 1,024 ids are then a quarter of a standard deviation apart, and
rounding decides. A trained model has preferences. So here each id has a successor in its stream, each code has one in the next
stream too (which is what starts a delayed stream), and each modality token has one in every stream that it opens: the successor's
row of ``lm_head`` holds the embedding of the id. All else is noise. In units of the standard deviation of that noise, which
is ``LOGIT_STD``, the successor of the id before it stands at about ``PEAK`` in an audio row, and the largest of 1,024 noisy ids
at 3.2. Layers add half the variance that the embeddings of all streams have, so that the rest of the context has a say in all
of it. Norms are 1, other matrices keep the variance of their input. The weights are rounded to bfloat16, so that every
precision starts from the same ones.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..layout import Layout, Span
from .geometry import Geometry

if TYPE_CHECKING:
    import torch

    from ..checkpoint import Checkpoint

LOGIT_STD = 2.5  # as of the trained models
PEAK = 10.0
STREAM_EMB_STD = 0.3
_CONTEXT_SHARE = 0.5  # variance that all layers add, over that of the embeddings
_BRANCH_ENDS = ("o_proj.weight", "down_proj.weight")
_BRANCH_NORMS = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")

DESCRIPTION = (
    f"random weights in which every id has a preferred successor, about {PEAK:g} standard deviations above the other logits "
    f"(whose standard deviation is {LOGIT_STD:g})"
)


def write_weights(
    geometry: Geometry, directory: Path, *, seed: int = 0, device: str = "cpu", peak: float = PEAK
) -> Checkpoint:
    """Writes a checkpoint of ``geometry`` with random weights, a file a layer; made on ``device``.

    ``peak``: how far the preferred successor stands above the noise, in its standard deviations.

    Returns:
        The checkpoint of ``directory``.
    """
    import torch
    from safetensors.torch import save_file

    checkpoint = geometry.write(directory)
    index: dict[str, str] = {}
    maker = _Maker(geometry, seed, device, peak)
    for number, names in enumerate(_by_file(maker.shapes)):
        file = f"model-{number:05d}.safetensors"
        tensors = {name: maker.tensor(name).to(torch.bfloat16).cpu().contiguous() for name in names}
        save_file(tensors, directory / file, metadata={"format": "pt"})
        index |= dict.fromkeys(names, file)
    content = {"metadata": {}, "weight_map": index}
    (directory / "model.safetensors.index.json").write_text(json.dumps(content), encoding="utf-8")
    return checkpoint


def _by_file(shapes: Mapping[str, Any]) -> Iterator[list[str]]:
    """Names of a layer together, all others one by one."""
    groups: dict[str, list[str]] = {}
    for name in shapes:
        parts = name.split(".")
        layer = ".".join(parts[: parts.index("layers") + 2]) if "layers" in parts else name
        groups.setdefault(layer, []).append(name)
    yield from groups.values()


class _Maker:
    """Makes each tensor from a seed of its own."""

    def __init__(self, geometry: Geometry, seed: int, device: str, peak: float) -> None:
        from transformers import AutoConfig

        from ..checkpoint.expected import backbone_shapes

        self.layout, self.seed, self.device, self.peak = geometry.layout, seed, device, peak
        config = AutoConfig.for_model(**geometry.backbone)
        self.shapes = backbone_shapes(config, self.layout.vocab_size, self.layout.num_streams)
        # Norms behind a branch (OLMo-2) set its scale, whatever its last matrix does.
        self.norms_behind = any(name.endswith("post_feedforward_layernorm.weight") for name in self.shapes)
        branches = 2 * config.num_hidden_layers
        self.gain = math.sqrt(_CONTEXT_SHARE * self.layout.num_streams / branches)

    def tensor(self, name: str) -> torch.Tensor:
        """float32, on the device."""
        import torch

        shape = self.shapes[name]
        if name == "lm_head.weight":
            return self._head()
        if name == "model.embed_tokens.weight":
            return self._embedding()
        if name == "stream_emb.weight":
            return self._noise(name) * STREAM_EMB_STD
        if len(shape) == 1:
            scale = self.gain if self.norms_behind and name.endswith(_BRANCH_NORMS) else 1.0
            return torch.full(shape, 0.0 if name.endswith(".bias") else scale, device=self.device)
        gain = self.gain if not self.norms_behind and name.endswith(_BRANCH_ENDS) else 1.0
        return self._noise(name) * (gain / math.sqrt(shape[1]))

    def _noise(self, name: str) -> torch.Tensor:
        import torch

        generator = torch.Generator(self.device).manual_seed(zlib.crc32(f"{self.seed}/{name}".encode()))
        return torch.randn(self.shapes[name], generator=generator, device=self.device)

    def _embedding(self) -> torch.Tensor:
        embedding = self._noise("model.embed_tokens.weight")
        embedding[self.layout.pad] = 0  # as trained models have it
        return embedding

    def _head(self) -> torch.Tensor:
        """Noise, and the embedding of each id in the row of its successors."""
        import torch

        head, embedding = self._noise("lm_head.weight"), self._embedding()
        width = head.shape[1]
        head *= LOGIT_STD / math.sqrt(width)
        # An id's share of an audio row's hidden state: one embedding of all streams' and the layers'.
        share = 1 / math.sqrt(self.layout.num_streams * (1 + _CONTEXT_SHARE))
        strength = LOGIT_STD * self.peak / (share * width)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed}/successors".encode()))
        for source, target, part in _successions(self.layout):
            before = torch.arange(*source)
            after = torch.arange(*target)[torch.randperm(target.size, generator=generator)]
            count = min(len(before), len(after))
            before, after = before[:count].to(self.device), after[:count].to(self.device)
            head[after] += part * strength * embedding[before]
        return head


def _successions(layout: Layout) -> Iterator[tuple[Span, Span, float]]:
    """(ids, where their successors are, share of the full strength)."""
    codes = layout.code_spans
    yield layout.text, layout.text, 1.0
    for stream, span in enumerate(codes):
        yield span, span, 1.0
        if stream:
            yield codes[stream - 1], span, 0.5
    for modality, opened in (("text", (layout.text,)), ("audio", codes)):
        token = layout.modality_token(modality)
        for span in opened:
            yield Span(token, token + 1), span, 1.0
