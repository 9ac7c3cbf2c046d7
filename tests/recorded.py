"""The recorded OpusLM cases: results as a perfect engine would give them, and what ESPnet's writers made of them."""

import json
import pathlib

import kaldiio
import numpy as np
import soundfile
import yaml
from golden_layouts import opuslm_layout
from trees import WAV_TOLERANCE

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


# -- what was written -------------------------------------------------------------------------------------------------
def lines(path: pathlib.Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def assert_written_as_recorded(case: dict, arrays, directory: pathlib.Path) -> None:
    """Entry by entry what ESPnet's writer wrote for a case, or what it was recorded to give where that writer fails."""
    compared = _check_lines(case, directory) + _check_arrays(arrays, directory) + _check_direct(case, arrays, directory)
    assert compared, "the case records nothing to compare with"


def _check_lines(case, directory):
    count = 0
    for entry, expected in case.get("writer", {}).items():
        if entry == "dialogue.json":
            text = (directory / "dialogue" / "dialogue.json").read_text(encoding="utf-8")
            assert json.loads(text.replace(f"{directory}/", "")) == expected
            count += 1
        elif entry == "wav":
            for name, facts in expected.items():
                wav, rate = soundfile.read(_wav_path(directory, name), dtype="int16")
                assert (rate, len(wav)) == (facts["sample_rate"], facts["samples"])
                count += 1
        elif entry != "error":
            written = [line.replace(f"{directory}/", "") for line in lines(directory / entry / entry)]
            assert written == expected
            count += 1
    return count


def _wav_path(directory, name):
    """``<entry>.<id>``, where both may hold dots."""
    found = [p for p in directory.rglob("*.wav") if f"{p.parent.name}.{p.stem}" == name or p.stem == name]
    assert len(found) == 1, f"{name}: {found}"
    return found[0]


def _check_arrays(arrays, directory):
    count = 0
    for name in (name for name in arrays if name.startswith("writer.")):
        rest, expected = name.removeprefix("writer."), arrays[name]
        if ".tokens." in rest:
            entry, _, key = rest.partition(".tokens.")
            tokens = kaldiio.load_scp(str(directory / entry / f"{entry}_token.scp"))[key]
            assert tokens.dtype == np.int32
            np.testing.assert_array_equal(tokens, expected)
        elif rest.startswith("wav_pcm16."):
            wav, _ = soundfile.read(_wav_path(directory, rest.removeprefix("wav_pcm16.")), dtype="int16")
            assert len(wav) == len(expected)
            assert np.abs(wav.astype(int) - expected).max(initial=0) <= WAV_TOLERANCE
        count += 1
    return count


def _check_direct(case, arrays, directory):
    """Where ESPnet's writer fails (or cannot be reached), the recorded results of the same calls are what must be written."""
    count = 0
    for index, text in enumerate(case.get("direct_text") or []):
        if case["mode"] == "task":
            assert lines(directory / "text" / "text")[index] == f"{case['key']}_sample{index} {text}"
            count += 1
    for name in (name for name in arrays if name.startswith("direct.wav_float.")):
        expected, place = arrays[name], name.removeprefix("direct.wav_float.")
        (path,) = directory.rglob(f"{case['key']}_{place}.wav")
        wav, rate = soundfile.read(path, dtype="int16")
        assert rate == 16000 and len(wav) == len(expected)
        scaled = np.clip(np.round(expected.astype(np.float64) * 32768), -32768, 32767)
        assert np.abs(wav - scaled).max(initial=0) <= WAV_TOLERANCE
        count += 1
    return count
