"""What is damaged between two runs is decoded again, and said: never a result that is silently another one."""

import logging
import random
import shutil
from collections import Counter
from pathlib import Path

import kaldiio
import numpy as np
import pytest
import scripted_job
from conftest import golden_models
from golden_layouts import opuslm_layout

from espnet2_vllm import backends
from espnet2_vllm.audio_format import AudioFormat
from espnet2_vllm.bin.job import run_job
from espnet2_vllm.io.journal import Journal
from espnet2_vllm.io.results import Speech
from espnet2_vllm.io.results_opuslm import TaskWriter
from espnet2_vllm.plan import Hypothesis, Result, RowResult, Segment

COUNT = 6
DRAWS = 120
LAYOUT = opuslm_layout(golden_models("opuslm")[0])
WAV, ARK = AudioFormat(), AudioFormat("flac.ark")


def result_of(utterance):
    rng = np.random.default_rng(int(utterance.key.rpartition("_u")[2]))
    rows = np.stack([rng.integers(span.start, span.stop, 12) for span in LAYOUT.streams], 1).astype(np.int32)
    given, wanted = utterance.parts
    segments = (
        Segment("text", "text_bpe", False, given.rows, given.rows[:0], "given"),
        Segment("audio", "codec_ssl", True, rows, wanted.header, "eos", emitted=rows),
    )
    made = RowResult(rows, rng.normal(size=rows.shape).astype(np.float32), rows % 2 == 0, "stop")
    return Result(utterance.key, (Hypothesis(segments, ((None, made),)),), utterance=utterance)


def decode(out, form):
    """One run of the job; how many utterances it has taken over."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "decode", lambda engine, items, config, **options: map(result_of, items))
        journal, speech = Journal(out, {"seed": 0}), Speech(scripted_job.Codec(), form=form)
        text = lambda ids: " ".join(map(str, ids))  # noqa: E731
        entries = {"task": "tts", "entries": ["text", "wav.scp"], "with_scores": True}
        writer = TaskWriter(out, LAYOUT, journal, speech, text, 2, **entries)
        items = ((writer, scripted_job.utterance_of(LAYOUT, number)) for number in range(COUNT))
        try:
            tally = run_job(None, None, [writer], items, speech=speech, seed=0, total=COUNT)
        finally:
            speech.close()
            journal.close()
    assert not tally.failed
    return tally.taken_over


def results(out):
    """All that a reader finds: text lines, token arrays, samples and scores, wherever they stand in an archive."""
    found = {}
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        if path.is_file() and not name.startswith(".journal/"):
            if path.suffix == ".npz":
                with np.load(path) as arrays:
                    found[name] = {key: arrays[key].tolist() for key in arrays}
            elif name.endswith("token.scp"):
                found[name] = {key: array.tolist() for key, array in kaldiio.load_scp(str(path)).items()}
            elif path.name.endswith("wav.scp"):
                lines = [line.split(" ", 1) for line in path.read_text().splitlines()]
                found[name] = {key: sound_at(place) for key, place in lines}
            elif path.suffix not in (".ark", ".wav"):
                found[name] = path.read_bytes()
    return found


def sound_at(place):
    import soundfile

    if ":" in Path(place).name:
        rate, samples = kaldiio.load_mat(place)
        return rate, samples.tolist()
    samples, rate = soundfile.read(place, dtype="int16")
    return rate, samples.tolist()


def harm(rng, path):
    """One flipped bit, a cut, a byte more, or no file at all; what it was."""
    data = bytearray(path.read_bytes())
    kind = rng.choices(["flip", "cut", "more", "gone"], [8, 2, 1, 1])[0]
    if kind == "gone" or not data:
        path.unlink()
        return "gone"
    if kind == "flip":
        place = rng.randrange(len(data))
        data[place] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[rng.randrange(len(data)) :]
    else:
        data += bytes([rng.randrange(256)])
    path.write_bytes(data)
    return kind


@pytest.mark.parametrize("form", [WAV, ARK], ids=["wavs", "arks"])
def test_no_damage_goes_unnoticed(form, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.WARNING)
    seed = random.randrange(10**6)
    print("seed", seed)
    rng, out, kept = random.Random(seed), Path("out"), Path("kept")
    assert decode(out, form) == 0
    expected = results(out)
    assert decode(out, form) == COUNT and results(out) == expected
    shutil.copytree(out, kept)
    harmed = Counter()
    for draw in range(DRAWS):
        shutil.rmtree(out)
        shutil.copytree(kept, out)
        files = [path for path in sorted(out.rglob("*")) if path.is_file() and path.name not in ("lock", "holder.json")]
        kinds = sorted({path.parent.name + path.suffix for path in files})
        wanted = rng.choice(kinds)  # each kind as often as another, however many files it has
        path = rng.choice([path for path in files if path.parent.name + path.suffix == wanted])
        what = f"seed {seed}, draw {draw}: {path}: {harm(rng, path)}"
        caplog.clear()
        taken_over = decode(out, form)
        assert results(out) == expected, what
        if path.suffix in (".wav", ".npz"):
            assert taken_over == COUNT - 1 and "decoded again" in caplog.text, what
        else:
            assert taken_over == COUNT or caplog.text, what
        harmed[wanted] += 1
        assert decode(out, form) == COUNT, what
    assert len(harmed) == len(kinds), harmed
