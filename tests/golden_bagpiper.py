"""Replay of recorded Bagpiper cases (format: README of the recordings, "Cases")."""

import numpy as np
import torch
from golden_cases import LOGIT_TOLERANCE, Case, Comparison, DiffersError, Model

from espnet2_vllm.audio.ahead import encode_batch
from espnet2_vllm.backends.pytorch import distribution
from espnet2_vllm.decoding import DecodingConfig, load_decoding
from espnet2_vllm.errors import DataError
from espnet2_vllm.io.content import bagpiper_content
from espnet2_vllm.plan import Continuous, Hypothesis, RowResult, Segment, Utterance
from espnet2_vllm.prompt.bagpiper import bagpiper_utterance, codec_encoder, listening_of
from espnet2_vllm.protocol import AUDIO, Constraint, replay

FEATURES = 1e-4  # tolerance of continuous features and vectors
STOPS = {"eos": "eos", "eot": "eot", "max_step": "max_rows"}


def check_bagpiper(model: Model, case: Case, comparison: Comparison) -> None:
    """Raises DiffersError where the first difference is, RefusedError if the case cannot be replayed."""
    about = case.about
    config = load_decoding(about["inference_config"], "bagpiper")
    utterance = _read(model, case)
    if isinstance(utterance, Utterance):
        comparison.same("prompt", utterance.parts[0].rows, case.arrays["prefill_ids"])
        if utterance.parts[0].continuous:
            (utterance,) = encode_batch([utterance], model.tower)
            _check_continuous(model, case, comparison, utterance.parts[0].continuous)
    result = model.decode(utterance, config, seed=about.get("seed", 42))
    if about.get("kind") == "sampling":
        _check_sampled(model, case, comparison, result.hypotheses[0], config)
        return
    hypotheses = [segment.get("num_hypo", 1) for segment in about["segments"]]
    comparison.same("number of hypotheses", len(result.hypotheses), hypotheses[-1])
    first = result.hypotheses[0]
    comparison.same("fed rows", _fed(first), case.arrays["fed_ids"])
    comparison.same("number of segments", len(first.segments), len(about["segments"]))
    for index, segment in enumerate(first.segments):
        _check_segment(model, case, comparison, index, segment)
        if model.compare_logits:
            _check_logits(case, comparison, index, first, segment)
    for number, other in enumerate(result.hypotheses[1:], 1):
        last = len(about["segments"]) - 1
        name = f"seg{last} of hypothesis {number}"
        comparison.same(f"{name}: emitted rows", other.segments[-1].emitted, case.arrays[f"seg{last}_tokens"])
    _check_messages(model, case, comparison, result.hypotheses)


def _read(model: Model, case: Case):
    """The utterance, or its key and the reason why there is none."""

    def content(value):
        return (case.arrays[value["npz_key"]], value["sample_rate"]) if isinstance(value, dict) else value

    try:
        return bagpiper_utterance(
            model.layout,
            model.tokenizer,
            [[role, modality, content(value)] for role, modality, value in case.about["messages"]],
            key=case.name,
            encode_audio=lambda clips: codec_encoder(model.layout, model.codec)(clips),
            listening=listening_of(model.checkpoint),
            upto_assistant=case.about["prompt_layout"] == "inference",
        )
    except DataError as error:
        return case.name, error


def _check_continuous(model: Model, case: Case, comparison: Comparison, continuous: tuple[Continuous, ...]) -> None:
    """Features and vectors, where they were recorded."""
    if "cont_indices" not in case.arrays:
        return
    places = [[0, rows.start, rows.count] for rows in continuous]
    comparison.same("continuous rows", np.array(places), case.arrays["cont_indices"])
    for i, (rows, frames) in enumerate(zip(continuous, case.arrays["cont_mel_lengths"], strict=True)):
        features = model.tower.features(rows.wav)
        comparison.close(f"features of clip {i}", features, case.arrays["cont_mel"][i, :frames], FEATURES)
        recorded = case.arrays["prefill_embeds"][rows.start : rows.start + rows.count]
        comparison.close(f"vectors of clip {i}", rows.vectors.float().numpy(), recorded, FEATURES)


def _fed(hypothesis: Hypothesis) -> np.ndarray:
    """Every row that the model consumed: the prompt, then generated rows as fed."""
    ((request, result),) = hypothesis.requests
    _, steps = replay(request.rules, map(tuple, result.rows.tolist()))
    return np.concatenate([request.prompt, [step.fed for step in steps]])


# -- exact cases -------------------------------------------------------------------------------------------------------
def _check_segment(model: Model, case: Case, comparison: Comparison, index: int, segment: Segment) -> None:
    about, name = case.about["segments"][index], f"seg{index}"
    comparison.same(f"{name}: modality", segment.modality, about["modality"])
    comparison.same(f"{name}: modality token", int(segment.header[0, 0]), about["modality_token_id"])
    comparison.same(f"{name}: emitted rows", segment.emitted, case.arrays[f"{name}_tokens"])
    comparison.same(f"{name}: end", segment.end, STOPS[about["stop"]])
    if about["stop_row"] is not None:
        comparison.same(f"{name}: stop row", segment.emitted[-1].tolist(), about["stop_row"])
    content = bagpiper_content(model.layout, segment)
    if about["modality"] == "text":
        comparison.same(f"{name}: text ids", content.text.tolist(), about["text_token_ids"])
        comparison.same(f"{name}: text", model.tokenizer.decode_bagpiper(content.text), about["text"])
    else:
        comparison.same(f"{name}: codes", content.codes, case.arrays[f"{name}_codes"])


