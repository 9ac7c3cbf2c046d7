"""The model of either family as it is trained: a transformers backbone, one embedding, one head, one offset a stream."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lm_rows import Example
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaModel, PretrainedConfig, Qwen3Config, Qwen3Model

from espnet2_vllm.layout import Layout
from espnet2_vllm.protocol import AUDIO, MODALITY, TEXT

_BACKBONES = {"bagpiper": (Qwen3Config, Qwen3Model), "opuslm": (LlamaConfig, LlamaModel)}
_MAX_ROWS = 2048
_HEAD_STD = 0.02
AUXILIARY = 4  # beside the phases: the streams behind the first,
SAID = 5  # what is said, read off the middle of the network,
COMING = 6  # and what is said next


def backbone_config(family: str, text_size: int, size: dict[str, int]) -> PretrainedConfig:
    """``size``: hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim, intermediate_size."""
    config_class, _ = _BACKBONES[family]
    return config_class(
        vocab_size=text_size,
        max_position_embeddings=_MAX_ROWS,
        tie_word_embeddings=False,
        rms_norm_eps=1e-6,
        bos_token_id=None,
        eos_token_id=0,
        attention_dropout=0.0,
        **size,
    )


class HalfLinear(nn.Linear):
    """Products in bfloat16, all between them in float32: on a CPU autocast is slower, by its attention and its small steps."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return half_product(values, self.weight)


