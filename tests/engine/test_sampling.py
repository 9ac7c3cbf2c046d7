"""Noise, choice, and the channel that carries ids."""

import random

import numpy as np
import pytest
import torch

from espnet2_vllm.backends import pytorch
from espnet2_vllm.engine import channel, sampling
from espnet2_vllm.engine.noise import gumbel, row_key, uniform
from espnet2_vllm.engine.sampling import choose
from espnet2_vllm.protocol import EVERY, Sampling

SEED = 20260102


def keys(n, seed=SEED):
    return torch.full((n,), seed, dtype=torch.int64), torch.arange(n)


def test_uniform_noise_is_uniform_and_independent_between_streams_positions_and_seeds():
    n = 60_000
    seed, position = keys(n)
    ids = torch.full((n, 1), 300)
    columns = [
        uniform(row_key(s, p).unsqueeze(1), torch.tensor([[stream]]), i).flatten().double()
        for s, p, stream, i in [
            (seed, position, 0, ids), (seed, position, 1, ids), (seed + 1, position, 0, ids), (seed, position + 1, 0, ids),
            (seed, position, 0, ids + 1), (seed + (1 << 40), position, 0, ids),
        ]
    ]  # fmt: skip
    for column in columns:
        assert column.min() > 0 and column.max() < 1
        counts = torch.histc(column, 50, 0, 1)
        assert ((counts - n / 50) ** 2 / (n / 50)).sum() < 110, "chi-square with 49 degrees of freedom, 1e-6"
    correlation = torch.corrcoef(torch.stack(columns)) - torch.eye(len(columns))
    # The neighbour in position is the same sequence shifted by one, so it is compared like any other column.
    assert correlation.abs().max() < 5 / np.sqrt(n)


def test_noise_depends_on_nothing_but_its_arguments():
    seed, position = keys(8)
    ids = torch.randint(0, 1000, (8, 5), generator=torch.Generator().manual_seed(SEED))
    whole = gumbel(seed, position, 3, ids)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(SEED))
    assert torch.equal(gumbel(seed[order], position[order], 3, ids[order]), whole[order])
    assert torch.isfinite(whole).all()


@pytest.mark.parametrize("topk, temperature", [(1, 1.0), (2, 0.7), (5, 1.3), (50, 1.0)])
def test_choice_follows_the_distribution(topk, temperature):
    n, width = 20_000, 12
    logits = torch.randn(width, generator=torch.Generator().manual_seed(SEED)) * 2
    logits[3] = -torch.inf
    best = logits.topk(min(topk, width))
    probabilities = torch.zeros(width).scatter(0, best.indices, torch.softmax(best.values / temperature, 0))
    seed, position = keys(n)
    column, logprob = choose(
        logits.expand(n, -1), torch.arange(width).unsqueeze(0) + 700, torch.full((n,), topk), torch.full((n,), temperature),
        max(topk, 3), seed, position, torch.zeros_like(seed),
    )  # fmt: skip
    counts = torch.bincount(column, minlength=width).double()
    support = probabilities > 0
    assert counts[~support].sum() == 0
    expected = probabilities[support].double() * n
    assert ((counts[support] - expected) ** 2 / expected).sum() < 45, "chi-square, at most 11 degrees of freedom, 1e-5"
    assert torch.allclose(logprob, probabilities[column].log(), atol=1e-5)


def nucleus(logits: np.ndarray, how: Sampling) -> np.ndarray:
    """Ids that ESPnet's ``topp_sampling`` draws from, by its definition; behind a top-k, where there is one."""
    order = np.argsort(-logits, kind="stable")[: min(how.topk, len(logits))]
    weights = np.exp((logits[order] - logits[order[0]]) / how.temperature)
    share = (weights / weights.sum()).cumsum()
    kept = order[share <= how.top_p] if how.top_p < 1 else order
    return kept if len(kept) else order[:1]


def mixed_rows(rng, n, width):
    """Logits of ``n`` rows and how each is drawn: with a top-k, a top-p, both, neither, or the best."""
    generator = torch.Generator().manual_seed(rng.getrandbits(31))
    logits = (
        torch.randn(n, width, generator=generator)
        * torch.tensor([rng.choice([0.1, 1.0, 5.0]) for _ in range(n)])[:, None]
    )
    logits[torch.rand(n, width, generator=generator) < 0.2] = -torch.inf
    logits[:, rng.randrange(width)] = 0.5
    how = [
        Sampling(rng.choice([0.5, 1.0, 1.5]), rng.choice([1, 3, 20, EVERY]), rng.choice([0.0, 0.3, 0.8, 0.99, 1.0]))
        for _ in range(n)
    ]
    return logits, how


def batched(logits, ids, how, seed, position, stream):
    columns = [torch.tensor([getattr(one, name) for one in how]) for name in ("topk", "temperature", "top_p")]
    topk, temperature, top_p = columns
    return choose(logits, ids, topk, temperature, max(topk.tolist()), seed, position, stream, top_p)


