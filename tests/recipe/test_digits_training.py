"""egs/digits: what the small models are fed while they are trained."""

import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_digits_rows import Letters, bagpiper_layout, spoken

LOCAL = Path(__file__).parents[2] / "egs/digits/speechlm1/local"
SEED = 11
SHARES = {"text_to_audio": 0.5, "audio_to_text": 0.5}


@pytest.fixture(scope="module", autouse=True)
def recipe():
    sys.path.insert(0, str(LOCAL))
    yield
    sys.path.remove(str(LOCAL))


def corpus(counts, seed=SEED):
    rng = np.random.default_rng(seed)
    speakers = [speaker for speaker, count in counts.items() for _ in range(count)]
    made = [spoken(f"one {number}", int(rng.integers(5, 60)), rng, who) for number, who in enumerate(speakers)]
    return [replace(one, uid=f"{one.speaker}-digits-{number:05d}") for number, one in enumerate(made)]


def tasks_of(utterances):
    from lm_data import BagpiperTasks, Pool

    return BagpiperTasks(bagpiper_layout(), Letters(), Pool(utterances, random.Random(SEED)), SHARES, 0.1)


@pytest.mark.parametrize("order", range(4))
def test_what_is_held_out_can_be_drawn_from_however_few_there_are(order):
    from lm_data import held_out

    utterances = corpus({"tts1": 2, "tts2": 30, "asr00": 2})
    random.Random(order).shuffle(utterances)
    parts = held_out(utterances, 50)
    assert Counter(map(id, parts[0] + parts[1])) == Counter(map(id, utterances))
    for part in parts:
        tasks = tasks_of(part)
        assert {tasks.draw().task for _ in range(40)} == set(SHARES)


@pytest.mark.parametrize("counts", [{}, {"tts1": 1, "asr00": 9}, {"tts1": 9, "asr00": 1}, {"tts2": 9, "asr00": 9}])
def test_too_few_utterances_are_told(counts):
    from lm_data import held_out

    with pytest.raises(ValueError, match=f"of {sum(counts.values())} utterances .*--train_utterances"):
        held_out(corpus(counts), 50)


def test_one_in_so_many_is_held_out():
    from lm_data import held_out

    utterances = corpus({"tts1": 100, "asr00": 100})
    random.Random(SEED).shuffle(utterances)
    held, others = held_out(utterances, 50)
    assert held[:4] == utterances[:4] and len(held) <= 6 and others[-100:] == utterances[-100:]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_a_function_of_the_seed(workers):
    from lm_data import Batches, loader

    def drawn(seed):
        found = iter(loader(Batches(tasks_of(corpus({"tts1": 30, "asr00": 30})), 400, 0.1, seed), workers))
        return [next(found) for _ in range(4)]

    first, again, other = drawn("a"), drawn("a"), drawn("b")
    for one, same in zip(first, again, strict=True):
        assert torch.equal(one.noisy, same.noisy) and one.tasks == same.tasks and len(one) <= 400
    assert any(
        one.rows.shape != two.rows.shape or not torch.equal(one.rows, two.rows)
        for one, two in zip(first, other, strict=True)
    )
    if workers:
        assert not torch.equal(first[0].rows, first[1].rows), "every process draws others"


def test_noise_is_in_the_codes_of_answers_only_and_not_in_what_is_learnt():
    from lm_data import Batches
    from lm_model import Batch
    from lm_rows import bagpiper_example

    layout, rng = bagpiper_layout(), np.random.default_rng(SEED)
    answer, question = spoken("hi", 400, rng), spoken("what", 400, rng)
    messages = [["user", "audio", question], ["assistant", "text", "ho"], ["assistant", "audio", answer]]
    example = bagpiper_example(layout, Letters(), messages, "dialogue")
    clean, noisy = Batch([example]), Batch([example], 0.25, SEED)
    assert torch.equal(clean.rows, clean.noisy) and torch.equal(clean.rows, noisy.rows)
    changed = (noisy.noisy != noisy.rows)[0].numpy()
    assert not changed[: example.spoken + 1].any(), "of the prompt and the text of the answer"
    for stream in range(layout.num_streams):
        share = changed[example.spoken + 1 :, stream].mean()
        assert 0.1 < share < 0.25, f"stream {stream}: {share}"  # some ids are replaced by their like
        assert set(noisy.noisy[0, :, stream].tolist()) <= set(noisy.rows[0, :, stream].tolist())
    again = next(iter(Batches(tasks_of(corpus({"tts1": 3, "asr00": 3})), 400, 0.0, "a")))
    assert torch.equal(again.rows, again.noisy)


def test_what_has_to_be_predicted_is_found_in_the_row_behind():
    from lm_model import AUXILIARY, COMING, Batch

    from espnet2_vllm.protocol import AUDIO, MODALITY, TEXT

    tasks = tasks_of(corpus({"tts1": 9, "asr00": 9}))
    examples = [tasks.draw() for _ in range(6)]
    batch = Batch(examples)
    for place, example in enumerate(examples):
        for phase in (MODALITY, TEXT, AUDIO):
            rows = [
                row - 1 for row in range(1, len(example)) if example.targets[row, 0] and example.phases[row] == phase
            ]
            assert batch.places[phase][1][batch.places[phase][0] == place].tolist() == rows
        rows = [row - 1 for row in range(1, len(example)) if example.targets[row, 1:].all()]
        assert batch.places[AUXILIARY][1][batch.places[AUXILIARY][0] == place].tolist() == rows
    assert not len(batch.places[COMING][0]), "nothing is aligned yet"
    spans = [range(start, stop) for _, start, stop, _ in batch.said]
    for column, (place, span) in enumerate(zip([place for place, *_ in batch.said], spans, strict=True)):
        rows = batch.stretches[: batch.stretch_lengths[column], column] - place * batch.rows.shape[1]
        assert rows.tolist() == list(span)
    assert batch.words.tolist() == [word for *_, words in batch.said for word in words]


