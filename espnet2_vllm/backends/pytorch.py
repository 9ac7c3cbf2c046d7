"""The plain backend: one request after the other, one row after the other, on a transformers backbone.

It is the oracle of the tests, the baseline of the benchmarks, and what a machine without vLLM can use; so it is written to be
read. Sources: ESPnet ``ARDelayLM.inference`` (OpusLM) and ``ParallelLLM.inference`` (Bagpiper).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..engine.noise import gumbel
from ..errors import ConfigError, SpeechLMError
from ..layout import Layout
from ..plan import Continuous, RowRequest, RowResult
from ..protocol import Constraint, Sampling
from .base import Outcome, check_fits
from .network import Logits, Network

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

ATTENTION = ("sdpa", "eager")
LOAD_FORMATS = ("auto", "dummy")


def distribution(logits: torch.Tensor, ids: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids that may be drawn, best first, and logit / temperature of each, -inf where top-p leaves it out.

    Args:
        logits: [..., k] float32, -inf where masked.
        ids: [..., k] int64, the vocabulary id of each column.

    Returns:
        Two tensors [..., n] of the n = min(topk, k) best.
    """
    best, columns = logits.topk(min(sampling.topk, logits.shape[-1]))
    scores = best / sampling.temperature
    if sampling.top_p < 1:
        share = scores.softmax(-1).double().cumsum(-1)
        left_out = share > torch.tensor(sampling.top_p, dtype=torch.float32)  # as the engine holds it
        left_out[..., 0] = False
        scores = scores.masked_fill(left_out, -torch.inf)
    return ids.expand_as(logits).gather(-1, columns), scores