@pytest.mark.parametrize("world", range(20))
def test_rows_cut_by_top_p_are_chosen_as_one_by_one(world, monkeypatch):
    """Against the plain choice, each row by itself, over masked columns or without them; and in pieces."""
    rng = random.Random(SEED + world)
    n, width = rng.randint(1, 40), rng.randint(2, 60)
    logits, how = mixed_rows(rng, n, width)
    ids = torch.randperm(1000, generator=torch.Generator().manual_seed(world))[:width].unsqueeze(0)
    seed = torch.tensor([rng.getrandbits(62) for _ in range(n)])
    position, stream = torch.arange(n) * 3, torch.arange(n) % 9
    column, logprob = batched(logits, ids, how, seed, position, stream)
    for row, one in enumerate(how):
        allowed = torch.isfinite(logits[row])
        drawn = pytorch.choose(
            logits[row, allowed], ids[0, allowed], one, int(seed[row]), int(position[row]), int(stream[row])
        )
        assert int(drawn[0]) == int(ids[0, column[row]]), (world, row, one)
        assert float(drawn[1]) == pytest.approx(float(logprob[row]), abs=1e-5), (world, row, one)
        assert int(column[row]) in nucleus(logits[row].numpy().astype(np.float64), one), (world, row, one)
    monkeypatch.setattr(sampling, "MOST_RANKED", 3 * width)
    pieces = batched(logits, ids, how, seed, position, stream)
    assert torch.equal(pieces[0], column) and torch.equal(pieces[1], logprob)


@pytest.mark.parametrize("top_p", [0.0, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("topk", [5, EVERY])
def test_draws_cut_by_top_p_follow_the_distribution(top_p, topk):
    n, width, how = 20_000, 12, Sampling(0.9, topk, top_p)
    logits = torch.randn(width, generator=torch.Generator().manual_seed(SEED)) * 1.5
    kept = torch.from_numpy(nucleus(logits.numpy().astype(np.float64), how).copy())
    probabilities = torch.zeros(width).scatter(0, kept, torch.softmax(logits[kept] / how.temperature, 0))
    seed, position = keys(n)
    column, logprob = batched(
        logits.expand(n, -1), torch.arange(width).unsqueeze(0) + 700, [how] * n, seed, position, torch.zeros_like(seed)
    )
    counts, support = torch.bincount(column, minlength=width).double(), probabilities > 0
    assert counts[~support].sum() == 0 and int(support.sum()) == len(kept)
    expected = probabilities[support].double() * n
    assert ((counts[support] - expected) ** 2 / expected).sum() < 45, "chi-square, at most 11 degrees of freedom, 1e-5"
    assert torch.allclose(logprob, probabilities[column].log(), atol=1e-5)


def test_the_id_that_would_go_beyond_top_p_is_left_out():
    """ESPnet compares the sum up to and with an id; only the best stays whatever it has."""
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    ids = torch.tensor([7, 8, 9])
    drawn = {
        top_p: {int(pytorch.choose(logits, ids, Sampling(1.0, EVERY, top_p), s, 0, 0)[0]) for s in range(300)}
        for top_p in (0.1, 0.79, 0.81, 0.999, 1.0)
    }
    assert drawn == {0.1: {7}, 0.79: {7}, 0.81: {7, 8}, 0.999: {7, 8}, 1.0: {7, 8, 9}}


def test_channel_round_trip():
    rng = np.random.default_rng(SEED)
    for streams in range(1, channel.MAX_STREAMS + 1):
        ids = rng.integers(0, 1 << channel.ID_BITS, (7, streams))
        forced, empty = rng.random((7, streams)) < 0.3, rng.random(7) < 0.3
        phase = rng.integers(0, 5, 7)
        codes = channel.encode(ids, forced, empty, phase, np.array(channel.stream_codes(streams)))
        assert codes.max() < 2**31
        assert all(len(set(row)) == streams for row in codes.tolist())
        decoded = channel.decode(codes.astype(np.int32))
        assert np.array_equal(decoded.ids, ids) and np.array_equal(decoded.forced, forced)
        assert np.array_equal(decoded.fed_empty, empty)
        assert np.array_equal(channel.next_phases(codes), phase)
        fed = np.where(empty[:, None], 0, ids[:, 1:])
        assert np.array_equal(channel.fed_auxiliary(codes.astype(np.int32)), fed)


def test_choice_does_not_depend_on_the_batch():
    rng = random.Random(SEED)
    n = 32
    logits = torch.randn(n, 40, generator=torch.Generator().manual_seed(SEED))
    topk = torch.tensor([rng.choice([1, 3, 20]) for _ in range(n)])
    temperature = torch.tensor([rng.choice([0.5, 1.0, 1.5]) for _ in range(n)])
    seed = torch.tensor([rng.getrandbits(62) for _ in range(n)])
    position, stream = torch.arange(n) * 3, torch.arange(n) % 9
    ids = torch.arange(40).unsqueeze(0)
    whole, _ = choose(logits, ids, topk, temperature, 20, seed, position, stream)
    for i in range(n):
        one = slice(i, i + 1)
        alone, _ = choose(
            logits[one], ids, topk[one], temperature[one], int(topk[i]), seed[one], position[one], stream[one]
        )
        assert int(alone[0]) == int(whole[i])
