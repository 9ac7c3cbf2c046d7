"""Results as a perfect engine would give them, rebuilt from the recorded cases, and the codec to write them."""

import json
import pathlib

import numpy as np
import yaml
from golden_layouts import opuslm_layout

from espnet2_vllm.io.results import Speech
from espnet2_vllm.plan import Given, Hypothesis, Result, Segment, Utterance, Wanted

ROLES = ("system", "user", "assistant")


def load_case(path: pathlib.Path) -> tuple[dict, np.lib.npyio.NpzFile]:
    """The description of a case and its arrays, which are read when they are asked for."""
    return json.loads(path.read_text(encoding="utf-8")), np.load(path.with_suffix(".npz"))


def opuslm_speech(model: pathlib.Path) -> Speech:
    from espnet2_vllm.codec import SILENT_FRAMES, codec_from_yaml, load_codec

    decoding = yaml.safe_load((model / "decode_default.yaml").read_text(encoding="utf-8"))
    codec = load_codec(codec_from_yaml(decoding["codec_ssl"]["tokenizer"]), base_dir=model)
    return Speech(codec, silent_frames=SILENT_FRAMES)


def announced(layout, rows: np.ndarray) -> tuple[str, str, int]:
    """(role, modality, header rows) of a segment."""
    roles = {layout.specials[name]: name for name in ROLES}
    role = ""
    for index, token in enumerate(map(int, rows[:4, 0])):
        role = roles.get(token, role)
        if layout.modality_of(token):
            return role, layout.modality_of(token), index + 1
    return "", "", 0


def opuslm_result(model: pathlib.Path, case: dict, arrays: dict) -> Result:
    """The recorded segments of an OpusLM case."""
    layout = opuslm_layout(model)
    hypotheses: list[list[Segment]] = [[] for _ in range(case["nbest"])]
    parts = []
    for segment in case["segments"]:
        name = f"seg{segment['index']}"
        if segment["is_prefill"]:
            rows = arrays[f"{name}.rows"]
            role, modality, _ = announced(layout, rows)
            kind = "text" if modality == "text_bpe" else "audio"
            part = Given(rows, modality, role, is_target=bool((rows[:, 0] == layout.specials["eos"]).any()))
            made = [Segment(kind, modality, False, rows, rows[:0], "given", role)] * case["nbest"]
        else:
            modality = segment["modality"]
            made, part = [], None
            for index in range(case["nbest"]):
                suffix = f".hyp{index}" if case["nbest"] > 1 else ""
                rows = arrays[f"{name}.segment{suffix}"]
                returned = arrays.get(f"{name}.returned{suffix}", rows)
                header = returned[: len(returned) - len(rows)]
                role = announced(layout, header)[0] if len(header) else ""
                part = part or Wanted(header, modality, role)
                kind = "text" if modality == "text_bpe" else "audio"
                made.append(Segment(kind, modality, True, rows, header, "eos", role))
        parts.append(part)
        for mine, one in zip(hypotheses, made, strict=True):
            mine.append(one)
    utterance = Utterance(case["key"], tuple(parts))
    return Result(case["key"], tuple(Hypothesis(tuple(h)) for h in hypotheses), utterance=utterance)
