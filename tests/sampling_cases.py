"""Recorded sampling distributions, and the chi-square by which a sampler is held against them.

A sampler under test is a function ``draw(logits, ids, sampling, seeds, positions, stream)``: logits [k] float32 and ids [k]
int64 of the allowed ids, seeds and positions [n] int64 -> n drawn ids. An engine under test is anything with ``submit`` and
``step``.
"""

import json
import random
from dataclasses import dataclass

import numpy as np
import torch
from conftest import golden_files, golden_models
from golden_layouts import opuslm_layout
from scipy.stats import chisquare

from espnet2_vllm.decoding import load_decoding
from espnet2_vllm.drive import bagpiper_rules
from espnet2_vllm.plan import RowRequest
from espnet2_vllm.protocol import OpusLMRules, Sampling

SEED = 20260731
DRAWS = 20_000
ERROR = 1e-3  # chance that a right sampler fails any test of the whole set


@dataclass(frozen=True)
class Distribution:
    """What one stream's draw was made from, and the probabilities that ESPnet gave to the draw."""

    name: str
    stream: int
    logits: np.ndarray
    ids: np.ndarray
    sampling: Sampling
    expected_ids: np.ndarray
    probabilities: np.ndarray


# -- what was recorded -------------------------------------------------------------------------------------------------
def recorded_distributions() -> list[Distribution]:
    """Of both families, without those where one id has all the probability."""
    found = [*_opuslm_distributions(), *_bagpiper_distributions()]
    return [d for d in found if (d.probabilities > 0).sum() > 1]


def _opuslm_distributions():
    for settings in golden_files("opuslm/functions/logits_to_tokens.json"):
        arrays = np.load(settings.with_suffix(".npz"))
        for case in json.loads(settings.read_text(encoding="utf-8")):
            if case["search_algo"] != "topk_sampling":
                continue
            name = f"case{case['case']}"
            sampling = Sampling(case["temperature"], case["topk"])
            for batch, logits in enumerate(arrays[f"{name}.logits"][:, 0]):
                for stream, ids in enumerate(opuslm_allowed(case)):
                    top, probabilities = (arrays[f"{name}.{a}"][batch, 0, stream] for a in ("topk_ids", "topk_probs"))
                    label = f"opuslm {name} batch {batch} stream {stream}"
                    yield Distribution(label, stream, logits[stream, ids], ids, sampling, top, probabilities)


def opuslm_allowed(case: dict) -> list[np.ndarray]:
    """Allowed ids per stream of a case of ``logits_to_tokens``."""
    model, modality = case["mask"].split(".")
    (path,) = [path for path in golden_models("opuslm") if path.name == model]
    layout, modality = opuslm_layout(path), "audio" if modality == "codec_ssl" else "text"
    spans = layout.primary_spans(modality)
    primary = [*(layout.end_tokens if case["allow_eos"] else ()), *(i for span in spans for i in range(*span))]
    others = layout.auxiliary_candidates() if modality == "audio" else [[layout.pad]] * (layout.num_streams - 1)
    return [np.array(ids) for ids in (primary, *others)]


def _bagpiper_distributions():
    for path in golden_files("bagpiper/*/cases/sampling_*.json"):
        case, arrays = json.loads(path.read_text(encoding="utf-8")), np.load(path.with_suffix(".npz"))
        block = case["inference_config"][case["modality"]]
        sampling = Sampling(block["temperature"], block["topk"])
        for stream, (ids, logits, probabilities) in enumerate(
            zip(*(arrays[a] for a in ("topk_ids", "topk_logits", "probs")), strict=True)
        ):
            top = ids
            if stream == 0:  # of the others only the best were kept
                ids, logits = np.arange(len(arrays["final_logits_s0"])), arrays["final_logits_s0"]
            allowed = np.isfinite(logits)
            label = f"{case['model']} {case['name']} stream {stream}"
            yield Distribution(label, stream, logits[allowed], ids[allowed], sampling, top, probabilities)


