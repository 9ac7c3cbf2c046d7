"""egs/digits: what the small models learn from is what the decoder feeds and draws."""

import random
import sys
from pathlib import Path

import numpy as np
import pytest

from espnet2_vllm.decoding import load_decoding
from espnet2_vllm.drive import bagpiper_rules, drive
from espnet2_vllm.layout import Layout
from espnet2_vllm.plan import RowResult
from espnet2_vllm.prompt.bagpiper import bagpiper_utterance
from espnet2_vllm.prompt.opuslm import Facts, Turn, opuslm_sequence, opuslm_utterance
from espnet2_vllm.prompt.tasks import TASKS

LOCAL = Path(__file__).parents[2] / "egs/digits/speechlm1/local"
SEED = 20
BOOKS, ENTRIES, UNITS, TEXT = 4, 6, 5, 300


@pytest.fixture(scope="module", autouse=True)
def recipe():
    sys.path.insert(0, str(LOCAL))
    yield
    sys.path.remove(str(LOCAL))


class Letters:
    """A token a character."""

    def encode_bagpiper(self, text):
        return [ord(letter) for letter in text]

    encode_opuslm = encode_bagpiper


def spoken(text, frames, rng, speaker="tts1"):
    from lm_rows import Spoken

    codes = rng.integers(0, ENTRIES, (frames, BOOKS))
    return Spoken(f"{speaker}-digits-0", text, codes, rng.integers(1, UNITS, frames))


def bagpiper_layout():
    return Layout.bagpiper(TEXT, [ENTRIES + 1] * BOOKS)


def opuslm_layout():
    from lm_export import opuslm_special_names

    names = [*opuslm_special_names(), *(f"x{i}" for i in range(UNITS + BOOKS * ENTRIES + TEXT))]
    ssl, codec = (256, 256 + UNITS), (256 + UNITS, 256 + UNITS + BOOKS * ENTRIES)
    bias = {"special_token": (0, 256), "ssl": ssl, "codec": codec, "text_bpe": (codec[1], codec[1] + TEXT)}
    return Layout.opuslm(names, bias, BOOKS + 1)


def allowed(constraint, layout):
    return {i for span in constraint.primary for i in range(*span)}


@pytest.mark.parametrize("history", [False, True])
def test_bagpiper_rows_are_those_that_the_decoder_feeds(history):
    from lm_rows import bagpiper_example

    rng = np.random.default_rng(SEED)
    layout, tokenizer = bagpiper_layout(), Letters()
    question, reply = spoken("what", 5, rng), spoken("four", 7, rng)
    before = [["user", "text", "hi"], ["assistant", "text", "ho"], ["assistant", "audio", reply]] if history else []
    given = [["system", "text", "answer"], *before, ["user", "audio", question]]
    messages = [*given, ["assistant", "text", "four"], ["assistant", "audio", reply]]
    example = bagpiper_example(layout, tokenizer, messages, "dialogue")

    # The prompt, as decoding makes it of the same conversation.
    def encode(clips):
        from espnet2_vllm.codes import audio_rows

        return [audio_rows(layout, codes) for codes, _ in clips]

    plain = [[role, kind, (c.codes, 16000) if kind == "audio" else c] for role, kind, c in given]
    utterance = bagpiper_utterance(layout, tokenizer, plain, key="u", encode_audio=encode, upto_assistant=False)
    prompt = np.concatenate([utterance.parts[0].rows, utterance.parts[1].header])
    assert np.array_equal(example.rows[: len(prompt)], prompt)

    # The answer, through the rules: emitted as a model would, with codes in the row that ends the speech.
    block = {"temperature": 0.0, "topk": 1, "cfg": 1, "max_step": 99}
    rules = bagpiper_rules(layout, load_decoding({"audio": block, "text": block}, "bagpiper"))
    state = rules.start()
    for index in range(len(prompt), len(example.rows)):
        row, wanted = example.rows[index], example.targets[index]
        constraint = rules.constraint(state)
        if constraint.forced is None:
            assert int(row[0]) in allowed(constraint, layout), f"row {index} of stream 0 is masked when it is decoded"
            assert constraint.phase == example.phases[index]
            assert wanted[0]
        stops = constraint.audio and int(row[0]) in layout.end_tokens
        chosen = [int(row[0]), *([layout.streams[s].start + 1 for s in range(1, BOOKS)] if stops else row[1:].tolist())]
        if constraint.audio and not stops:
            for stream, candidates in enumerate(layout.auxiliary_candidates(), 1):
                assert chosen[stream] in candidates
            assert wanted.all()
        state, step = rules.advance(state, tuple(chosen))
        assert step.fed == tuple(row.tolist()), f"row {index} is not fed as it was learnt"
        if not stops:
            assert tuple(wanted.tolist()) == tuple(not forced for forced in step.forced)
        assert step.done == (index == len(example.rows) - 1)
    assert not example.targets[: example.spoken].all(1).any() or history
    assert [words for *_, words in example.said][-1] == tuple(map(ord, "four"))


def test_the_unconditional_form_is_what_guidance_feeds():
    from lm_rows import bagpiper_example, without_condition

    layout, rng = bagpiper_layout(), np.random.default_rng(SEED)
    reply = spoken("two", 6, rng)
    messages = [["user", "text", "one"], ["assistant", "text", "two"], ["assistant", "audio", reply]]
    whole = bagpiper_example(layout, Letters(), messages, "dialogue")
    bare = without_condition(whole, layout)
    assert int(whole.rows[whole.spoken, 0]) == layout.specials["audio"]
    assert not bare.rows[: whole.spoken].any() and len(bare) == len(whole)
    assert np.array_equal(bare.rows[whole.spoken :], whole.rows[whole.spoken :])
    first = whole.spoken + 1
    assert np.array_equal(bare.targets[first:], whole.targets[first:]) and not bare.targets[:first].any()
    assert bare.said == whole.said[-1:]


