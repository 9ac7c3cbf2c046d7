"""The delay against ESPnet's, and against itself at every length."""

import json
import random

import numpy as np
import pytest
from conftest import golden_files

from espnet2_vllm import delay
from espnet2_vllm.codes import audio_rows, codec_codes
from espnet2_vllm.errors import DataError
from espnet2_vllm.layout import Layout

SEED = 20240


def _opuslm_cases():
    for path in golden_files("opuslm/functions/delay.npz"):
        with np.load(path) as arrays:
            for name in sorted({key.rsplit(".", 1)[0] for key in arrays}):
                prefix = name + "."
                yield pytest.param({k.removeprefix(prefix): arrays[k] for k in arrays if k.startswith(prefix)}, id=name)


@pytest.mark.parametrize("case", _opuslm_cases())
def test_opuslm_delay_is_espnets(case):
    for i, rows in enumerate(case["in"]):
        if rows.shape[1] == 1:
            # ESPnet's delay of one stream is empty (a defect: it cuts the last -0 rows); ours changes nothing.
            assert case["delayed"][i].size == case["delayed_pad7"][i].size == case["loss_mask_delayed"][i].size == 0
            np.testing.assert_array_equal(delay.shift(rows), rows)
        else:
            np.testing.assert_array_equal(delay.shift(rows), case["delayed"][i])
            np.testing.assert_array_equal(delay.shift(rows, 7), case["delayed_pad7"][i])
            np.testing.assert_array_equal(delay.shift(case["loss_mask_in"][i]), case["loss_mask_delayed"][i])
        if "inverse_of_in" in case:
            np.testing.assert_array_equal(delay.undo(rows), case["inverse_of_in"][i])


def _bagpiper_cases():
    for path in golden_files("bagpiper/functions/delay.npz"):
        info = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        with np.load(path) as arrays:
            for name in sorted({key[: key.index("_", key.index("_") + 1)] for key in arrays}):
                case = {k.removeprefix(name + "_"): arrays[k] for k in arrays if k.startswith(name + "_")}
                intervals = info[name.split("_")[0]]["intervals"]
                yield pytest.param(info["codebook_size"], intervals, case, id=name)


@pytest.mark.parametrize(("codebook", "intervals", "case"), _bagpiper_cases())
def test_bagpiper_delay_and_codes_are_espnets(codebook, intervals, case):
    streams = len(intervals)
    layout = Layout.bagpiper(10, [codebook + 1] * streams)
    start = layout.streams[0].start  # the recorded ids are local to the audio block
    assert [[a + start, b + start] for a, b in intervals] == [list(s) for s in layout.streams]
    codes, local = case["codes"], case["local_ids"]
    pads = [a for a, _ in intervals]
    np.testing.assert_array_equal(local, codes + np.array(pads) + 1)
    np.testing.assert_array_equal(delay.interleave(local, pads), case["interleaved"])
    np.testing.assert_array_equal(delay.undo(case["interleaved"]), case["deinterleaved"])
    rows = audio_rows(layout, codes)
    assert rows.dtype == np.int32
    np.testing.assert_array_equal(rows, case["interleaved"] + start)
    decoded, outside = codec_codes(layout, rows)
    assert outside == 0
    np.testing.assert_array_equal(decoded, case["decoded_codes"])
    np.testing.assert_array_equal(decoded, codes)
    assert [len(decoded)] == case["decoded_length"].tolist()
    np.testing.assert_array_equal(delay.undo(case["any_rows"]), case["any_deinterleaved"])
    decoded, outside = codec_codes(layout, case["any_rows"] + start)
    np.testing.assert_array_equal(decoded, case["any_decoded_codes"])
    assert outside == int((case["any_deinterleaved"] != decoded + np.array(pads) + 1).sum())


