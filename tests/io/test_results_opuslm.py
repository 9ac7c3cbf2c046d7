"""Entry by entry what ESPnet's writers wrote for the recorded cases, and whole trees byte for byte."""

import functools
import json

import kaldiio
import numpy as np
import pytest
import soundfile
from conftest import golden_files
from golden_layouts import opuslm_layout
from recorded import assert_written_as_recorded, lines, load_case, opuslm_result, opuslm_speech
from trees import assert_same_tree

from espnet2_vllm.io.journal import Journal
from espnet2_vllm.io.results import BREAKS, OUTSIDE
from espnet2_vllm.io.results_opuslm import ChatWriter, TaskWriter
from espnet2_vllm.plan import REFUSED, Given, Hypothesis, Result, Segment, Utterance, Wanted
from espnet2_vllm.text import TextTokenizer

CASES = golden_files("opuslm/*/cases/*.json")
TREES = [path.parent for path in golden_files("opuslm/*/trees/*/data.json")]
case_id = lambda path: f"{path.parent.parent.name}-{path.stem}"  # noqa: E731
speech_of = functools.cache(opuslm_speech)
tokenizer_of = functools.cache(lambda model: TextTokenizer(model / "hf_backbone"))


def make_writer(kind, model, directory, nproc=1, **options):
    journal = Journal(directory, {})
    text = tokenizer_of(model).decode_opuslm
    return kind(directory, opuslm_layout(model), journal, speech_of(model), text, nproc, **options)


def store(writer, result):
    draft = writer.draft(result)
    return writer.commit(draft, writer.speech.decode([clip.codes for clip in draft.clips]) if draft.clips else [])


@pytest.mark.parametrize("path", CASES, ids=case_id)
def test_cases_are_written_as_espnet_did(path, tmp_path):
    model = path.parent.parent
    case, arrays = load_case(path)
    result = opuslm_result(model, case, arrays)
    if case["mode"] == "chat":
        writer = make_writer(ChatWriter, model, tmp_path)
    else:
        writer = make_writer(TaskWriter, model, tmp_path, task=case["task"], entries=list(case["input"]))
    assert store(writer, result).outcome == "ok"
    writer.finish([case["key"]])
    assert_written_as_recorded(case, arrays, tmp_path)


# -- whole trees: rebuilt from their own token arks, written again ---------------------------------------------------
def rebuilt_task(layout, task, entries, arks, uid):
    """The result of one utterance of a task."""
    parts, segments = [], []
    for entry in entries:
        given = uid in arks[entry]
        tokens = arks[entry][uid if given else f"{task}_{uid}_sample0"]
        modality = {"text": "text_bpe", "utt2spk": "spk"}.get(entry, "codec_ssl")
        rows = rows_of(layout, modality, tokens)
        head = np.zeros((1, layout.num_streams), np.int32)
        head[0, 0] = layout.specials[f"modality/{modality}"]
        kind = "text" if modality == "text_bpe" else "audio"
        if given:
            rows = np.concatenate([head, rows, np.zeros((8, layout.num_streams), np.int32)])
            parts.append(Given(rows, modality))
        else:
            parts.append(Wanted(head, modality))
        segments.append(Segment(kind, modality, not given, rows, head, "given" if given else "eos"))
    key = f"{task}_{uid}"
    return Result(key, (Hypothesis(tuple(segments)),), utterance=Utterance(key, tuple(parts)))


def rows_of(layout, modality, tokens):
    if modality == "text_bpe":
        rows = np.zeros((len(tokens), layout.num_streams), np.int32)
        rows[:, 0] = tokens + layout.text.start
        return rows
    return tokens.reshape(-1, layout.num_streams) + layout.streams[0].start


def rebuilt_chat(layout, dialogue, arks):
    ((key, turns),) = dialogue.items()
    segments = []
    for place, (role, name, prefill, _) in enumerate(turns):
        modality = "spk" if role == "system" and name == "codec_ssl" else name
        rows = rows_of(layout, name, arks[f"{key}_segment{place}"])
        head = np.zeros((2, layout.num_streams), np.int32)
        head[:, 0] = layout.specials[role], layout.specials[f"modality/{modality}"]
        if prefill:
            rows = np.concatenate([head, rows])
        kind = "text" if name == "text_bpe" else "audio"
        segments.append(Segment(kind, modality, not prefill, rows, head, "given" if prefill else "eos", role))
    return Result(key, (Hypothesis(tuple(segments)),), utterance=Utterance(key, ()))