# -- judging -----------------------------------------------------------------------------------------------------------
def p_value(drawn: np.ndarray, ids: np.ndarray, probabilities: np.ndarray) -> float:
    """Chi-square of drawn ids against a distribution; cells that expect fewer than 5 are one. An impossible id gives 0."""
    kept = probabilities > 0
    ids, expected = ids[kept], probabilities[kept].astype(np.float64)
    expected *= len(drawn) / expected.sum()
    counts = np.bincount(drawn, minlength=ids.max() + 1)[ids]
    if counts.sum() != len(drawn):
        return 0.0
    small = expected < 5
    if small.sum() > 1:
        counts = np.append(counts[~small], counts[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    return float(chisquare(counts, expected).pvalue) if len(counts) > 1 else 1.0


def sampler_p_values(draw, distributions: list[Distribution], draws: int = DRAWS) -> dict[str, float]:
    """By name of distribution. Seeds and positions both vary."""
    seeds = SEED + torch.arange(draws) // 500
    positions = torch.arange(draws) % 500
    result = {}
    for d in distributions:
        ids = torch.as_tensor(d.ids, dtype=torch.int64)
        drawn = draw(torch.as_tensor(d.logits), ids, d.sampling, seeds, positions, d.stream)
        result[d.name] = p_value(drawn.numpy(), d.expected_ids, d.probabilities)
    return result


def check(p_values: dict[str, float], tests: int) -> None:
    """Bonferroni over ``tests`` tests."""
    assert p_values, "no recorded distribution"
    name, worst = min(p_values.items(), key=lambda item: item[1])
    assert worst >= ERROR / tests, f"{name}: chi-square p {worst:.2e} with seed {SEED}, {len(p_values)} distributions"


# -- through a whole engine --------------------------------------------------------------------------------------------
def engine_p_values(engine, requests: list[RowRequest], row: int, expected: list) -> dict[str, float]:
    """Runs ``requests`` and judges what stands at ``row`` of each result, stream by stream.

    Args:
        expected: per stream (ids, probabilities), or None where nothing is drawn.
    """
    for request in requests:
        engine.submit(request)
    results = []
    while engine.unfinished:
        results += [outcome for _, outcome in engine.step()]
    drawn = np.array([result.rows[row] for result in results])
    return {
        f"stream {s}": p_value(drawn[:, s], *distribution)
        for s, distribution in enumerate(expected)
        if distribution is not None
    }


def bagpiper_requests(layout, path, draws: int):
    """Requests of one content row for a recorded ``sampling_*`` case, the row's index, and its distributions."""
    case, arrays = json.loads(path.read_text(encoding="utf-8")), np.load(path.with_suffix(".npz"))
    config = case["inference_config"]
    config = {**config, case["modality"]: {**config[case["modality"]], "max_step": 1}}
    rules = bagpiper_rules(layout, load_decoding(config, "bagpiper"))
    assistant = np.zeros((1, layout.num_streams), dtype=np.int32)
    assistant[0, 0] = layout.specials["assistant"]
    prompt = np.concatenate([arrays["prefill_ids"].astype(np.int32), assistant])
    expected = list(zip(arrays["topk_ids"], arrays["probs"], strict=True))
    return _requests(prompt, rules, draws), 1, expected


def opuslm_requests(layout, path, draws: int):
    """The same for the first row of a recorded ``*_nbest3_topk`` case, where stream 0 alone is drawn."""
    case, arrays = json.loads(path.read_text(encoding="utf-8")), np.load(path.with_suffix(".npz"))
    (index,) = [s["index"] for s in case["segments"] if not s["is_prefill"]]
    block = case["segments"][index]
    sampling, modality = Sampling(block["temperature"], block["topk"]), block["modality"]
    modality = "audio" if modality == "codec_ssl" else "text"
    rules = OpusLMRules(layout, modality, sampling, block["minlen"], layout.num_streams)
    allowed = np.array([i for span in layout.primary_spans(modality) for i in range(*span)])
    logits = arrays[f"seg{index}.logits_stream0"][0, 0].astype(np.float64)
    assert block["minlen"] > 0, "the end token would be allowed"
    best = allowed[np.argsort(-logits[allowed])][: sampling.topk]
    weights = np.exp((logits[best] - logits[best].max()) / sampling.temperature)
    expected = [(best, weights / weights.sum()), *[None] * (layout.num_streams - 1)]
    return _requests(arrays[f"seg{index}.prefill_delay"][0], rules, draws), 0, expected


def _requests(prompt, rules, draws: int) -> list[RowRequest]:
    seeds = random.Random(SEED)
    return [RowRequest(f"draw{i}", prompt, rules, seeds.getrandbits(63)) for i in range(draws)]
