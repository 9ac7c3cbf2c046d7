"""Noise, choice, and the channel that carries ids."""

import random

import numpy as np
import pytest
import torch

from espnet2_vllm.engine import channel
from espnet2_vllm.engine.noise import gumbel, row_key, uniform
from espnet2_vllm.engine.sampling import choose

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