def test_a_stage_that_lacks_what_another_one_makes_says_so(tmp_path):
    from codec_of import codec_files

    with pytest.raises(ValueError, match=r"has 0 files \*epoch.pth, expected one: stage codec"):
        codec_files(tmp_path)
    (tmp_path / "3epoch.pth").touch()
    assert codec_files(tmp_path) == (tmp_path / "config.yaml", tmp_path / "3epoch.pth")


@pytest.mark.parametrize("options", [["--train", "16"], ["--test", "0"], ["--jobs", "0"], ["--jobs", "many"]])
def test_numbers_that_make_no_data_are_usage_errors(options, tmp_path, monkeypatch, capsys):
    pytest.importorskip("espeakng_loader")
    pytest.importorskip("soxr")
    import synthesise

    monkeypatch.setattr(sys, "argv", ["synthesise.py", str(tmp_path / "data"), *options])
    with pytest.raises(SystemExit) as ended:
        synthesise.main()
    assert ended.value.code == 2 and f"argument {options[0]}: " in capsys.readouterr().err
    kinds = {one.uid.split("-")[1] for one in synthesise.plan(17, synthesise._SHARES, test=False, seed=SEED)}
    assert kinds == set(synthesise._SHARES), "of every kind one"


@pytest.mark.parametrize("workers", [0, 2])
def test_words_end_where_they_are_read_off_and_mistakes_are_left_alone(workers):
    """A network that reads a word in every other row, the last one three rows before the end, and hears one utterance wrong."""
    from lm_align import aligned
    from lm_model import Batch

    utterances = [one for one in corpus({"tts1": 12, "tts2": 8, "asr00": 4}) if len(one.codes) > 3 + 2 * len(one.text)]
    tasks = tasks_of(utterances)
    blank, wrong, read = tasks.layout.text.size, utterances[3], {}
    for one in utterances:
        example = tasks.heard(one)
        ((_, start, stop, words),) = Batch([example]).said
        ends = tuple(range(stop - start - 3 - 2 * len(words), stop - start - 3, 2))
        read[one.uid] = example.rows, start, ends, [words[0] + (one is wrong), *words[1:]]

    class Reader:
        layout, emb = tasks.layout, torch.nn.Embedding(1, 1)

        def read(self, rows):
            logits = torch.nn.functional.one_hot(torch.full(rows.shape[:2], blank), blank + 1)
            for place, row in enumerate(rows.numpy()):
                ((start, ends, words),) = [
                    (start, ends, words)
                    for known, start, ends, words in read.values()
                    if np.array_equal(row[: len(known)], known) and not row[len(known) :].any()
                ]
                logits[place, start + np.array(ends), words] = 2
            return logits

    found = aligned(Reader(), utterances, tasks.heard, 500, workers)
    for one, given in zip(found, utterances, strict=True):
        assert one.uid == given.uid
        assert one.ends == (read[one.uid][2] if given.is_target and given is not wrong else None), one.uid
    assert 5 < sum(one.ends is not None for one in found) < len(found) - 1


def test_codes_and_units_of_a_set_are_those_of_each_recording_in_file_order(tmp_path):
    """By processes, by batches of one length, more processes than recordings."""
    kaldiio = pytest.importorskip("kaldiio")
    from clips import Clips
    from dump_codes import dump
    from logmel_units import units_in, units_of

    class Codec:
        hop = 320

        def encode_batch(self, wavs):
            assert len({len(wav) // self.hop for wav in wavs}) == 1, "filled up, the last frames would get other codes"
            return [np.rint(wav[:: self.hop][:, None] * 32768).astype(np.int64) for wav in wavs]

    rng = np.random.default_rng(SEED)
    wavs = {f"u{n}": rng.integers(-9000, 9000, 320 * frames).astype(np.int16) for n, frames in enumerate((40, 31, 40))}
    with kaldiio.WriteHelper(f"ark,scp:{tmp_path}/wav.ark,{tmp_path}/wav.scp") as writer:
        for uid in ("u2", "u0", "u1"):
            writer(uid, (16000, wavs[uid]))
    codes = dump(Codec(), Clips(tmp_path))
    centres = torch.randn(5, 40, generator=torch.Generator().manual_seed(SEED))
    units = units_in(tmp_path, centres, 4)
    assert list(codes) == list(units) == ["u2", "u0", "u1"]
    for uid, wav in wavs.items():
        np.testing.assert_array_equal(codes[uid][:, 0], wav[::320])
        np.testing.assert_array_equal(units[uid], units_of(wav, centres))


def test_an_export_of_nothing_is_refused(monkeypatch, capsys):
    import train_speechlm

    words = ["--config", "c", "--data", "d", "--codes", "e", "--codec", "f", "--out", "g", "--export-only"]
    monkeypatch.setattr(sys, "argv", ["train_speechlm.py", *words])
    with pytest.raises(SystemExit, match="2"):
        train_speechlm.main()
    assert "--export-only: nothing is said to be exported; give --init" in capsys.readouterr().err


def test_the_opuslm_model_without_units_is_refused(monkeypatch):
    import train_speechlm

    config = LOCAL.parent / "conf" / "train_opuslm.yaml"
    command = ["x", "--config", str(config), "--data", "d", "--codes", "c", "--codec", "k", "--out", "o"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match=r"train_opuslm\.yaml .* give --units"):
        train_speechlm.main()
