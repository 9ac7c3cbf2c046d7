"""What must come out: rows by the pytorch backend, and how clear each choice was.

Two backends may add up the same numbers in another order, so a request is used only if none of its choices was closer than
``MARGIN``; then every id must be equal whatever the load.
"""

from collections.abc import Callable

import numpy as np
import torch

from espnet2_vllm.backends.pytorch import PyTorchEngine
from espnet2_vllm.engine.noise import gumbel
from espnet2_vllm.plan import RowRequest, RowResult
from espnet2_vllm.protocol import PHASES, Sampling, replay

MARGIN = 1e-3
LOGPROB_TOLERANCE = 5e-4  # logits of some of the models reach 70: the last bits of float32, over temperature 0.5


class CloseError(Exception):
    """Every request that was drawn has a close choice."""


def _gap(values: np.ndarray, ids: np.ndarray, how: Sampling, margin: float, noise: Callable) -> float:
    """By how much the chosen id won, in units of logit / temperature."""
    order = np.argsort(-values, kind="stable")
    values, ids = values[order], ids[order]
    if how.greedy:
        return float(values[0] - values[1]) if len(values) > 1 else np.inf
    count = min(how.topk, len(values))
    share = _shares(values[:count], how)
    if how.top_p < 1:
        count = max(int((share <= how.top_p).sum()), 1)
    near = values >= values[count - 1] - margin  # whoever might be among the best elsewhere
    near[: len(share)] |= share <= how.top_p + margin
    scores = values[near] / how.temperature + noise(ids[near])
    winner = int(scores[:count].argmax())
    others = np.delete(scores, winner)
    gap = float(scores[winner] - others.max()) if len(others) else np.inf
    if how.top_p < 1 and winner:  # it might be left out elsewhere
        gap = min(gap, float(how.top_p - share[winner]))
    return gap if count == len(values) else min(gap, float(values[winner] - values[count]))


def _shares(values: np.ndarray, how: Sampling) -> np.ndarray:
    """Probability of each of the best and of all before it; nothing where no top-p asks for it."""
    if how.top_p == 1:
        return np.zeros(0)
    weights = np.exp((values.astype(np.float64) - values[0]) / how.temperature)
    return (weights / weights.sum()).cumsum()


def _merged(logits: tuple, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Stream 0 and auxiliary logits that a row was chosen from."""
    if len(logits) == 2:
        return logits
    with np.errstate(invalid="ignore"):  # -inf in both where nothing may be chosen
        return tuple(
            np.where(np.isinf(main), main, scale * main + (1 - scale) * other)
            for main, other in zip(logits[:2], logits[2:], strict=True)
        )


def smallest_gap(request: RowRequest, result: RowResult) -> float:
    """Of all choices of a result that has its logits; guided ones in units of the error that merging makes of each member's."""
    layout, state, gaps = request.rules.layout, request.rules.start(), [np.inf]
    auxiliary_ids = [np.array(ids) for ids in layout.auxiliary_candidates()]
    for index, (row, forced) in enumerate(zip(result.rows, result.forced, strict=True)):
        constraint, position = request.rules.constraint(state), len(request.prompt) + index
        units = 2 * constraint.guidance - 1
        primary, auxiliary = _merged(result.logits[index], constraint.guidance)
        key = torch.tensor([request.seed]), torch.tensor([position])

        def gap(values, ids, stream, how=constraint.sampling, key=key, units=units):
            noise = lambda some: gumbel(*key, stream, torch.as_tensor(some)[None]).numpy()[0]  # noqa: E731
            return _gap(values, ids, how, MARGIN * units, noise) / units

        if not forced[0]:
            ids = np.concatenate([np.arange(*span) for span in constraint.primary])
            gaps.append(gap(primary[ids], ids, 0))
        for stream, ids in enumerate(auxiliary_ids, 1):
            if not forced[stream]:
                gaps.append(gap(auxiliary[stream - 1, : len(ids)], ids, stream))
        if request.reference is None:
            state, _ = request.rules.advance(state, tuple(row.tolist()))
    return min(gaps)


class Oracle:
    """The pytorch backend on a model, and requests all of whose choices are clear.

    Attributes:
        expected: results of every request made, by id; with raw logits.
    """

    def __init__(self, checkpoint, context: int) -> None:
        # Models so small are many times slower with more threads than idle cores. vLLM takes this function away as it starts.
        torch.set_num_threads(1)
        self.layout = checkpoint.layout
        self._engine = PyTorchEngine(checkpoint, device="cpu", max_rows=context, keep_logits=True)
        # vLLM, once it has served an OLMo-2, looks for this on every such model of transformers in the process.
        self._engine._network._backbone.do_not_compile = True
        self.hidden: int = self._engine._network._backbone.config.hidden_size
        self.expected: dict[str, RowResult] = {}

    def decode(self, request: RowRequest) -> RowResult:
        self._engine.submit(request)
        ((_, result),) = self._engine.step()
        return result

    def clear(self, make: Callable[[], RowRequest], tries: int = 50) -> RowRequest:
        """The first of the requests that ``make`` gives whose choices are clear.

        Raises:
            CloseError: there was none in ``tries``.
        """
        for _ in range(tries):
            request = make()
            result = self.decode(request)
            if smallest_gap(request, result) > MARGIN:
                self.expected[request.request_id] = result
                return request
        raise CloseError(f"{tries} requests in a row have a close choice: the margin asked for is too large")


def assert_same(found: object, expected: RowResult, what: str, tolerance: float = LOGPROB_TOLERANCE) -> None:
    """Every id of every stream, what was forced, why it ended; log-probabilities, which are 0 where an id was forced."""
    assert isinstance(found, RowResult), f"{what}: {found!r}"
    common = min(len(found.rows), len(expected.rows))
    differing = np.flatnonzero((found.rows[:common] != expected.rows[:common]).any(axis=1))
    where = f"{what}: {len(found.rows)} rows, expected {len(expected.rows)}"
    assert not len(differing), (
        f"{where}; row {differing[0]}: {found.rows[differing[0]]}, not {expected.rows[differing[0]]}"
    )
    assert found.rows.shape == expected.rows.shape, where
    assert found.finish == expected.finish, f"{what}: ended by {found.finish}, expected {expected.finish}"
    assert np.array_equal(found.forced, expected.forced), what
    assert not found.logprobs[found.forced].any(), what
    worst = np.abs(found.logprobs - expected.logprobs).max(initial=0.0)
    assert worst <= tolerance, f"{what}: log-probabilities differ by {worst:.3g}"


def fed_rows(request: RowRequest, result: RowResult) -> np.ndarray:
    """[N, S] generated rows as the model saw them."""
    _, steps = replay(request.rules, map(tuple, result.rows.tolist()))
    return np.array([step.fed for step in steps], dtype=np.int32)


def phase_before(request: RowRequest, expected: RowResult, row: int) -> str:
    """What the request is about to do when ``row`` of its rows are there."""
    state, _ = replay(request.rules, map(tuple, expected.rows[:row].tolist()))
    if request.rules.layout.family == "bagpiper":
        return PHASES[state.phase]
    return "drain" if state.finish >= 0 else request.rules.modality