@pytest.mark.parametrize("tree", TREES, ids=lambda path: f"{path.parent.parent.name}-{path.name}")
def test_trees_are_espnets(tree, tmp_path):
    model, expected = tree.parent.parent, tree / "expected"
    data = json.loads((tree / "data.json").read_text(encoding="utf-8"))
    layout, nproc = opuslm_layout(model), 2 if tree.name.endswith("_nproc2") else 1
    prefix = f"trees/{tree.name}/expected"
    keys = [f"{data['task']}_{uid}" for uid in data["examples"]]
    if "dialogue" in data["task"]:
        writer = make_writer(ChatWriter, model, tmp_path, nproc)
        arks = merged_arks(expected / "dialogue", model)
        ranks = [json.loads(path.read_text(encoding="utf-8")) for path in (expected / "dialogue").glob("rank*.json")]
        results = [rebuilt_chat(layout, one, arks) for rank in ranks for one in rank]
    else:
        entries = [entry.split(",")[0].split("/")[-1] for entry in data["data_files"]]
        writer = make_writer(TaskWriter, model, tmp_path, nproc, task=data["task"], entries=entries)
        arks = {entry: merged_arks(expected / entry, model) for entry in entries}
        results = [rebuilt_task(layout, data["task"], entries, arks, uid) for uid in data["examples"]]
    for result in reversed(results):  # whatever the order in which they finish
        store(writer, result)
    writer.finish(keys)
    assert_same_tree(tmp_path, expected, prefix, merged_by_rank=nproc > 1)


def merged_arks(folder, model):
    return {
        key: kaldiio.load_mat(f"{model}/{place}")
        for scp in folder.glob("rank*_token.scp")
        for key, place in (line.split(" ", 1) for line in lines(scp))
    }


# -- edges -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def model():
    return CASES[0].parent.parent


def text_result(layout, key, ids, outcome="ok", reason=""):
    head = np.full((1, layout.num_streams), layout.pad, np.int32)
    head[0, 0] = layout.specials["modality/text_bpe"]
    rows = np.zeros((len(ids), layout.num_streams), np.int32)
    rows[:, 0] = np.asarray(ids, np.int64) + layout.text.start
    segment = Segment("text", "text_bpe", True, rows, head, "eos")
    hypotheses = () if outcome == REFUSED else (Hypothesis((segment,)),)
    utterance = Utterance(key, (Wanted(head, "text_bpe"),))
    return Result(key, hypotheses, outcome, reason, utterance)


def text_writer(model, directory, text, **options):
    journal = Journal(directory, {})
    return TaskWriter(
        directory, opuslm_layout(model), journal, None, lambda ids: text, task="textlm", entries=["text"], **options
    )


@pytest.mark.parametrize("breaker", ["\n", "\r", "\r\n", "\x85", "\u2028", "\u2029"])
def test_a_line_break_in_a_text_does_not_break_the_file(model, tmp_path, breaker):
    writer = text_writer(model, tmp_path, f"one{breaker}two")
    store(writer, text_result(writer.layout, "textlm_a", [1, 2]))
    store(writer, text_result(writer.layout, "textlm_b", [3]))
    writer.finish(["textlm_a", "textlm_b"])
    escaped = breaker.encode("unicode_escape").decode()
    expected = f"textlm_a_sample0 one{escaped}two\ntextlm_b_sample0 one{escaped}two\n"
    assert (tmp_path / "text" / "text").read_bytes().decode() == expected
    assert writer.notes[BREAKS] == 2 * len(breaker)
    assert [record.result[0][2] for record in writer.journal.records.values()] == [f"one{breaker}two"] * 2


def test_control_characters_that_espnet_writes_stay(model, tmp_path):
    text = "a\x00b\tc\x0bd\x1de"
    writer = text_writer(model, tmp_path, text)
    store(writer, text_result(writer.layout, "textlm_a", [1]))
    writer.finish(["textlm_a"])
    assert (tmp_path / "text" / "rank0_text").read_bytes() == f"textlm_a_sample0 {text}\n".encode()
    assert not writer.notes[BREAKS]


def test_no_tokens_at_all_are_written_and_read_back(model, tmp_path):
    writer = text_writer(model, tmp_path, "")
    store(writer, text_result(writer.layout, "textlm_a", []))
    store(writer, text_result(writer.layout, "textlm_b", [7, 8]))
    writer.finish(["textlm_a", "textlm_b"])
    arks = kaldiio.load_scp(str(tmp_path / "text" / "text_token.scp"))
    assert [arks[f"textlm_{k}_sample0"].tolist() for k in "ab"] == [[], [7, 8]]


def test_results_that_are_not_gone_on_with_are_gone_when_the_next_run_begins(model, tmp_path):
    """Killed in the middle, it would look finished, with texts of other settings."""
    layout, files = opuslm_layout(model), ("rank0_text", "rank1_text", "rank1_text_token.ark", "text", "text_token.scp")
    writer = text_writer(model, tmp_path, "words", nproc=2)
    store(writer, text_result(layout, "textlm_u", [1, 2]))
    writer.finish(["textlm_u"])
    writer.journal.close()
    (tmp_path / "text" / "own").write_text("", encoding="utf-8")
    same = text_writer(model, tmp_path, "words")
    same.begin()
    same.journal.close()
    assert all((tmp_path / "text" / name).is_file() for name in files)
    other = Journal(tmp_path, {"seed": 1})
    again = TaskWriter(tmp_path, layout, other, None, None, task="textlm", entries=["text"])
    assert all((tmp_path / "text" / name).is_file() for name in files), "before the engine is there, nothing is lost"
    again.begin()
    assert [path.name for path in (tmp_path / "text").iterdir()] == ["own"]


