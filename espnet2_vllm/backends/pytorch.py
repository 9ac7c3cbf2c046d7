"""The plain backend: one request after the other, one row after the other, on a transformers backbone.

It is the oracle of the tests, the baseline of the benchmarks, and what a machine without vLLM can use; so it is written to be
read. Sources: ESPnet ``ARDelayLM.inference`` (OpusLM) and ``ParallelLLM.inference`` (Bagpiper).
"""

from __future__ import annotations

import contextlib
import inspect
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.nn.functional import linear

from ..engine.noise import gumbel
from ..errors import CheckpointError, ConfigError, SpeechLMError
from ..layout import Layout
from ..plan import RowRequest, RowResult
from ..protocol import Constraint, Sampling
from .base import Outcome, check_fits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..checkpoint import Checkpoint


def distribution(logits: torch.Tensor, ids: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids that may be drawn, best first, and their log-probabilities before normalisation.

    Args:
        logits: [k] float32 of the allowed ids only (that is the mask).
        ids: [k] int64, the vocabulary id of each.

    Returns:
        ids [n] and logit / temperature [n] of the n = min(topk, k) best.
    """
    best, where = logits.topk(min(sampling.topk, len(logits)))
    return ids[where], best / sampling.temperature


def choose(
    logits: torch.Tensor,
    ids: torch.Tensor,
    sampling: Sampling,
    seed: int | torch.Tensor,
    position: int | torch.Tensor,
    stream: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One id of one stream: mask, top-k, temperature, one draw with the noise of (seed, position, stream).

    Args:
        logits: [k] float32 of the allowed ids only.
        ids: [k] int64, the vocabulary id of each.
        seed, position: numbers, or int64 tensors of one shape for as many draws. ``position`` is the index of the row in its
            sequence, prompt included.

    Returns:
        Ids (int64) and their log-probabilities after mask, top-k and temperature (float32; 0 for an argmax), each of the shape
        of ``seed``. Of equal logits the argmax takes the first.
    """
    seed, position = (torch.as_tensor(value, device=ids.device) for value in (seed, position))
    if sampling.greedy:
        return ids[logits.argmax()].expand(seed.shape), logits.new_zeros(seed.shape)
    ids, scores = distribution(logits, ids, sampling)
    best = (scores + gumbel(seed, position, stream, ids)).argmax(-1)
    return ids[best], scores.log_softmax(-1)[best]


class Logits(NamedTuple):
    """Raw float32 logits of one row: stream 0 [V], then one vector per auxiliary stream over its candidates [W_s]."""

    primary: torch.Tensor
    auxiliary: list[torch.Tensor]

    def guided(self, other: Logits, scale: float) -> Logits:
        """ESPnet's guidance, on all streams: ``scale`` times these and 1 - ``scale`` times the unconditional ones."""

        def merge(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
            return scale * mine + (1 - scale) * theirs

        return Logits(
            merge(self.primary, other.primary),
            [merge(a, b) for a, b in zip(self.auxiliary, other.auxiliary, strict=True)],
        )

    def to_numpy(self) -> tuple[np.ndarray, np.ndarray]:
        """Stream 0 [V] and streams 1.. [S-1, W]; shorter streams are filled with -inf."""
        width = max((len(a) for a in self.auxiliary), default=0)
        auxiliary = np.full((len(self.auxiliary), width), -np.inf, dtype=np.float32)
        for s, values in enumerate(self.auxiliary):
            auxiliary[s, : len(values)] = values.cpu().numpy()
        return self.primary.cpu().numpy(), auxiliary


class Network:
    """The backbone with the embedding and the heads of all streams.

    Raises:
        CheckpointError: if the directory's tensors are not those of the backbone plus ``stream_emb.weight``.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, attention: str) -> None:
        self.layout, self.device = checkpoint.layout, device
        model = _load_backbone(checkpoint.path, dtype, attention).to(device).eval()
        self.config, self._backbone = model.config, model.get_decoder()
        # transformers below 5.24 calls it past_key_values, later ones drop that name.
        forward = inspect.signature(self._backbone.forward).parameters
        self._cache_name = "cache" if "cache" in forward else "past_key_values"
        self._embedding = model.get_input_embeddings().weight
        self._head = model.get_output_embeddings().weight
        self._stream_embedding = _read_tensor(checkpoint.path, "stream_emb.weight").to(device, dtype)
        self._check_shapes(checkpoint.path)
        self.candidates = [torch.tensor(ids, device=device) for ids in self.layout.auxiliary_candidates()]
        self._auxiliary_heads = [self._head[ids] for ids in self.candidates]

    def _check_shapes(self, path: Path) -> None:
        rows, hidden = self._embedding.shape
        expected = {
            "lm_head.weight": (self._head.shape, (rows, hidden)),
            "stream_emb.weight": (self._stream_embedding.shape, (self.layout.num_streams, hidden)),
            "model.embed_tokens.weight": (self._embedding.shape, (self.layout.vocab_size, hidden)),
        }
        for name, (found, wanted) in expected.items():
            if tuple(found) != wanted:
                raise CheckpointError(f"{path}: {name} has shape {tuple(found)}, expected {wanted}; convert it again")

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
        auxiliary = [linear(hidden + own[s], head).float() for s, head in enumerate(self._auxiliary_heads, 1)]
        return Logits(linear(primary, self._head).float(), auxiliary)


class Branch:
    """One sequence: its keys and values, and how many rows they hold."""

    def __init__(self, network: Network) -> None:
        from transformers import DynamicCache

        self._network, self._cache, self.length = network, DynamicCache(config=network.config), 0

    def feed(self, rows: np.ndarray) -> torch.Tensor:
        """Feeds [n, S] ids; the hidden states of these rows, [n, H]."""
        self.length += len(rows)
        return self._network.forward(self._network.embed(rows), self._cache)


class PyTorchEngine:
    """``Engine`` that runs a whole request at each ``step``, in the order of submission.

    Args:
        checkpoint: an opened converted directory.
        dtype: of weights and activations; logits are float32 always.
        device: torch's name; None takes ``cuda`` where there is one.
        keep_logits: give ``RowResult.logits``; a guided row has the companion's two arrays behind its own two.
        max_rows: a context shorter than the checkpoint's.
        attention: transformers' ``attn_implementation`` (``sdpa`` or ``eager``).

    Raises:
        CheckpointError: if the directory's tensors do not fit.
        ConfigError: if ``max_rows`` is not within the checkpoint's context, or the device does not exist.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: str = "float32",
        device: str | None = None,
        keep_logits: bool = False,
        max_rows: int | None = None,
        attention: str = "sdpa",
    ) -> None:
        self.layout: Layout = checkpoint.layout
        self.max_rows = _context(checkpoint, max_rows)
        self._network = Network(checkpoint, getattr(torch, dtype), _device(device), attention)
        self._keep_logits = keep_logits
        self._waiting: deque[RowRequest] = deque()

    @property
    def unfinished(self) -> int:
        return len(self._waiting)

    def submit(self, request: RowRequest) -> None:
        check_fits(request, self.max_rows)
        self._waiting.append(request)

    def step(self) -> list[tuple[str, Outcome]]:
        if not self._waiting:
            return []
        request = self._waiting.popleft()
        try:
            return [(request.request_id, self._run(request))]
        except SpeechLMError as error:
            return [(request.request_id, error)]

    def abort(self, ids: Iterable[str]) -> None:
        gone = set(ids)
        self._waiting = deque(request for request in self._waiting if request.request_id not in gone)

    def close(self) -> None:
        self._waiting.clear()
        del self._network

    @torch.inference_mode()
    def _run(self, request: RowRequest) -> RowResult:
        return self._generate(request) if request.reference is None else self._follow(request)

    def _generate(self, request: RowRequest) -> RowResult:
        rules, state = request.rules, request.rules.start()
        main, companion = Branch(self._network), None
        record = _Record(self._keep_logits)
        rows, position, finish = request.prompt, len(request.prompt), "stop"
        while True:
            constraint = rules.constraint(state)
            if constraint.guidance == 1:
                companion = None
            elif companion is None:
                # ESPnet's unconditional branch: as many rows of pads as went before the segment; ``rows`` is its modality row.
                companion = Branch(self._network)
                companion.feed(np.full((main.length, self.layout.num_streams), self.layout.pad))
            logits = self._network.logits(main.feed(rows)[-1])
            other = None if companion is None else self._network.logits(companion.feed(rows)[-1])
            merged = logits if other is None else logits.guided(other, constraint.guidance)
            chosen, logprobs = self._choose(merged, constraint, request.seed, position)
            state, step = rules.advance(state, chosen)
            record.add(step.emitted, logprobs, step.forced, logits, other)
            position += 1
            if step.done or position == self.max_rows:
                finish = "stop" if step.done else "length"
                return record.result(finish)
            rows = np.array([step.fed])

    def _follow(self, request: RowRequest) -> RowResult:
        """Teacher forcing: one pass, then the masked argmax of each row under the history of the reference."""
        branch, record = Branch(self._network), _Record(self._keep_logits)
        hidden = branch.feed(np.concatenate([request.prompt, request.reference[:-1]]))
        constraint = request.rules.constraint(request.rules.start())
        for row in range(len(request.reference)):
            position = len(request.prompt) + row
            logits = self._network.logits(hidden[position - 1])
            chosen, logprobs = self._choose(logits, constraint, request.seed, position)
            imposed = (False, *(not constraint.audio,) * (self.layout.num_streams - 1))
            record.add(chosen, logprobs, imposed, logits, None)
        return record.result("stop")

    def _choose(
        self, logits: Logits, constraint: Constraint, seed: int, position: int
    ) -> tuple[tuple[int, ...], list[float]]:
        """A row of S ids, and the log-probability of each (0 where there is no choice)."""
        pads = self.layout.num_streams - 1
        if constraint.forced is not None:
            return (constraint.forced, *(self.layout.pad,) * pads), [0.0] * (pads + 1)
        allowed = torch.cat([torch.arange(*span, device=logits.primary.device) for span in constraint.primary])
        picks = [choose(logits.primary[allowed], allowed, constraint.sampling, seed, position, 0)]
        if constraint.audio:
            for s, ids in enumerate(self._network.candidates, 1):
                picks.append(choose(logits.auxiliary[s - 1], ids, constraint.sampling, seed, position, s))
        ids, logprobs = (torch.stack(column).tolist() for column in zip(*picks, strict=True))
        missing = pads + 1 - len(picks)
        return (*ids, *(self.layout.pad,) * missing), [*logprobs, *[0.0] * missing]


class _Record:
    """Rows of a request as they come."""

    def __init__(self, keep_logits: bool) -> None:
        self._rows, self._logprobs, self._forced = [], [], []
        self._logits: list | None = [] if keep_logits else None

    def add(self, row: tuple, logprobs: list[float], forced: tuple, logits: Logits, other: Logits | None) -> None:
        self._rows.append(row)
        self._forced.append(forced)
        self._logprobs.append(logprobs)
        if self._logits is not None:
            self._logits.append(logits.to_numpy() + (() if other is None else other.to_numpy()))

    def result(self, finish: str) -> RowResult:
        rows, forced = np.array(self._rows, dtype=np.int32), np.array(self._forced, dtype=bool)
        logprobs = np.where(forced, np.float32(0), np.array(self._logprobs, dtype=np.float32))
        return RowResult(rows, logprobs, forced, finish, None if self._logits is None else tuple(self._logits))


def _context(checkpoint: Checkpoint, max_rows: int | None) -> int:
    if max_rows is not None and not 2 <= max_rows <= checkpoint.max_rows:
        raise ConfigError(f"max_rows {max_rows}: expected 2 to {checkpoint.max_rows}, the context of {checkpoint.path}")
    return max_rows or checkpoint.max_rows


def _device(name: str | None) -> torch.device:
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is unknown; expected cpu, cuda or cuda:0 and so on") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name}: this machine has {torch.cuda.device_count()} CUDA devices; choose another or cpu"
        )
    return device


def _load_backbone(path: Path, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    with _quiet():  # it would report stream_emb.weight; what it found is checked here
        model, info = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=attention, output_loading_info=True, local_files_only=True
        )
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
