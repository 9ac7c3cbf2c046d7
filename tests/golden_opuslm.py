"""Replay of recorded OpusLM cases (format: README of the recordings, 2.3 and 2.4)."""

import numpy as np
from golden_cases import Case, Comparison, DiffersError, Model

from espnet2_vllm.decoding import load_decoding
from espnet2_vllm.io.content import opuslm_content
from espnet2_vllm.io.data_json import open_data_json, read_utterances
from espnet2_vllm.plan import Given, Hypothesis, Result, RowResult, Segment, Utterance
from espnet2_vllm.prompt.opuslm import Facts

DIRECT = "ARDelayLM"  # begins the driver of cases that ESPnet's own call cannot run


def check_opuslm(model: Model, case: Case, comparison: Comparison) -> None:
    """Raises DiffersError where the first one is, RefusedError if the case cannot be replayed."""
    about = case.about
    config = load_decoding(about["inference_config"], "opuslm")
    utterance = _read(model, case)
    if isinstance(utterance, Utterance):
        _check_sequence(case, comparison, utterance)
    result = model.decode(utterance, config, seed=about["seed"], nbest=about["nbest"])
    comparison.same("number of hypotheses", len(result.hypotheses), about["nbest"])
    if any(s.get("search_algo") == "topk_sampling" and s["topk"] > 1 for s in about["segments"]):
        for number, hypothesis in enumerate(result.hypotheses):
            _check_sampled(model, case, comparison, hypothesis, number)
        comparison.notes.append("sampled: prompts, first choices and lengths")
        return
    for number, hypothesis in enumerate(result.hypotheses):
        _check_hypothesis(model, case, comparison, hypothesis, number)
    _check_written(model, case, comparison, result)


def _read(model: Model, case: Case):
    about = case.about
    data = open_data_json(model.directory / about["data_json"], base_dir=model.directory)
    frames = 0
    if about["driver"].startswith(DIRECT) and about["task"] != "textlm":
        frames = about["segments"][0]["prefill_rows"] - 3  # behind <sos/eos> <task> <modality>
    (item,) = read_utterances(
        data,
        model.layout,
        model.tokenizer,
        Facts.from_preprocessor(model.checkpoint.preprocessor),
        seed=about["seed"],
        keys=[about["key"]],
        inference_last_segment=about["inference_last_segment"],
        prompt_frames=frames,
    )
    return item


def _check_sequence(case: Case, comparison: Comparison, utterance: Utterance) -> None:
    """What was read is ESPnet's ``dec_seq``, cut into the same segments."""
    rows = []
    for part in utterance.parts:
        if isinstance(part, Given):
            rows.append(part.rows)
        else:
            rows += [part.header, *([] if part.reference is None else [part.reference])]
    comparison.same("dec_seq", np.concatenate(rows), case.arrays["dec_seq"])
    recorded = [segment["is_prefill"] for segment in case.about["segments"]]
    comparison.same("segments given", [isinstance(part, Given) for part in utterance.parts], recorded)
    for index, part in enumerate(utterance.parts):
        if isinstance(part, Given):
            comparison.same(f"seg{index}.rows", part.rows, case.arrays[f"seg{index}.rows"])


def _array(case: Case, index: int, name: str, hypothesis: int) -> np.ndarray:
    """Array of a segment; with several hypotheses it is a list of arrays or has a leading axis."""
    key = f"seg{index}.{name}"
    if f"{key}.hyp{hypothesis}" in case.arrays:
        return case.arrays[f"{key}.hyp{hypothesis}"]
    return case.arrays[key][hypothesis] if case.about["nbest"] > 1 else case.arrays[key]


# -- exact cases -------------------------------------------------------------------------------------------------------
def _check_hypothesis(model: Model, case: Case, comparison: Comparison, hypothesis: Hypothesis, number: int) -> None:
    requests = iter(hypothesis.requests)
    history: list[np.ndarray] = []
    for index, (about, segment) in enumerate(zip(case.about["segments"], hypothesis.segments, strict=True)):
        if about["is_prefill"]:
            continue
        name = f"seg{index}" if case.about["nbest"] == 1 else f"seg{index} of hypothesis {number}"
        request, result = next(requests)
        prefill = _array(case, index, "prefill_delay", number)
        comparison.same(f"{name}: prompt", request.prompt, np.concatenate([*history, prefill]))
        history.append(_array(case, index, "fed_rows", number))
        if about["search_algo"] == "teacher_force":
            comparison.same(f"{name}: reference", request.reference, _array(case, index, "reference_delay", number))
        tokens = _array(case, index, "tokens_delay", number)
        if case.about["nbest"] > 1:  # hypotheses that had finished were fed pads until the last one had
            tokens = tokens[: len(segment.emitted)]
        comparison.same(f"{name}: emitted rows", segment.emitted, tokens)
        content = _array(case, index, "segment", number)
        comparison.same(f"{name}: content", segment.rows, content)
        if f"seg{index}.returned" in case.arrays:
            returned = np.concatenate([segment.header, segment.rows])
            comparison.same(f"{name}: returned", returned, _array(case, index, "returned", number))
        comparison.same(f"{name}: end", segment.end, _recorded_end(about, number))
        if model.compare_logits:
            _check_logits(case, comparison, name, index, number, result)


