"""The samplers of both backends against ESPnet's own ``_logits_to_token``: one distribution for the same masked logits."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import REPO
from sampling_cases import Distribution, check, p_value, sampler_p_values
from test_sampling_backends import SAMPLERS

from espnet2_vllm.backends import pytorch
from espnet2_vllm.protocol import Sampling

SEED = 11
STREAMS, VOCABULARY = 3, 120
SETTINGS = [(0.6, 20), (0.8, 5), (1.3, 50), (0.3, 119), (2.0, 2), (1.0, 20)]


def masked_logits(rng, guidance):
    """[S, V]: two ends and text in stream 0, codes in the others; those of guidance are masked once more behind the merging."""
    logits, other = (rng.normal(scale=3, size=(STREAMS, VOCABULARY)) for _ in range(2))
    allowed = np.zeros((STREAMS, VOCABULARY), bool)
    allowed[0, [2, 3]] = allowed[0, 10:60] = True
    for stream in range(1, STREAMS):
        allowed[stream, 60 + 30 * (stream - 1) : 60 + 30 * stream] = True
    merged = logits * guidance + other * (1 - guidance)
    return np.where(allowed, merged, -np.inf).astype(np.float32)


@pytest.fixture(scope="module")
def espnets(tmp_path_factory):
    """(distributions, ESPnet's draws by their names). ESPnet runs in a process of its own."""
    folder, rng, cases = tmp_path_factory.mktemp("sampling"), np.random.default_rng(SEED), {}
    for number, settings in enumerate(SETTINGS):
        cases[f"{number}.logits"] = masked_logits(rng, 3 if number % 2 else 1)
        cases[f"{number}.settings"] = np.array(settings)
    np.savez(folder / "cases.npz", **cases)
    backbone = REPO / "tests" / "golden" / "bagpiper" / "qwen3-s8-cb64" / "backbone"
    words = [sys.executable, REPO / "tests" / "backends" / "espnet_distributions.py", backbone]
    command = list(map(str, [*words, folder / "cases.npz", folder / "out.npz"]))
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    found, drawn = [], {}
    with np.load(folder / "out.npz") as out:
        for number, settings in enumerate(SETTINGS):
            for stream, logits in enumerate(cases[f"{number}.logits"]):
                allowed, name = np.flatnonzero(np.isfinite(logits)), f"case {number} stream {stream}"
                law = out[f"{number}.ids"][stream], out[f"{number}.probs"][stream]
                found.append(Distribution(name, stream, logits[allowed], allowed, Sampling(*settings), *law))
                drawn[name] = out[f"{number}.drawn"][:, stream]
    return found, drawn


@pytest.mark.parametrize("name", SAMPLERS)
def test_our_draws_follow_espnets_distributions(name, espnets):
    check(sampler_p_values(SAMPLERS[name], espnets[0]), tests=len(SAMPLERS) * len(espnets[0]))


def test_our_probabilities_are_espnets_and_its_draws_follow_them(espnets):
    distributions, drawn = espnets
    values = {}
    for d in distributions:
        seeds = torch.arange(4000)
        logits, ids = torch.as_tensor(d.logits), torch.as_tensor(d.ids)
        chosen, logprobs = pytorch.choose(logits, ids, d.sampling, seeds, seeds * 0 + 7, d.stream)
        theirs = dict(zip(d.expected_ids.tolist(), d.probabilities.tolist(), strict=True))
        ours = dict(zip(chosen.tolist(), logprobs.exp().tolist(), strict=True))
        assert all(abs(theirs[i] - p) < 1e-5 for i, p in ours.items()), d.name
        # Ids that never came have what is left.
        rest = [i for i, p in theirs.items() if p > 0 and i not in ours]
        assert abs(1 - sum(ours.values()) - sum(theirs[i] for i in rest)) < 1e-4, d.name
        values[d.name] = p_value(drawn[d.name], d.expected_ids, d.probabilities)
    check(values, tests=len(values))