def half_product(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.linear(values.bfloat16(), weight.bfloat16()).float()


class Net(nn.Module):
    """Names of submodules are ESPnet's ``ParallelLLM``: model, lm_head, stream_emb; ``model`` has no embedding of its own."""

    def __init__(self, layout: Layout, config: PretrainedConfig, emb_std: float = 0.02, half: bool = True) -> None:
        super().__init__()
        self.layout = layout
        self.model = _BACKBONES[layout.family][1](config)
        self.model.embed_tokens = nn.Identity()
        # What is said is read off the middle of the network while it learns (CTC); the part that reads it is not exported.
        self.reader = nn.Linear(config.hidden_size, layout.text.size + 1, bias=False)
        self.foresight = nn.Linear(config.hidden_size, layout.text.size + 1, bias=False)
        self._middle: torch.Tensor | None = None
        self.model.layers[config.num_hidden_layers * 2 // 3 - 1].register_forward_hook(self._keep_middle)
        self._product = half_product if half else functional.linear
        for module in self.model.modules():
            if half and isinstance(module, nn.Linear):
                module.__class__ = HalfLinear
        self.emb = nn.Embedding(layout.vocab_size, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, layout.vocab_size, bias=False)
        self.stream_emb = nn.Embedding(layout.num_streams, config.hidden_size)
        for table, std in ((self.emb, emb_std), (self.lm_head, _HEAD_STD), (self.stream_emb, _HEAD_STD)):
            nn.init.normal_(table.weight, std=std)
        with torch.no_grad():
            # OpusLM adds row 0 for every pad, and its rows of text are mostly pads: that row stays zero.
            self.emb.weight[layout.pad] *= layout.family == "bagpiper"
            self.stream_emb.weight[0] *= layout.primary_stream_embedded
        primary = {
            MODALITY: [layout.modality_span] if layout.family == "bagpiper" else [],
            TEXT: layout.primary_spans("text"),
            AUDIO: layout.primary_spans("audio"),
        }
        for phase, spans in primary.items():
            ids = [i for span in spans for i in range(*span)]
            if phase != MODALITY:
                ids = [*layout.end_tokens, *ids]
            self.register_buffer(f"ids_{phase}", torch.tensor(ids, dtype=torch.long), persistent=False)
        auxiliary = torch.tensor(layout.auxiliary_candidates())
        self.register_buffer("ids_auxiliary", auxiliary, persistent=False)
        self.register_buffer("places", self._places(), persistent=False)

    def _keep_middle(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._middle = output[0] if isinstance(output, tuple) else output

    def _places(self) -> torch.Tensor:
        """[4, V] index of an id among the candidates of each phase's stream 0, and of auxiliary streams (their own spans)."""
        table = torch.full((4, self.layout.vocab_size), -1, dtype=torch.long)
        for phase in (MODALITY, TEXT, AUDIO):
            ids = getattr(self, f"ids_{phase}")
            table[phase, ids] = torch.arange(len(ids))
        for candidates in self.ids_auxiliary:
            table[3, candidates] = torch.arange(len(candidates))
        return table

    def embed(self, rows: torch.Tensor) -> torch.Tensor:
        """[B, T, S] ids -> [B, T, H]: the sum over streams, where a pad of an auxiliary stream adds nothing."""
        batch, length, streams = rows.shape
        pad = None if self.layout.family == "bagpiper" else self.layout.pad
        primary = functional.embedding(rows[..., 0], self.emb.weight, padding_idx=pad)
        others = rows[..., 1:].reshape(-1, streams - 1)
        summed = functional.embedding_bag(others, self.emb.weight, mode="sum", padding_idx=self.layout.pad)
        return primary + summed.view(batch, length, -1)

    def hidden(self, rows: torch.Tensor) -> torch.Tensor:
        """[B, T, S] -> [B, T, H]. Sequences are filled up behind their ends, where a causal model does not look."""
        return self.model(inputs_embeds=self.embed(rows), use_cache=False).last_hidden_state

    def losses(self, batch: Batch) -> Losses:
        """Cross-entropies of everything that ``batch`` marks, each over the ids that its mask leaves."""
        hidden = self.hidden(batch.noisy)[:, :-1]
        found = Losses()
        for phase in (MODALITY, TEXT, AUDIO):
            places = batch.places[phase]
            if len(places[0]):
                logits = self._primary_logits(hidden[places], phase)
                ids = batch.rows[:, 1:, 0][places]
                found.add(phase, 0, _cross_entropy(logits, self.places[phase, ids]), batch.tasks, places[0])
        places = batch.places[AUXILIARY]
        if len(places[0]):
            logits = self._auxiliary_logits(hidden[places])
            indices = self.places[3, batch.rows[:, 1:, 1:][places]]
            losses = _cross_entropy(logits.flatten(0, 1), indices.flatten()).view(indices.shape)
            for stream in range(losses.shape[1]):
                found.add(AUDIO, stream + 1, losses[:, stream], batch.tasks, places[0])
        if batch.said:
            found.add(SAID, 0, self._said(batch), batch.tasks, torch.tensor([place for place, *_ in batch.said]))
        places = batch.places[COMING]
        if len(places[0]):
            logits = self._product(_normed(self._middle[places]), self.foresight.weight)
            found.add(COMING, 0, _cross_entropy(logits, batch.coming[places]), batch.tasks, places[0])
        return found

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """[B, T, S] -> [B, T, text size + 1]: what is heard at each row; the last entry is nothing new."""
        self.hidden(rows)
        return self._product(_normed(self._middle), self.reader.weight)

    def _said(self, batch: Batch) -> torch.Tensor:
        """Of each stretch of speech: connectionist temporal classification of its words, for each word."""
        rows = self._middle.flatten(0, 1)[batch.stretches]
        logits = self._product(_normed(rows), self.reader.weight)
        losses = functional.ctc_loss(
            logits.log_softmax(-1),
            batch.words,
            batch.stretch_lengths,
            batch.word_lengths,
            self.layout.text.size,
            reduction="none",
            zero_infinity=True,
        )
        return losses / batch.word_lengths.to(losses.device)

    def _primary_logits(self, hidden: torch.Tensor, phase: int) -> torch.Tensor:
        if self.layout.primary_stream_embedded:
            hidden = hidden + self.stream_emb.weight[0]
        return self._product(hidden, self.lm_head.weight[getattr(self, f"ids_{phase}")])

    def _auxiliary_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, H] -> [M, S - 1, ids a stream]. One product for all: head(h + offset) = head(h) + head(offset)."""
        heads = self.lm_head.weight[self.ids_auxiliary]
        offsets = torch.einsum("swh,sh->sw", heads, self.stream_emb.weight[1:])
        return self._product(hidden, heads.flatten(0, 1)).view(len(hidden), *offsets.shape) + offsets


def _normed(rows: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(rows, rows.shape[-1:])


def _cross_entropy(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits, wanted, reduction="none")


class Batch:
    """Examples side by side, filled up to the longest with empty rows; made on a processor, in a process of its own if need be.

    Attributes:
        rows: [B, T, S] ids; ``noisy`` is what the model is fed: some ids of spoken answers are others of the same stream there.
        coming: [B, T] tokens, or NOTHING.
        places: by phase (AUXILIARY: of the other streams; COMING): the (example, row) pairs whose next row has to be predicted.
        stretches: [longest, N] indices into all rows of the stretches of speech; with ``words`` [sum] and their lengths.
    """

    def __init__(self, examples: Sequence[Example], noise: float = 0.0, seed: int = 0) -> None:
        length, streams = max(map(len, examples)), examples[0].rows.shape[1]
        rows = np.zeros((len(examples), length, streams), dtype=np.int64)
        targets = np.zeros(rows.shape, dtype=bool)
        phases = np.full(rows.shape[:2], -1, dtype=np.int64)
        coming = phases.copy()
        for place, example in enumerate(examples):
            rows[place, : len(example)] = example.rows
            targets[place, : len(example)] = example.targets
            phases[place, : len(example)] = example.phases
            if example.coming is not None:
                coming[place, : len(example)] = example.coming
        marked = {phase: (phases[:, 1:] == phase) & targets[:, 1:, 0] for phase in (MODALITY, TEXT, AUDIO)}
        marked |= {AUXILIARY: targets[:, 1:, 1:].all(-1), COMING: coming[:, :-1] >= 0}
        self.places = {part: tuple(map(torch.from_numpy, np.nonzero(where))) for part, where in marked.items()}
        codes = targets & (phases == AUDIO)[:, :, None]
        self.rows, self.coming = torch.from_numpy(rows), torch.from_numpy(coming)
        self.noisy = torch.from_numpy(_disturbed(rows, codes, noise, seed))
        self.tasks, self.filled = [example.task for example in examples], sum(map(len, examples))
        self.said = [(place, *stretch) for place, example in enumerate(examples) for stretch in example.said]
        spans = [np.arange(start, stop) + place * length for place, start, stop, _ in self.said]
        self.stretches = nn.utils.rnn.pad_sequence([torch.from_numpy(span) for span in spans]) if spans else None
        self.stretch_lengths = torch.tensor([len(span) for span in spans])
        self.words = torch.tensor([word for *_, words in self.said for word in words])
        self.word_lengths = torch.tensor([len(words) for *_, words in self.said])

    def to(self, device: str) -> Batch:
        """Everything that is computed with, there; lengths stay, which only say how to."""
        for name in ("rows", "coming", "noisy", "stretches", "words"):
            value = getattr(self, name)
            setattr(self, name, value if value is None else value.to(device, non_blocking=True))
        self.places = {
            part: tuple(place.to(device, non_blocking=True) for place in places) for part, places in self.places.items()
        }
        return self

    def __len__(self) -> int:
        return self.rows.shape[0] * self.rows.shape[1]


def _disturbed(rows: np.ndarray, codes: np.ndarray, share: float, seed: int) -> np.ndarray:
    """A ``share`` of the marked ids in the place of others: a model that has seen wrong codes goes on after its own."""
    if not share:
        return rows
    rng = np.random.default_rng(seed)
    found = rows.copy()
    for stream in range(rows.shape[2]):
        places = np.nonzero(codes[:, :, stream])
        ids = rows[..., stream][places]
        chosen = rng.random(len(ids)) < share
        found[..., stream][tuple(place[chosen] for place in places)] = rng.permutation(ids)[chosen]
    return found


class Losses:
    """Sums of cross-entropies and their counts, by phase, stream and task."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, int], torch.Tensor] = {}
        self._tasks: dict[tuple[int, int], tuple[list[str], torch.Tensor]] = {}

    def add(self, phase: int, stream: int, values: torch.Tensor, tasks: list[str], of: torch.Tensor) -> None:
        self._parts[phase, stream] = values
        self._tasks[phase, stream] = (tasks, of)

    def total(
        self, weights: Sequence[float], text_weight: float, said_weight: float, coming_weight: float
    ) -> torch.Tensor:
        """Text (and the choice of a modality) on the one side, speech on the other, each by its mean, so that neither drowns.

        ``weights``: of the streams, as ESPnet's ``stream_weights``.
        """
        text = [values for (phase, _), values in self._parts.items() if phase in (MODALITY, TEXT)]
        audio = [weights[stream] * values.mean() for (phase, stream), values in self._parts.items() if phase == AUDIO]
        said = [said_weight * values.mean() for (phase, _), values in self._parts.items() if phase == SAID]
        said += [coming_weight * values.mean() for (phase, _), values in self._parts.items() if phase == COMING]
        total = sum([*audio, *said])
        return torch.as_tensor(total + (text_weight * torch.cat(text).mean() if text else 0.0))

    def table(self) -> dict[tuple[str, str], tuple[float, int]]:
        """(task, part) -> (sum, count). Parts are ``modality``, ``text``, ``audio0``, ``audio1``, ..."""
        found: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0])
        for (phase, stream), values in self._parts.items():
            part = {MODALITY: "modality", TEXT: "text", SAID: "said", COMING: "coming"}.get(phase, f"audio{stream}")
            tasks, of = self._tasks[phase, stream]
            numbers, places = values.detach().float().numpy(force=True), of.numpy(force=True)
            for place in np.unique(places):
                chosen = numbers[places == place]
                entry = found[tasks[place], part]
                entry[0] += float(chosen.sum())
                entry[1] += len(chosen)
        return {key: (entry[0], int(entry[1])) for key, entry in found.items()}