def _recorded_end(about: dict, number: int) -> str:
    if about["search_algo"] == "teacher_force":
        return "teacher"
    # The end token stands in the row before finish_idx if the model chose it, and in that row itself if it was forced.
    own = about["finish_idx"][number] - 1 in about["ends"][number]["eos_steps"]
    return "eos" if own else "forced"


def _check_logits(case: Case, comparison: Comparison, name: str, index: int, number: int, result: RowResult) -> None:
    for stream, key in ((0, "logits_stream0"), (1, "logits_streams1to8")):
        if f"seg{index}.{key}" not in case.arrays:
            continue
        recorded = _array(case, index, key, number)
        found = np.stack([row[stream] for row in result.logits[: len(recorded)]])
        comparison.logits_close(f"{name}: {key}", found, recorded)


# -- what writers make of it -------------------------------------------------------------------------------------------
def _check_written(model: Model, case: Case, comparison: Comparison, result: Result) -> None:
    """Token arks and texts that ESPnet's writer made, and texts of the cases that it could not write."""
    written = _chat_names(case, result) if case.about["mode"] == "chat" else _task_names(case, result)
    texts, missing = {}, {key for key in case.arrays if key.startswith("writer.") and ".tokens." in key}
    for (entry, uid), segment in written.items():
        content = opuslm_content(model.layout, segment)
        key = f"writer.{entry}.tokens.{uid}"
        if key in case.arrays:
            comparison.same(key, content.tokens, case.arrays[key])
            missing.discard(key)
        if content.text is not None:
            texts[entry, uid] = model.tokenizer.decode_opuslm(content.text)
    if missing:
        raise DiffersError(f"recorded, but not among the results: {', '.join(sorted(missing))}")
    if direct := case.about.get("direct_text"):
        generated = [texts[name] for name, segment in written.items() if segment.generated and name in texts]
        comparison.same("direct_text", generated, direct)
    writer = case.about.get("writer", {})
    if "dialogue.json" in writer:
        _check_dialogue(case, comparison, result.hypotheses[0], texts)
    for entry, lines in writer.items():
        if any(name == entry for name, _ in texts):
            comparison.same(
                f"writer.{entry}", [f"{uid} {text}" for (e, uid), text in texts.items() if e == entry], lines
            )


def _task_names(case: Case, result: Result) -> dict[tuple[str, str], Segment]:
    """(entry, id) under which ESPnet's task writer writes each segment."""
    entries, named = result.utterance.info["entries"], {}
    for number, hypothesis in enumerate(result.hypotheses):
        for entry, segment in zip(entries, hypothesis.segments, strict=True):
            uid = f"{case.about['key']}_sample{number}" if segment.generated else case.about["uid"]
            named[entry, uid] = segment
    return named


def _chat_names(case: Case, result: Result) -> dict[tuple[str, str], Segment]:
    (hypothesis,) = result.hypotheses
    key = case.about["key"]
    return {("dialogue", f"{key}_segment{i}"): segment for i, segment in enumerate(hypothesis.segments)}


def _check_dialogue(case: Case, comparison: Comparison, hypothesis: Hypothesis, texts: dict) -> None:
    key = case.about["key"]
    (recorded,) = (turns[key] for turns in case.about["writer"]["dialogue.json"])
    found = []
    for index, segment in enumerate(hypothesis.segments):
        uid = f"{key}_segment{index}"
        content = texts.get(("dialogue", uid), f"dialogue/{uid}.wav")
        name = "codec_ssl" if segment.name == "spk" else segment.name  # as the dialogue's file names it
        found.append([segment.role, name, not segment.generated, content])
    for index, (mine, theirs) in enumerate(zip(found, recorded, strict=True)):
        comparison.same(f"dialogue.json turn {index}", mine, theirs)


# -- sampled cases -----------------------------------------------------------------------------------------------------
def _check_sampled(model: Model, case: Case, comparison: Comparison, hypothesis: Hypothesis, number: int) -> None:
    """Up to the first draw everything is determined; behind it, only what holds for every draw."""
    index = next(i for i, about in enumerate(case.about["segments"]) if not about["is_prefill"])
    about, name = case.about["segments"][index], f"seg{index} of hypothesis {number}"
    request, result = hypothesis.requests[0]
    segment = hypothesis.segments[index]
    comparison.same(f"{name}: prompt", request.prompt, _array(case, index, "prefill_delay", number))
    if not model.layout.num_streams <= len(segment.emitted) <= about["maxlen"]:
        raise DiffersError(f"{name}: {len(segment.emitted)} rows, expected at most maxlen {about['maxlen']}")
    if segment.end not in ("eos", "forced"):
        raise DiffersError(f"{name}: ended by {segment.end}")
    logits = _array(case, index, "logits_stream0", number)[0]
    spans = model.layout.primary_spans("audio" if about["modality"] == "codec_ssl" else "text")
    allowed = [i for span in spans for i in range(*span)]
    allowed += list(model.layout.end_tokens) if about["minlen"] == 0 else []
    best = sorted(allowed, key=lambda i: -logits[i])[: about["topk"]]
    if int(segment.emitted[0, 0]) not in best:
        raise DiffersError(
            f"{name}: first id {segment.emitted[0, 0]} is none of the recorded {about['topk']} best {best}"
        )
    if model.compare_logits:
        comparison.logits_close(f"{name}: logits of row 0", result.logits[0][0], logits)