@pytest.mark.parametrize("streams", range(1, 10))
def test_round_trip_at_every_length(streams):
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED + streams)
    for length in range(2 * streams + 1):
        frames = rng.integers(1, 1000, size=(length, streams)).astype(np.int32)
        pads = rng.integers(-9, 0, size=streams).tolist()
        rows = delay.interleave(frames, pads)
        assert rows.shape == ((length + streams - 1) if length else 0, streams)
        np.testing.assert_array_equal(delay.undo(rows), frames)
        for r, row in enumerate(rows):
            expected = [frames[r - s, s] if 0 <= r - s < length else pads[s] for s in range(streams)]
            assert row.tolist() == expected
        shifted = delay.shift(frames, -1)
        assert shifted.shape == frames.shape and shifted.dtype == frames.dtype
        for r, row in enumerate(shifted):
            assert row.tolist() == [frames[r - s, s] if r >= s else -1 for s in range(streams)]
        # With S - 1 pad rows behind them nothing of the frames is cut away.
        padded = np.concatenate([frames, np.full((streams - 1, streams), -1, dtype=np.int32)])
        np.testing.assert_array_equal(delay.undo(delay.shift(padded, -1)), frames)


@pytest.mark.parametrize("streams", range(1, 10))
def test_a_scripted_stream_comes_back_in_order(streams):
    """Emitting ``stream * 1000 + row`` shows an off-by-one in any stream as a number."""
    rows = np.array([[s * 1000 + r for s in range(streams)] for r in range(30)])
    frames = delay.undo(rows)
    assert len(frames) == 30 - streams + 1
    for t, frame in enumerate(frames):
        assert frame.tolist() == [s * 1000 + t + s for s in range(streams)]


@pytest.mark.parametrize("streams", range(1, 10))
def test_streaming_undo_equals_undo(streams):
    print(f"seed {SEED}")
    draw = random.Random(SEED + streams)
    rng = np.random.default_rng(SEED + streams)
    for length in range(2 * streams + 3):
        rows = rng.integers(0, 1000, size=(length, streams))
        expected = delay.undo(rows)
        for _ in range(5):
            undo, got, position = delay.StreamingUndo(streams), [np.empty((0, streams), dtype=np.int64)], 0
            while position < length:
                step = draw.randint(0, 3)
                got.append(undo.push(rows[position : position + step]))
                position += step
                complete = sum(map(len, got))
                assert complete == max(min(position, length) - streams + 1, 0)
            np.testing.assert_array_equal(np.concatenate(got), expected)


def test_codes_of_opuslm_frames():
    bias = {"text_bpe": [400, 500], "ssl": [256, 266], "codec": [266, 290]}
    names = ["<pad>", "<unk>", "<sos/eos>", "<system_prompt>", "<user_input>", "<assistant_output>"]
    names += ["<codec_ssl_start/end>", "<text_bpe_start/end>", "<spk_start/end>"]
    token_list = [f"<unused_{i}>" for i in range(256)]
    for place, name in zip([0, 1, 5, 8, 9, 10, 34, 35, 37], names, strict=True):
        token_list[place] = name
    layout = Layout.opuslm(token_list, bias, 4)
    codes, outside = codec_codes(layout, np.array([[260, 266, 281, 282], [256, 0, 274, 290]], dtype=np.int32))
    assert codes.tolist() == [[0, 7, 0], [0, 0, 7]]
    assert outside == 2


def test_codes_that_do_not_fit_are_refused():
    layout = Layout.bagpiper(10, [9] * 3)
    with pytest.raises(DataError, match="code 8 of stream 1 at frame 2 is outside 0..7"):
        audio_rows(layout, np.array([[0, 0, 0], [0, 0, 0], [0, 8, 0]]))
    with pytest.raises(DataError, match="3 streams"):
        audio_rows(layout, np.zeros((4, 2), dtype=np.int64))


def test_a_shorter_clip_of_a_batch_keeps_codes_of_its_padding():
    layout = Layout.bagpiper(10, [9] * 3)
    codes = np.arange(12).reshape(4, 3) % 8
    assert audio_rows(layout, codes[:0]).shape == (0, 3)
    np.testing.assert_array_equal(audio_rows(layout, codes, 2), audio_rows(layout, codes)[:4])
    assert (audio_rows(layout, codes, 2)[-1, 1:] != np.array(layout.stream_pads)[1:]).all()
    np.testing.assert_array_equal(audio_rows(layout, codes, 4), audio_rows(layout, codes))
