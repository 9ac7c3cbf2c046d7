"""The backbone of the plain backend, with the embedding and the heads of all streams."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.nn.functional import linear

from ..checkpoint.expected import read_hf_config
from ..checkpoint.headers import check_weights
from ..errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..checkpoint import Checkpoint


class Logits(NamedTuple):
    """Raw float32 logits of one row: stream 0 [V], auxiliary streams over their candidates [S-1, W]."""

    primary: torch.Tensor
    auxiliary: torch.Tensor

    def guided(self, other: Logits, scale: float) -> Logits:
        """ESPnet's guidance, on all streams: ``scale`` times these and 1 - ``scale`` times the unconditional ones."""
        return Logits(*(scale * mine + (1 - scale) * theirs for mine, theirs in zip(self, other, strict=True)))

    def to_numpy(self) -> tuple[np.ndarray, np.ndarray]:
        return self.primary.cpu().numpy(), self.auxiliary.cpu().numpy()


class Network:
    """The backbone with the embedding and the heads of all streams.

    Args:
        random: weights as transformers initialises them; the directory needs no more than its config.json then.

    Attributes:
        candidates: [S-1, W] ids of the auxiliary streams (``Layout.auxiliary_candidates``), shorter ones filled up with pad.
        filled: [S-1, W] bool, where they are.

    Raises:
        CheckpointError: if the directory's tensors are not those of the backbone plus ``stream_emb.weight``.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        attention: str,
        *,
        random: bool = False,
    ) -> None:
        self.layout, self.device = checkpoint.layout, device
        if random:
            model = _random_backbone(checkpoint.path, dtype, device, attention)
        else:
            check_weights(checkpoint.path, read_hf_config(checkpoint.path, "converted directory"), checkpoint.layout)
            model = _load_backbone(checkpoint.path, dtype, attention).to(device)
        model.eval().requires_grad_(False)
        self.config, self._backbone = model.config, model.get_decoder()
        # Named past_key_values in older versions of transformers, a name that newer ones warn of and will drop.
        forward = inspect.signature(self._backbone.forward).parameters
        self._cache_name = "cache" if "cache" in forward else "past_key_values"
        self._embedding = model.get_input_embeddings().weight
        self._head = model.get_output_embeddings().weight
        if random:
            self._stream_embedding = torch.zeros(
                self.layout.num_streams, self._head.shape[1], dtype=dtype, device=device
            )
        else:
            self._stream_embedding = _read_tensor(checkpoint.path, "stream_emb.weight").to(device, dtype)
        ids = self.layout.auxiliary_candidates()
        width = max(map(len, ids), default=0)
        rows = [[*row, *[self.layout.pad] * (width - len(row))] for row in ids]
        self.candidates = torch.tensor(rows, dtype=torch.int64, device=device).reshape(len(ids), width)
        sizes = torch.tensor([len(row) for row in ids], dtype=torch.int64, device=device)
        self.filled = torch.arange(width, device=device) >= sizes[:, None]
        self._auxiliary_heads = self._head[self.candidates]

    def embed(self, rows: np.ndarray) -> torch.Tensor:
        """Sum over the streams: [n, S] ids to [n, H]."""
        ids = torch.as_tensor(np.asarray(rows, dtype=np.int64), device=self.device)
        vectors = self._embedding[ids]
        if not self.layout.pad_embedded:
            vectors[:, 1:][ids[:, 1:] == self.layout.pad] = 0
        return vectors.sum(1)

    def forward(self, vectors: torch.Tensor, cache: object) -> torch.Tensor:
        """Runs [n, H] behind what ``cache`` holds: hidden states after the final norm, [n, H]."""
        output = self._backbone(inputs_embeds=vectors[None], use_cache=True, **{self._cache_name: cache})
        return output.last_hidden_state[0]

    def logits(self, hidden: torch.Tensor) -> Logits:
        """All streams' logits from one hidden state [H]: ``lm_head(hidden + stream_emb[s])``."""
        own = self._stream_embedding
        primary = hidden + own[0] if self.layout.primary_stream_embedded else hidden
        auxiliary = torch.einsum("sh,swh->sw", hidden + own[1:], self._auxiliary_heads)
        return Logits(linear(primary, self._head).float(), auxiliary.float())


def _load_backbone(path: Path, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    try:
        with _quiet():  # it would report stream_emb.weight; what it found is checked here
            model, info = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                attn_implementation=attention,
                output_loading_info=True,
                local_files_only=True,
                trust_remote_code=False,  # unsaid, it would ask on standard input
            )
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - a damaged file makes transformers raise anything
        raise CheckpointError(
            f"{path}: the language model cannot be loaded ({type(error).__name__}: {error}); espnet2-vllm check says what is "
            "damaged; or convert the checkpoint again"
        ) from error
    problems = {
        "missing": set(info["missing_keys"]),
        "unexpected": set(info["unexpected_keys"]) - {"stream_emb.weight"},
        "of another shape": {str(key) for key in info["mismatched_keys"]},
    }
    for what, names in problems.items():
        if names:
            raise CheckpointError(
                f"{path}: tensors {what}: {', '.join(sorted(names)[:5])}; convert the checkpoint again"
            )
    return model


def _random_backbone(path: Path, dtype: torch.dtype, device: torch.device, attention: str) -> PreTrainedModel:
    """Made on the device itself, since a large model takes long to initialise on a CPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _read_tensor(directory: Path, name: str) -> torch.Tensor:
    """One tensor of a directory of safetensors files, by name."""
    from safetensors import safe_open

    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118 - a safetensors handle has no other membership test
                return tensors.get_tensor(name)
    raise CheckpointError(f"{directory}: no safetensors file holds {name}; convert the checkpoint again")
