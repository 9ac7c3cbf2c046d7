"""Units of work have exactly the rows that were asked for, whatever the model prefers."""

import numpy as np
import pytest
from bench_models import FAMILIES

from espnet2_vllm.backends.pytorch import PyTorchEngine
from espnet2_vllm.bench.workload import PlainText, parse_workload, plain_unit, random_prompt, run_units, speech_unit
from espnet2_vllm.errors import ConfigError, DataError
from espnet2_vllm.plan import RowResult
from espnet2_vllm.protocol import Sampling

WORKLOADS = ("audio", "text", "text-audio:0.5", "text-audio:3")


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(request, tmp_path_factory):
    geometry = FAMILIES[request.param]()
    engine = PyTorchEngine(geometry.write(tmp_path_factory.mktemp("model")), device="cpu", load_format="dummy")
    yield geometry, engine
    engine.close()


def unit(geometry, workload, rows, seed=0, **options):
    rng = np.random.default_rng(seed)
    prompt = random_prompt(geometry.layout, rng, 6, workload.modalities[0])
    return speech_unit(geometry.layout, workload, f"u{seed}", prompt, rows, Sampling(0.8, 5), seed=seed, **options)


def is_audio(layout, rows):
    """Per row whether an auxiliary stream holds a code."""
    spans = layout.code_spans[1:]
    return [any(span.holds(token) for token, span in zip(row[1:], spans, strict=True)) for row in rows.tolist()]


@pytest.mark.parametrize("text", WORKLOADS)
@pytest.mark.parametrize("rows", [17, 30])
def test_a_unit_has_as_many_rows_as_asked_for(model, text, rows):
    geometry, engine = model
    workload = parse_workload(text)
    done = run_units(engine, [unit(geometry, workload, rows, seed) for seed in (1, 2)])
    for seed in (1, 2):
        results = [result for request, result in done if request.request_id.partition("/")[0] == f"u{seed}"]
        assert sum(len(result.rows) for result in results) == rows
        assert any(is_audio(geometry.layout, np.concatenate([r.rows for r in results]))) == (text != "text")


@pytest.mark.parametrize("text", ["audio", "text-audio:2"])
def test_the_first_frame_is_whole_at_the_row_that_is_said(model, text):
    geometry, engine = model
    layout, workload, rows = geometry.layout, parse_workload(text), 25
    (_, result) = run_units(engine, [unit(geometry, workload, rows)])[-1]
    content = workload.content_rows(layout, rows)
    last = rows if layout.family == "bagpiper" else content["audio"]
    assert len(result.rows) == last
    first = workload.first_codes(layout, last)
    # Row r of the segment carries stream s of frame r - s.
    begin = first - (layout.num_streams - 1)
    assert begin == len(result.rows) - content["audio"]
    if layout.family == "opuslm":
        assert (result.rows[first - 1, -1] == layout.pad) and (result.rows[first, -1] != layout.pad)


def test_the_ratio_is_text_rows_for_one_audio_row(model):
    geometry, _ = model
    content = parse_workload("text-audio:2").content_rows(geometry.layout, 303)
    assert content["text"] == 2 * content["audio"]


def test_later_segments_stand_on_earlier_ones(model):
    geometry, engine = model
    (first, rows), *others = run_units(engine, [unit(geometry, parse_workload("text-audio"), 20)])
    assert len(others) == (geometry.layout.family == "opuslm")  # a Bagpiper answer is one request
    for second, _ in others:
        history = np.concatenate([first.prompt, rows.rows])
        assert np.array_equal(second.prompt[: len(history)], history)


def test_too_few_rows_are_refused(model):
    layout = model[0].layout
    least = 5 if layout.family == "bagpiper" else 2 * layout.num_streams
    assert parse_workload("text-audio").content_rows(layout, least)
    with pytest.raises(ConfigError, match=f"at least {least} are needed"):
        parse_workload("text-audio").content_rows(layout, least - 1)


@pytest.mark.parametrize("text", ["audio:2", "text-audio:", "text-audio:0", "text-audio:x", "speech", ""])
def test_unknown_workloads_are_refused(text):
    with pytest.raises(ConfigError, match="expected audio, text, or text-audio"):
        parse_workload(text)


class Script:
    """Gives back every request at once; refuses those of one name."""

    def __init__(self, refused: str) -> None:
        self.refused, self.waiting, self.aborted = refused, [], []

    def submit(self, request):
        assert isinstance(request.rules, PlainText)
        self.waiting.append(request)

    def step(self):
        request = self.waiting.pop(0)
        rows = np.zeros((request.rules.max_rows, 1), np.int32)
        error = DataError("no room") if request.request_id == self.refused else None
        return [(request.request_id, error or RowResult(rows, rows.astype(np.float32), rows.astype(bool)))]

    def abort(self, ids):
        self.aborted += ids


def test_a_refused_request_ends_the_run_and_the_others_are_aborted():
    units = [plain_unit(name, np.zeros((2, 1), np.int32), 3, Sampling()) for name in "abc"]
    engine = Script(refused="b")
    with pytest.raises(DataError, match="no room"):
        run_units(engine, units)
    assert engine.aborted == ["c"]
    units = [plain_unit(name, np.zeros((2, 1), np.int32), 3, Sampling()) for name in "abc"]
    assert [len(result.rows) for _, result in run_units(Script(refused=""), units)] == [3, 3, 3]