def _check_messages(model: Model, case: Case, comparison: Comparison, hypotheses: tuple[Hypothesis, ...]) -> None:
    """Texts and codes of every message that ESPnet returned; each further hypothesis adds its last segment."""
    segments = [*hypotheses[0].segments, *(other.segments[-1] for other in hypotheses[1:])]
    recorded = case.about["output_messages"]
    comparison.same("number of messages", len(segments), len(recorded))
    for place, (segment, (role, modality, value)) in enumerate(zip(segments, recorded, strict=True)):
        comparison.same(f"message {place}", [segment.role, segment.modality], [role, modality])
        content = bagpiper_content(model.layout, segment)
        if content.text is not None:
            comparison.same(f"message {place}: text", model.tokenizer.decode_bagpiper(content.text), value)
        else:
            codes = case.arrays[value["npz_key"].replace("_audio", "_codes")]
            comparison.same(f"message {place}: codes", content.codes, codes)


def _check_logits(case: Case, comparison: Comparison, index: int, hypothesis: Hypothesis, segment: Segment) -> None:
    ((request, result),) = hypothesis.requests
    name, arrays = f"seg{index}", case.arrays
    modality_row = result.logits[segment.first - 1]
    comparison.logits_close(f"{name}: modality logits", modality_row[0], arrays[f"{name}_modality_logits"])
    steps = arrays[f"{name}_logit_steps"]
    rows = [result.logits[segment.first + step] for step in steps]
    for column, key in enumerate(("logits_s0", "logits_rest", "uncond_logits_s0", "uncond_logits_rest")):
        if f"{name}_{key}" not in arrays or column >= len(rows[0]):
            continue  # streams 1.. of text, the companion where there is none or the backend does not give it
        recorded = arrays[f"{name}_{key}"]
        comparison.logits_close(f"{name}: {key}", np.stack([row[column] for row in rows[: len(recorded)]]), recorded)
    if f"{name}_cfg_logits_s0" in arrays and len(rows[0]) == 4:
        scale = case.about["segments"][index]["config"]["cfg"]
        for column, key in enumerate(("cfg_logits_s0", "cfg_logits_rest")):
            recorded = arrays.get(f"{name}_{key}")
            for place, merged in enumerate(() if recorded is None else recorded):
                guided = scale * rows[place][column] + (1 - scale) * rows[place][column + 2]
                comparison.logits_close(f"{name}: {key} of step {steps[place]}", guided, merged)
                if column == 0:
                    allowed = _allowed(_constraint(request, result, segment.first + int(steps[place])))
                    comparison.same(
                        f"{name}: allowed ids of step {steps[place]}", allowed, np.isfinite(merged).nonzero()[0]
                    )


def _constraint(request, result: RowResult, row: int) -> Constraint:
    """What row ``row`` of a result was allowed to be."""
    state, _ = replay(request.rules, map(tuple, result.rows[:row].tolist()))
    return request.rules.constraint(state)


def _allowed(constraint: Constraint) -> np.ndarray:
    return np.unique(np.concatenate([np.arange(*span) for span in constraint.primary]))


# -- sampled cases -----------------------------------------------------------------------------------------------------
def _check_sampled(
    model: Model, case: Case, comparison: Comparison, hypothesis: Hypothesis, config: DecodingConfig
) -> None:
    """The first row of the enforced segment: drawn from what ESPnet drew from, and the probabilities themselves."""
    ((request, result),) = hypothesis.requests
    segment = hypothesis.segments[0]
    comparison.same("modality", segment.modality, case.about["modality"])
    step = case.about["step"]
    assert step == 0, f"{case.name}: the recording is of step {step}, which depends on earlier draws"
    for stream, (ids, probabilities) in enumerate(zip(case.arrays["topk_ids"], case.arrays["probs"], strict=True)):
        possible = ids[probabilities > 0].tolist()
        if int(segment.emitted[0, stream]) not in possible:
            raise DiffersError(f"stream {stream}: drew {segment.emitted[0, stream]}, recorded choices {possible}")
    comparison.notes.append("sampled: first row")
    if not model.compare_logits:
        return
    logits = result.logits[segment.first]
    scale = config.segment(segment.modality).cfg
    guided = len(logits) == 4
    if scale > 1 and not guided:
        return  # the backend does not give the companion's logits
    merged = [scale * logits[c] + (1 - scale) * logits[c + 2] if guided else logits[c] for c in (0, 1)]
    comparison.logits_close("final logits of stream 0", merged[0], case.arrays["final_logits_s0"])
    constraint = _constraint(request, result, segment.first)
    candidates = [_allowed(constraint), *(np.array(ids) for ids in model.layout.auxiliary_candidates())]
    for stream, ids in enumerate(candidates):
        if stream > 0 and constraint.phase != AUDIO:
            break
        values = merged[0][ids] if stream == 0 else merged[1][stream - 1, : len(ids)]
        _check_distribution(case, comparison, constraint, stream, np.asarray(values), ids)
    comparison.notes[-1] = "sampled: first row and its distributions"


def _check_distribution(
    case: Case, comparison: Comparison, constraint: Constraint, stream: int, values: np.ndarray, ids: np.ndarray
) -> None:
    best, scores = distribution(torch.as_tensor(values), torch.as_tensor(ids), constraint.sampling)
    found = dict(zip(best.tolist(), scores.softmax(-1).tolist(), strict=True))
    recorded = {
        int(i): float(p)
        for i, p in zip(case.arrays["topk_ids"][stream], case.arrays["probs"][stream], strict=True)
        if p > 0
    }
    comparison.same(f"stream {stream}: ids that can be drawn", sorted(found), sorted(recorded))
    worst = max(abs(found[i] - p) for i, p in recorded.items())
    if not worst <= LOGIT_TOLERANCE:
        raise DiffersError(f"stream {stream}: probabilities differ by {worst:.3g}")