def choose(
    logits: torch.Tensor,
    ids: torch.Tensor,
    sampling: Sampling,
    seed: int | torch.Tensor,
    position: int | torch.Tensor,
    stream: int | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One id a draw: mask, top-k, temperature, top-p, and the noise of (seed, position, stream).

    Args:
        logits: [..., k] float32, -inf where masked.
        ids: [..., k] int64, the vocabulary id of each column.
        seed, position, stream: numbers, or int64 tensors that broadcast with the leading dimensions of ``logits``. The position
            is the index of the row in its sequence, prompt included.

    Returns:
        Ids [...] int64 and their log-probabilities after mask, top-k, temperature and top-p [...] float32 (0 for an argmax). Of
        equal logits the argmax takes the first.
    """
    seed, position, stream = (torch.as_tensor(value, device=ids.device) for value in (seed, position, stream))
    shape = torch.broadcast_shapes(logits.shape[:-1], seed.shape, position.shape, stream.shape)
    if sampling.greedy:
        best = logits.argmax(-1, keepdim=True)
        return ids.expand_as(logits).gather(-1, best).squeeze(-1).expand(shape), logits.new_zeros(shape)
    ids, scores = distribution(logits, ids, sampling)
    best = (scores + gumbel(seed, position, stream, ids)).argmax(-1, keepdim=True)
    picked = (values.expand(*shape, -1).gather(-1, best).squeeze(-1) for values in (ids, scores.log_softmax(-1)))
    return tuple(picked)


# Rows as they are emitted, then the result.
_Rows = Generator[tuple[int, ...], None, RowResult]


class Branch:
    """One sequence: its keys and values, and how many rows they hold."""

    def __init__(self, network: Network) -> None:
        from transformers import DynamicCache

        self._network, self._cache, self.length = network, DynamicCache(config=network.config), 0

    def feed(self, rows: np.ndarray, continuous: Sequence[Continuous] = ()) -> torch.Tensor:
        """Feeds [n, S] ids, some of them replaced by continuous rows; the hidden states of these rows, [n, H]."""
        self.length += len(rows)
        vectors = self._network.embed(rows)
        for part in continuous:
            vectors[part.start : part.start + part.count] = part.vectors.to(vectors)
        return self._network.forward(vectors, self._cache)


class PyTorchEngine:
    """``Engine`` that runs a whole request at each ``step``, in the order of submission; of a streaming one, a row.

    Args:
        checkpoint: an opened converted directory.
        dtype: of weights and activations; logits are float32 always.
        device: torch's name; None takes ``cuda`` where there is one.
        keep_logits: give ``RowResult.logits``; a guided row has the companion's two arrays behind its own two.
        max_rows: a context shorter than the checkpoint's.
        attention: transformers' ``attn_implementation``, one of ``ATTENTION``.
        load_format: ``auto`` reads the directory's weights, ``dummy`` takes random ones (as vLLM calls it), for measurements.

    Raises:
        CheckpointError: if the directory's tensors do not fit.
        ConfigError: if ``max_rows`` is not within the checkpoint's context, or there is no such device, attention or load format.
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
        load_format: str = "auto",
    ) -> None:
        self.layout: Layout = checkpoint.layout
        self.max_rows = _context(checkpoint, max_rows)
        if attention not in ATTENTION:
            raise ConfigError(f"attention {attention!r} is unknown; expected one of {', '.join(ATTENTION)}")
        if load_format not in LOAD_FORMATS:
            raise ConfigError(f"load_format {load_format!r} is unknown; expected one of {', '.join(LOAD_FORMATS)}")
        random = load_format == "dummy"
        self._network = Network(checkpoint, getattr(torch, dtype), _device(device), attention, random=random)
        self._keep_logits = keep_logits
        self._waiting: deque[RowRequest] = deque()
        self._running: tuple[RowRequest, _Rows] | None = None
        self._fresh: list[tuple[str, np.ndarray]] = []

    @property
    def unfinished(self) -> int:
        return len(self._waiting) + (self._running is not None)

    def submit(self, request: RowRequest) -> None:
        check_fits(request, self.max_rows)
        self._waiting.append(request)

    @torch.inference_mode()
    def step(self) -> list[tuple[str, Outcome]]:
        if self._running is None:
            if not self._waiting:
                return []
            request = self._waiting.popleft()
            self._running = request, self._run(request)
        (request, rows), self._running = self._running, None
        try:
            while True:
                row = next(rows)
                if request.stream is not None:
                    self._fresh.append((request.request_id, np.array([row], dtype=np.int32)))
                    self._running = request, rows
                    return []
        except StopIteration as end:
            return [(request.request_id, end.value)]
        except SpeechLMError as error:
            return [(request.request_id, error)]

    def take_rows(self) -> list[tuple[str, np.ndarray]]:
        fresh, self._fresh = self._fresh, []
        return fresh

    def abort(self, ids: Iterable[str]) -> None:
        gone = set(ids)
        self._waiting = deque(request for request in self._waiting if request.request_id not in gone)
        if self._running is not None and self._running[0].request_id in gone:
            self._running = None
        self._fresh = [(request_id, rows) for request_id, rows in self._fresh if request_id not in gone]

    def close(self) -> None:
        self._waiting.clear()
        self._running = None
        del self._network

    def _run(self, request: RowRequest) -> _Rows:
        if request.reference is None:
            return (yield from self._generate(request))
        return self._follow(request)

    def _generate(self, request: RowRequest) -> _Rows:
        rules, state = request.rules, request.rules.start()
        main, companion = Branch(self._network), None
        record = _Record(self._keep_logits)
        rows, position, continuous = request.prompt, len(request.prompt), request.continuous
        while True:
            constraint = rules.constraint(state)
            if constraint.guidance == 1:
                companion = None
            elif companion is None:
                # ESPnet's unconditional branch: as many rows of pads as went before the segment; ``rows`` is its modality row.
                companion = Branch(self._network)
                companion.feed(np.full((main.length, self.layout.num_streams), self.layout.pad))
            logits = self._network.logits(main.feed(rows, continuous)[-1])
            other = None if companion is None else self._network.logits(companion.feed(rows)[-1])
            merged = logits if other is None else logits.guided(other, constraint.guidance)
            chosen, logprobs = self._choose(merged, constraint, request.seed, position)
            state, step = rules.advance(state, chosen)
            record.add(step.emitted, logprobs, step.forced, logits, other)
            yield step.emitted
            position += 1
            if step.done or position == self.max_rows:
                return record.result("stop" if step.done else "length")
            rows, continuous = np.array([step.fed]), ()

    def _follow(self, request: RowRequest) -> RowResult:
        """Teacher forcing: one pass, then the masked argmax of each row under the history of the reference."""
        branch, record = Branch(self._network), _Record(self._keep_logits)
        hidden = branch.feed(np.concatenate([request.prompt, request.reference[:-1]]), request.continuous)
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
        draws = [choose(logits.primary[allowed][None], allowed, constraint.sampling, seed, position, 0)]
        if constraint.audio:
            masked = logits.auxiliary.masked_fill(self._network.filled, -torch.inf)
            streams = torch.arange(1, pads + 1, device=masked.device)
            draws.append(choose(masked, self._network.candidates, constraint.sampling, seed, position, streams))
        ids, logprobs = (torch.cat(column).tolist() for column in zip(*draws, strict=True))
        missing = pads + 1 - len(ids)
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
    if max_rows is not None and not (isinstance(max_rows, int) and 2 <= max_rows <= checkpoint.max_rows):
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
