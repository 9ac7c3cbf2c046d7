"""``results.json`` and wavs of recorded Bagpiper cases, as ESPnet returned them."""

import functools
import json

import numpy as np
import pytest
import soundfile
from conftest import golden_files
from golden_layouts import bagpiper_model_layout
from recorded import load_case
from trees import WAV_TOLERANCE

from espnet2_vllm.errors import ConfigError
from espnet2_vllm.io.journal import Journal
from espnet2_vllm.io.results import OUTSIDE, Speech
from espnet2_vllm.io.results_bagpiper import BagpiperWriter
from espnet2_vllm.plan import NO_AUDIO, REFUSED, Given, Hypothesis, Result, Segment, Utterance, Wanted
from espnet2_vllm.text import TextTokenizer

CASES = [path for path in golden_files("bagpiper/*/cases/*.json") if not path.name.startswith("sampling_")]
case_id = lambda path: f"{path.parent.parent.name}-{path.stem}"  # noqa: E731


@functools.cache
def speech_of(model):
    from espnet2_vllm.codec import CodecDescription, load_codec

    streams = bagpiper_model_layout(model).num_streams
    return Speech(load_codec(CodecDescription("xcodec", path="codec", num_codebooks=streams), base_dir=model))


@functools.cache
def tokenizer_of(model):
    return TextTokenizer(model / "backbone", clean_up=True)


def make_writer(model, directory, **options):
    layout = bagpiper_model_layout(model)
    journal = Journal(directory, {})
    return BagpiperWriter(directory, layout, journal, speech_of(model), tokenizer_of(model).decode_bagpiper, **options)


def store(writer, result):
    draft = writer.draft(result)
    return writer.commit(draft, writer.speech.decode([clip.codes for clip in draft.clips]))


def segment_of(layout, recorded, tokens):
    rows = tokens if recorded["stop"] == "max_step" else tokens[:-1]
    end = {"max_step": "max_rows"}.get(recorded["stop"], recorded["stop"])
    header = np.zeros((1, layout.num_streams), np.int32)
    header[0, 0] = recorded["modality_token_id"]
    modality = recorded["modality"]
    return Segment(modality, modality, True, rows.astype(np.int32), header, end, "assistant")


def result_of(model, case, arrays, key="key"):
    layout = bagpiper_model_layout(model)
    segments = [segment_of(layout, one, arrays[f"seg{k}_tokens"]) for k, one in enumerate(case["segments"])]
    hypotheses = [Hypothesis(tuple(segments))] * case["segments"][-1].get("num_hypo", 1)
    utterance = Utterance(key, (Given(arrays["prefill_ids"].astype(np.int32)), Wanted(segments[0].header)))
    return Result(key, tuple(hypotheses), utterance=utterance)


@pytest.mark.parametrize("path", CASES, ids=case_id)
def test_messages_and_wavs_are_espnets(path, tmp_path):
    model = path.parent.parent
    case, arrays = load_case(path)
    writer = make_writer(model, tmp_path / "out")
    assert store(writer, result_of(model, case, arrays)).outcome == "ok"
    writer.finish(["key"])
    (messages,) = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8")).values()
    assert len(messages) == len(case["output_messages"])
    for number, (written, expected) in enumerate(zip(messages, case["output_messages"], strict=True), 1):
        assert written[:2] == expected[:2]
        if expected[1] == "text":
            assert written[2] == expected[2]
            continue
        assert written[2] == str(tmp_path / "out" / f"key_segment{number}.wav")
        wav, rate = soundfile.read(written[2], dtype="int16")
        audio = arrays[expected[2]["npz_key"]].reshape(-1)
        assert rate == expected[2]["sample_rate"] and len(wav) == len(audio)
        scaled = np.clip(np.round(audio.astype(np.float64) * 32768), -32768, 32767)
        assert np.abs(wav - scaled).max() <= WAV_TOLERANCE


# -- edges -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def model():
    return CASES[0].parent.parent


def audio_result(layout, rows, key="a", outcome="ok", reason=""):
    header = np.zeros((1, layout.num_streams), np.int32)
    header[0, 0] = layout.specials["audio"]
    segment = Segment("audio", "audio", True, rows, header, "max_rows", "assistant")
    return Result(key, (Hypothesis((segment,)),), outcome, reason, Utterance(key, (Wanted(header),)))