@pytest.mark.parametrize("task", ["codec_ssl_tts", "codec_ssl_asr", "audio_dialogue"])
def test_opuslm_rows_are_those_that_the_decoder_feeds(task):
    from lm_rows import opuslm_example, spliced

    rng = np.random.default_rng(SEED)
    layout, tokenizer = opuslm_layout(), Letters()
    facts = Facts(6, True, 400, BOOKS + 1)
    said, voice = spoken("two four", 9, rng), spoken("one", 4, rng)
    turns = [
        Turn("user", "codec_ssl", False, voice),
        Turn("assistant", "text_bpe", True, "two four"),
        Turn("assistant", "codec_ssl", True, said),
    ]
    entries = {
        "codec_ssl_tts": {"text": "two four", "utt2spk": voice, "wav.scp": said},
        "codec_ssl_asr": {"wav.scp": said, "text": "two four"},
        "audio_dialogue": {"dialogue": turns},
    }[task]
    example = opuslm_example(layout, tokenizer, TASKS[task], entries, facts, random.Random(SEED))

    def plain(content):
        if isinstance(content, list):
            return [turn._replace(content=plain(turn.content)) for turn in content]
        return content if isinstance(content, str) else spliced(layout, content)

    codes = {name: plain(content) for name, content in entries.items()}
    rows = opuslm_sequence(layout, tokenizer, TASKS[task], codes, facts, random.Random(SEED))
    utterance = opuslm_utterance(layout, rows, TASKS[task], key="u")
    block = {"search_algo": "greedy_search", "length_method": "absolute", "maxlen": 99, "minlen": 1}
    speech = {**block, "search_algo": "topk_sampling", "sampling_temperature": 1.0, "topk": 1}
    config = load_decoding(
        {"codec_ssl": speech, "text_bpe": {**block, "sampling_temperature": 1.0, "topk": 1}}, "opuslm"
    )
    driver = drive(layout, utterance, config)
    request, start = next(driver), 0
    while True:
        # The prompt of a first segment is exactly what was learnt from; later ones hold one more row for each answer before.
        start = start or len(request.prompt)
        if start == len(request.prompt):
            assert np.array_equal(request.prompt, example.rows[:start])
        stop = start + int(
            np.flatnonzero(example.phases[start:] != example.phases[start])[:1].sum() or len(example.rows) - start
        )
        answer = np.concatenate([example.rows[start:stop], np.zeros((1, BOOKS + 1), np.int32)])
        targets = example.targets[start:stop]
        state = request.rules.start()
        for index, row in enumerate(answer):
            chosen = tuple(row.tolist())
            state, step = request.rules.advance(state, chosen)
            assert step.emitted == chosen
            if index < len(targets) and index <= int(np.flatnonzero(targets[:, 0])[-1]):
                assert tuple(targets[index].tolist()) == tuple(not forced for forced in step.forced)
        result = RowResult(answer, np.zeros(answer.shape, np.float32), np.zeros(answer.shape, bool))
        try:
            request = driver.send(result)
        except StopIteration as done:
            hypothesis = done.value
            break
        start = stop + 2
    last = hypothesis.segments[-1]
    wanted = plain(said) if task != "codec_ssl_asr" else None
    if wanted is None:
        assert last.rows[:, 0].tolist() == [layout.text.start + ord(letter) for letter in "two four"]
    else:
        assert np.array_equal(last.rows, wanted + layout.streams[0].start)
    assert last.end == "eos"


def test_tokenizer_writes_any_text_without_id_zero(tmp_path):
    from lm_tokenizer import make_tokenizer

    from espnet2_vllm.text import TextTokenizer

    make_tokenizer(tmp_path, 384)
    tokenizer = TextTokenizer(tmp_path)
    for text, back in (
        ("three one four", None),
        ("Three 1 FOUR", "three one four"),
        ("c a t", None),
        ("wörter & 漢字", None),
    ):
        ids = tokenizer.encode_bagpiper(text)
        assert 0 not in ids and max(ids) < 384
        assert tokenizer.decode_bagpiper(ids) == (back or text)
        assert tokenizer.decode_opuslm(tokenizer.encode_opuslm(text)) == (back or text)
    assert len(tokenizer.encode_bagpiper("three one four")) == 3


def test_what_is_said_next_is_marked_from_before_the_first_sound():
    from dataclasses import replace

    from lm_rows import NOTHING, bagpiper_example, without_condition

    layout, rng = bagpiper_layout(), np.random.default_rng(SEED)
    reply = replace(spoken("ab", 6, rng), ends=(2, 5))  # rows of the speech by which a and b have been heard
    messages = [["user", "text", "ab"], ["assistant", "audio", reply]]
    example = bagpiper_example(layout, Letters(), messages, "text_to_audio")
    a, b, nothing_left = ord("a"), ord("b"), layout.text.size
    marked = [a] * 3 + [b] * 3 + [nothing_left] * (6 + BOOKS - 1 - 5)
    start = example.spoken
    assert example.coming[start : start + len(marked)].tolist() == marked
    assert (example.coming[:start] == NOTHING).all() and (example.coming[start + len(marked) :] == NOTHING).all()
    assert without_condition(example, layout).coming is None