def test_a_refused_key_is_in_the_journal_and_in_no_file(model, tmp_path):
    writer = text_writer(model, tmp_path, "x", nproc=2)
    store(writer, text_result(writer.layout, "textlm_a", [1]))
    assert store(writer, text_result(writer.layout, "textlm_b", [], REFUSED, "too long")).reason == "too long"
    store(writer, text_result(writer.layout, "textlm_c", [1]))
    writer.finish(["textlm_a", "textlm_b", "textlm_c"])
    # The refused example keeps its number: a and c are the first and the third, both of rank 1.
    assert lines(tmp_path / "text" / "rank1_text") == ["textlm_a_sample0 x", "textlm_c_sample0 x"]
    assert lines(tmp_path / "text" / "rank0_text") == []
    assert [json.loads(line)["outcome"] for line in lines(writer.journal.path)[1:]] == ["ok", "refused", "ok"]


def test_codes_out_of_range_are_counted_and_do_not_stop_the_writer(model, tmp_path):
    layout = opuslm_layout(model)
    rows = np.zeros((12, layout.num_streams), np.int32)
    rows[:] = [span.start for span in layout.streams]
    rows[3, 2] = layout.pad  # ESPnet raises an IndexError here
    head = rows[:1] * 0
    head[0, 0] = layout.specials["modality/codec_ssl"]
    segment = Segment("audio", "codec_ssl", True, rows, head, "eos")
    result = Result("t_u", (Hypothesis((segment,)),), utterance=Utterance("t_u", (Wanted(head, "codec_ssl"),)))
    writer = make_writer(TaskWriter, model, tmp_path, task="t", entries=["wav.scp"])
    assert store(writer, result).outcome == "ok"
    assert writer.notes[OUTSIDE] == 1
    assert (tmp_path / "wav.scp" / "t_u_sample0.wav").is_file()


@pytest.mark.parametrize("key", ["t_../../evil", "t_a/b", "t_" + "x" * 300, "t_\u00e9" * 100])
def test_ids_never_leave_the_output_directory(model, tmp_path, key):
    layout = opuslm_layout(model)
    rows = np.tile(np.array([[span.start for span in layout.streams]], np.int32), (2, 1))
    head = rows[:1] * 0
    head[0, 0] = layout.specials["modality/codec_ssl"]
    segment = Segment("audio", "codec_ssl", True, rows, head, "eos")
    result = Result(key, (Hypothesis((segment,)),), utterance=Utterance(key, (Wanted(head, "codec_ssl"),)))
    out = tmp_path / "deep" / "out"
    writer = make_writer(TaskWriter, model, out, task="t", entries=["wav.scp"])
    assert store(writer, result).outcome == "ok"
    writer.finish([key])
    assert [p for p in tmp_path.rglob("*.wav") if p.parent != out / "wav.scp"] == []
    (line,) = lines(out / "wav.scp" / "wav.scp")
    name, _, path = line.partition(" ")
    assert name == f"{key}_sample0" and soundfile.info(path).frames == 640


def test_an_audio_reference_loses_its_eos_and_a_text_reference_keeps_it(model, tmp_path):
    layout = opuslm_layout(model)

    def given(modality, content):
        rows = np.zeros((len(content) + 2 + 1 + 8, layout.num_streams), np.int32)
        rows[0, 0], rows[1, 0] = layout.specials["assistant"], layout.specials[f"modality/{modality}"]
        rows[2 : 2 + len(content)] = content
        rows[2 + len(content), 0] = layout.specials["eos"]
        kind = "text" if modality == "text_bpe" else "audio"
        return Segment(kind, modality, False, rows, rows[:0], "given", "assistant")

    frame = np.array([[span.start + 1 for span in layout.streams]], np.int32)
    text = np.zeros((1, layout.num_streams), np.int32)
    text[0, 0] = layout.text.start + 3
    segments = (given("codec_ssl", frame), given("text_bpe", text))
    writer = make_writer(ChatWriter, model, tmp_path)
    store(writer, Result("d_x", (Hypothesis(segments),), utterance=Utterance("d_x", ())))
    writer.finish(["d_x"])
    arks = kaldiio.load_scp(str(tmp_path / "dialogue" / "dialogue_token.scp"))
    assert arks["d_x_segment0"].size == layout.num_streams
    assert arks["d_x_segment1"].tolist() == [3, layout.specials["eos"] - layout.text.start]
    assert soundfile.info(tmp_path / "dialogue" / "d_x_segment0.wav").frames == 320