def first_codes(layout, rows):
    return np.tile(np.array([[span.start for span in layout.code_spans]], np.int32), (rows, 1))


def test_audio_without_a_frame_is_null_and_has_no_file(model, tmp_path):
    writer = make_writer(model, tmp_path)
    layout = writer.layout
    rows = first_codes(layout, layout.num_streams - 1)
    store(writer, audio_result(layout, rows, outcome=NO_AUDIO, reason="no whole frame"))
    writer.finish(["a"])
    assert json.loads((tmp_path / "results.json").read_text("utf-8")) == {"a": [["assistant", "audio", None]]}
    assert not list(tmp_path.glob("*.wav"))


def test_ids_out_of_range_become_the_nearest_code_and_are_counted(model, tmp_path):
    writer = make_writer(model, tmp_path)
    rows = first_codes(writer.layout, writer.layout.num_streams)
    rows[0, 0] = writer.layout.stream_pads[0]
    assert store(writer, audio_result(writer.layout, rows)).outcome == "ok"
    assert writer.notes[OUTSIDE] == 1


def test_samples_keep_their_order_and_refused_ones_are_left_out(model, tmp_path):
    writer = make_writer(model, tmp_path)
    rows = first_codes(writer.layout, writer.layout.num_streams)
    for key in ("c", "b", "a"):
        store(writer, audio_result(writer.layout, rows, key, REFUSED if key == "b" else "ok", "why"))
    writer.finish(["a", "b", "c"])
    assert list(json.loads((tmp_path / "results.json").read_text("utf-8"))) == ["a", "c"]


@pytest.mark.parametrize("key", ["../../evil", "a/b", "x" * 300, "..", "\ud800"])
def test_ids_never_leave_the_output_directory(model, tmp_path, key):
    out = tmp_path / "deep" / "out"
    writer = make_writer(model, out)
    store(writer, audio_result(writer.layout, first_codes(writer.layout, writer.layout.num_streams), key))
    writer.finish([key])
    assert {p.parent for p in tmp_path.rglob("*.wav")} == {out}
    ((name, messages),) = json.loads((out / "results.json").read_text("utf-8")).items()
    assert name == key and soundfile.info(messages[0][2]).frames == writer.speech.codec.hop


def test_text_formats(model, tmp_path):
    layout = bagpiper_model_layout(model)
    header = np.zeros((1, layout.num_streams), np.int32)
    rows = np.zeros((2, layout.num_streams), np.int32)
    rows[:, 0] = layout.text.start + 5
    segment = Segment("text", "text", True, rows, header, "eos", "assistant")
    contents = []
    for text_format in ("list", "string"):
        writer = make_writer(
            model, tmp_path / text_format, **({} if text_format == "string" else {"text_format": text_format})
        )
        store(writer, Result("a", (Hypothesis((segment,)),), utterance=Utterance("a", (Wanted(header),))))
        writer.finish(["a"])
        contents.append(json.loads((writer.directory / "results.json").read_text("utf-8"))["a"][0][2])
    assert contents[0] == [contents[1]] and isinstance(contents[1], str)
    with pytest.raises(ConfigError, match="expected one of string, list"):
        make_writer(model, tmp_path / "x", text_format="json")


def test_results_of_another_set_or_other_settings_do_not_stay(model, tmp_path):
    (tmp_path / "results.json").write_text("{}", encoding="utf-8")
    writer = make_writer(model, tmp_path)
    writer.begin()
    assert (tmp_path / "results.json").is_file(), "not ours: there was no journal"
    writer.finish([])
    assert not (tmp_path / "results.json").exists(), "of a larger set"
    writer.journal.close()
    (tmp_path / "results.json").write_text("{}", encoding="utf-8")
    again = BagpiperWriter(tmp_path, writer.layout, Journal(tmp_path, {"seed": 1}), None, None)
    again.begin()
    assert not (tmp_path / "results.json").exists()


def test_an_empty_share_writes_nothing(model, tmp_path):
    make_writer(model, tmp_path).finish([])
    assert not (tmp_path / "results.json").exists()
