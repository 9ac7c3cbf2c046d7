"""The samplers of both backends, called directly, against what ESPnet drew from."""

import json

import numpy as np
import pytest
import torch
from conftest import golden_files
from sampling_cases import DRAWS, ERROR, check, opuslm_allowed, recorded_distributions, sampler_p_values

from espnet2_vllm.backends import pytorch
from espnet2_vllm.engine import sampling as tensors
from espnet2_vllm.protocol import Sampling

FORBIDDEN = 7  # columns that a mask closes, behind the allowed ones


def plain(logits, ids, sampling, seeds, positions, stream):
    return pytorch.choose(logits, ids, sampling, seeds, positions, stream)[0]


def batched(logits, ids, sampling, seeds, positions, stream):
    """The tensor sampler, with masked columns as it has them, and a batch whose other rows have a larger top-k."""
    n = len(seeds)
    logits = torch.cat([logits, torch.full((FORBIDDEN,), -torch.inf)]).expand(n, -1)
    ids = torch.cat([ids, torch.arange(FORBIDDEN)])
    column, _ = tensors.choose(
        logits, ids[None], torch.full((n,), sampling.topk), torch.full((n,), sampling.temperature), sampling.topk + 3,
        seeds, positions, torch.full((n,), stream),
    )  # fmt: skip
    return ids[column]


SAMPLERS = {"plain": plain, "batched": batched}


@pytest.fixture(scope="module")
def distributions():
    found = recorded_distributions()
    assert {d.name.split()[0] for d in found} > {"opuslm"}, "both families"
    return found


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_follow_the_recorded_distributions(name, distributions):
    check(sampler_p_values(SAMPLERS[name], distributions), tests=len(SAMPLERS) * len(distributions))


@pytest.mark.parametrize("change", ["temperature", "topk", "noise reuse"])
def test_a_wrong_sampler_is_found_out(change, distributions):
    def wrong(logits, ids, sampling, seeds, positions, stream):
        if change == "temperature":
            sampling = Sampling(sampling.temperature * 1.1, sampling.topk)
        if change == "topk":
            sampling = Sampling(sampling.temperature, sampling.topk + 1)
        if change == "noise reuse":
            positions = positions // 100
        return plain(logits, ids, sampling, seeds, positions, stream)

    values = sampler_p_values(wrong, distributions[:20])
    assert min(values.values()) < ERROR / (len(SAMPLERS) * len(distributions)), values


def test_samplers_agree_draw_by_draw(distributions):
    seeds, positions = torch.arange(DRAWS) * 0x9E3779B97F4A7C15 & (1 << 62) - 1, torch.arange(DRAWS) % 2048
    for d in distributions[:: max(len(distributions) // 20, 1)]:
        ids = torch.as_tensor(d.ids, dtype=torch.int64)
        drawn = [
            draw(torch.as_tensor(d.logits), ids, d.sampling, seeds, positions, d.stream) for draw in SAMPLERS.values()
        ]
        assert torch.equal(*drawn), d.name


@pytest.mark.parametrize("name", SAMPLERS)
def test_one_best_is_espnets_choice(name):
    checked = 0
    for settings in golden_files("opuslm/functions/logits_to_tokens.json"):
        arrays = np.load(settings.with_suffix(".npz"))
        for case in json.loads(settings.read_text(encoding="utf-8")):
            if case["topk"] not in (None, 1):
                continue
            for batch, logits in enumerate(arrays[f"case{case['case']}.logits"][:, 0]):
                tokens = arrays[f"case{case['case']}.token"][batch, 0]
                for stream, ids in enumerate(opuslm_allowed(case)):
                    one = torch.zeros(1, dtype=torch.int64)
                    allowed = torch.as_tensor(logits[stream, ids]), torch.as_tensor(ids, dtype=torch.int64)
                    assert SAMPLERS[name](*allowed, Sampling(), one, one, stream) == tokens[stream], (case, stream)
                    checked += 1
    assert checked, "no greedy case was recorded"


def test_choose_ties_and_log_probabilities():
    ids = torch.tensor([40, 30, 20, 10])
    logits = torch.tensor([1.0, 3.0, 3.0, 2.0])
    chosen, logprob = pytorch.choose(logits, ids, Sampling(), 1, 2, 0)
    assert (int(chosen), float(logprob)) == (30, 0.0), "of equal logits the first"
    seeds = torch.arange(200)
    chosen, logprobs = pytorch.choose(logits, ids, Sampling(0.5, 3), seeds, seeds * 0 + 9, 1)
    weights = {30: np.exp(6.0), 20: np.exp(6.0), 10: np.exp(4.0)}
    assert set(chosen.tolist()) <= set(weights)
    expected = [np.log(weights[i] / sum(weights.values())) for i in chosen.tolist()]
    assert np.allclose(logprobs, expected, atol=1e-6)
    single = [int(pytorch.choose(logits, ids, Sampling(0.5, 3), s, 9, 1)[0]) for s in range(200)]
    assert single == chosen.tolist(), "one draw at a time is the same as many"
    assert len({int(pytorch.choose(logits, ids, Sampling(1.0, 99), s, 0, 0)[0]) for s in range(200)}) == 4
