"""The replay itself: what it prints and returns, and that a single changed value of a recording is found out."""

import json
import re

import numpy as np
import pytest
import replay_golden
from conftest import golden_files
from golden_cases import DIFFERS, EXACT, Comparison, DiffersError, Model, Verdict, case_files, replay, summary

FAMILIES = {
    "bagpiper": "bagpiper/*/cases/enforce_text_audio_text_cut.json",
    "opuslm": "opuslm/*/cases/tts_eos.json",
}


@pytest.fixture(scope="module", params=FAMILIES)
def recorded(request):
    """A model and one of its cases, with text and audio both."""
    path = golden_files(FAMILIES[request.param])[0]
    model = Model(path.parent.parent, "pytorch", compare_logits=True)
    yield request.param, model, path
    model.engine.close()


def changed(folder, path, change):
    """A copy of a case with a change in it."""
    about, arrays = json.loads(path.read_text(encoding="utf-8")), dict(np.load(path.with_suffix(".npz")))
    change(about, arrays)
    copy = folder / path.name
    copy.write_text(json.dumps(about), encoding="utf-8")
    np.savez(copy.with_suffix(".npz"), **arrays)
    return copy


def add(name, place, value=1):
    def change(about, arrays):
        arrays[name] = arrays[name].copy()
        arrays[name][place] += value

    return change


def cut(name):
    def change(about, arrays):
        arrays[name] = arrays[name][:-1]

    return change


def say(*keys, value):
    def change(about, arrays):
        for key in keys[:-1]:
            about = about[key]
        about[keys[-1]] = value

    return change


CHANGES = {
    "bagpiper": [
        (add("prefill_ids", (3, 0)), "prompt: "),
        (add("fed_ids", (-1, 2)), "fed rows: "),
        (add("seg1_tokens", (4, 3)), "seg1: emitted rows: "),
        (cut("seg1_tokens"), "seg1: emitted rows: shape"),
        (add("seg1_codes", (0, 0)), "seg1: codes: "),
        (add("seg1_logits_rest", (2, 1, 4), 0.01), "seg1: logits_rest: logits differ by"),
        (add("seg0_modality_logits", 9, 0.01), "seg0: modality logits: "),
        (say("segments", 0, "text", value="other"), "seg0: text: "),
        (say("segments", 0, "stop", value="eot"), "seg0: end: "),
        (say("output_messages", 0, 2, value="other"), "message 0: text: "),
        (say("messages", 0, 2, value="Something else was asked."), "prompt: "),
    ],
    "opuslm": [
        (add("dec_seq", (30, 0)), "dec_seq: "),
        (add("seg1.rows", (2, 0)), "seg1.rows: "),
        (add("seg2.prefill_delay", (5, 1)), "seg2: prompt: "),
        (add("seg2.tokens_delay", (9, 8)), "seg2: emitted rows: "),
        (cut("seg2.segment"), "seg2: content: shape"),
        (add("seg2.returned", (0, 0)), "seg2: returned: "),
        (add("seg2.logits_stream0", (1, 700), 0.01), "seg2: logits_stream0: logits differ by"),
        (add("seg2.logits_streams1to8", (3, 7, 1), 0.01), "seg2: logits_streams1to8: "),
        (add("writer.text.tokens.u00", 0), "writer.text.tokens.u00: "),
        (say("writer", "text", value=["u00 other words"]), "writer.text: "),
        (say("segments", 2, "ends", value=[{"eos_steps": [99]}]), "seg2: end: "),
        (say("inference_config", "codec_ssl", "maxlen", value=12), "seg2: emitted rows: "),
        (say("inference_config", "codec_ssl", "topk", value=0), "ConfigError: "),
        (say("key", value="codec_ssl_tts_u99"), "refused: codec_ssl_tts_u99"),
    ],
}


def test_a_changed_recording_differs_where_it_was_changed(recorded, tmp_path):
    family, model, path = recorded
    assert replay(model, path).verdict == EXACT
    for change, where in CHANGES[family]:
        verdict = replay(model, changed(tmp_path, path, change))
        assert (verdict.verdict, verdict.note[: len(where)]) == (DIFFERS, where), str(verdict)


def test_the_command_line(recorded, tmp_path, capsys):
    family, model, path = recorded
    base = [str(model.directory), str(path.parent), "--backend", "pytorch"]
    only = [*base, "--only", f"{path.stem}*"]
    assert replay_golden.main([*only, "--logits", "--engine-option", "attention=eager"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"{path.stem}: exact logits [0-9.e-]+", first)
    assert re.fullmatch(r"1 of 1 exact, 0 refused \(guidance\), worst logit difference [0-9.e-]+", last)
    assert replay_golden.main(only) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("worst logit difference not compared")

    change, where = CHANGES[family][0]
    changed(tmp_path, path, change)
    assert replay_golden.main([str(model.directory), str(tmp_path), "--backend", "pytorch"]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{path.stem}: DIFFERS ({where}")
    assert last.startswith("0 of 1 exact, 0 refused (guidance)")

    for wrong in (["--only", "no_such_case"], ["--engine-option", "device"], ["--engine-option", "devise=cpu"]):
        assert replay_golden.main([*base, *wrong]) == 2
    assert replay_golden.main([str(tmp_path / "missing"), str(tmp_path)]) == 2


def test_patterns_match_or_hold():
    folder = golden_files(FAMILIES["opuslm"])[0].parent
    names = {path.stem for path in case_files(folder)}
    assert {path.stem for path in case_files(folder, "tts")} == {name for name in names if "tts" in name}
    assert {path.stem for path in case_files(folder, "tts_*")} == {name for name in names if name.startswith("tts_")}


def test_comparison():
    comparison = Comparison()
    comparison.logits_close("x", np.array([1.0, 5.0]), np.array([1.0005, -np.inf]))
    assert comparison.logits == pytest.approx(0.0005)
    for wrong in (np.array([1.1, 5.0]), np.array([np.nan, 5.0]), np.array([1.0])):
        with pytest.raises(DiffersError):
            comparison.logits_close("x", wrong, np.array([1.0, -np.inf]))
    with pytest.raises(DiffersError, match=r"y: shape \(3, 2\), recorded \(2, 2\); first difference at \[1, 0\]"):
        comparison.same("y", np.array([[1, 2], [9, 4], [5, 6]]), np.array([[1, 2], [3, 4]]))
    with pytest.raises(DiffersError, match=r"y: 9 at \[1\], recorded 2"):
        comparison.same("y", [1, 9], np.array([1, 2]))


def test_summary_counts():
    verdicts = [
        Verdict("a", EXACT, logits=0.0001), Verdict("b", DIFFERS), Verdict("c", "refused (guidance)"),
        Verdict("d", "sampled"), Verdict("e", EXACT, logits=0.0003),
    ]  # fmt: skip
    assert summary(verdicts) == "2 of 3 exact, 1 refused (guidance), worst logit difference 0.0003"
    assert str(verdicts[0]) == "a: exact logits 0.0001"
