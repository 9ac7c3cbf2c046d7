"""The codec beside the engine: batches of windows, growing clips, and everything that can go wrong, on every codec."""

import gc
import resource
import threading
import time

import numpy as np
import pytest
import torch
from tiny_codecs import NAMES, random_codes, tiny_codec

from espnet2_vllm.codec import SILENT_FRAMES
from espnet2_vllm.codec.chunks import ChunkSizes
from espnet2_vllm.codec.reach import measure_reach
from espnet2_vllm.codec.service import CodecService
from espnet2_vllm.codec.torch_codec import TorchCodec
from espnet2_vllm.codec.windows import WindowDecoder
from espnet2_vllm.errors import CodecError, DataError

BOUND = 1e-4  # of full scale: what pieces may differ by from the whole
SECONDS = 60


@pytest.fixture(params=NAMES)
def codec(request):
    return tiny_codec(request.param)


class Heard:
    """A reader of a growing clip."""

    def __init__(self):
        self.chunks, self.error, self.done = [], None, threading.Event()

    def __call__(self, chunk, last):
        if isinstance(chunk, Exception):
            self.error = chunk
        else:
            self.chunks.append(chunk)
        if last:
            self.done.set()

    def wav(self):
        assert self.done.wait(SECONDS)
        assert self.error is None, self.error
        return np.concatenate(self.chunks)


# -- reach -------------------------------------------------------------------------------------------------------------
def moved_frames(codec, frames, changed):
    """Frames of the whole decode whose samples move when one frame of codes does."""
    codes = random_codes(codec, frames, seed=3)
    other = codes.copy()
    other[changed] = (codes[changed] + 1) % codec.codebook_size
    difference = (codec.decode(codes) != codec.decode(other)).reshape(frames, codec.hop)
    return np.flatnonzero(difference.any(axis=1))


def test_a_changed_frame_moves_samples_within_the_measured_reach_only(codec):
    reach, features = measure_reach(codec), codec.growing_features()
    assert reach.finite
    moved = moved_frames(codec, 120, 60)
    assert len(moved)
    assert moved.min() >= 60 - reach.right - features.right
    if features.right == 0:  # no recurrent layer, so nothing else looks back
        assert moved.max() <= 60 + reach.left


def test_reach_is_found_where_there_is_one_and_not_where_there_is_none():
    def blurred(left, right):
        kernel = torch.ones(1, 1, left + right + 1)

        def function(frames):
            padded = torch.nn.functional.pad(frames.T[None].float(), (left, right))
            return torch.nn.functional.conv1d(padded, kernel)[0].T

        return function

    from espnet2_vllm.codec.reach import Reach, reach_of

    def draw(frames):
        return torch.rand(frames, 1) + torch.arange(frames)[:, None]

    for left, right in ((0, 0), (3, 0), (0, 7), (31, 5), (40, 100)):
        assert reach_of(blurred(left, right), draw) == Reach(left, right)
    assert reach_of(lambda frames: frames.cumsum(0), draw) == Reach(None, 0)
    assert reach_of(lambda frames: frames - frames.mean(0), draw) == Reach(None, None)


# -- finished clips ----------------------------------------------------------------------------------------------------
def test_clips_of_all_lengths_together_are_each_decoded_as_if_alone(codec):
    decoder = WindowDecoder(codec, measure_reach(codec), max_frames=256)
    lengths = [0, 1, 2, 7, 25, 60, 61, 150, 1, 333]
    clips = [random_codes(codec, length, seed=length) for length in lengths]
    for codes, wav in zip(clips, decoder.decode(clips), strict=True):
        whole = codec.decode(codes)
        assert wav.dtype == np.float32
        assert wav.shape == whole.shape
        np.testing.assert_allclose(wav, whole, rtol=0, atol=BOUND)


def test_many_clips_are_few_batches():
    codec, calls = tiny_codec("xcodec"), []
    decoder = WindowDecoder(codec, measure_reach(codec))
    decoder.one_by_one = False  # as on a GPU

    def counted(features, synthesize=codec.synthesize):
        calls.append(len(features))
        return synthesize(features)

    clips = [random_codes(codec, 60 + i, seed=i) for i in range(32)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "synthesize", counted)
        decoder.decode(clips)
    assert len(calls) <= 4
    assert sum(calls) >= 32


def test_a_service_gives_what_the_codec_gives(codec):
    with CodecService(codec, silent_frames=SILENT_FRAMES) as service:
        clips = [random_codes(codec, length, seed=length) for length in (0, 5, 10, 11, 40, 130)]
        for codes, wav in zip(clips, service.decode(clips), strict=True):
            whole = codec.decode(codes) if len(codes) > SILENT_FRAMES else np.zeros(len(codes) * codec.hop)
            np.testing.assert_allclose(wav, whole, rtol=0, atol=BOUND)
    assert service.usage.clips == len(clips)
    assert service.usage.sound_s == pytest.approx(sum(map(len, clips)) * codec.hop / codec.sample_rate)
    assert service.prepare() == 0, "no memory of a device is set aside on a CPU"


def test_what_is_wrong_with_a_clip_is_its_own_outcome():
    codec = tiny_codec("xcodec")
    good = [random_codes(codec, 40 + i, seed=i) for i in range(5)]
    bad = np.full((50, codec.num_codebooks), codec.codebook_size)
    with CodecService(codec) as service:
        futures = [service.submit(codes) for codes in (*good[:3], bad, *good[3:])]
        with pytest.raises(DataError, match=f"code {codec.codebook_size} at frame 0"):
            futures.pop(3).result(SECONDS)
        for codes, future in zip(good, futures, strict=True):
            np.testing.assert_allclose(future.result(SECONDS), codec.decode(codes), rtol=0, atol=BOUND)
        heard = Heard()
        stream = service.open(ChunkSizes(), heard)
        stream.push(bad)
        assert heard.done.wait(SECONDS)
        assert isinstance(heard.error, DataError)
    assert service.usage.failed == 2


class FragileCodec(TorchCodec):
    """Samples are codes; fails on code 13 once ``armed``; ``wait`` holds it up. ``smear``: a sample depends on all frames."""

    def __init__(self, smear=False):
        super().__init__(sample_rate=100, hop=2, num_codebooks=1, codebook_size=16, device="cpu")
        self.wait, self.smear, self.at_work = threading.Event(), smear, threading.Event()
        self.wait.set()
        self.armed = False

    def _encode_tensor(self, wav):
        raise AssertionError("never encoded")

    def _decode_tensor(self, codes):
        self.at_work.set()
        assert self.wait.wait(SECONDS)
        if self.armed and (codes == 13).any():
            raise RuntimeError("CUDA out of memory, say")
        wav = codes[:, :, 0].float().repeat_interleave(2, dim=1) / 16
        return wav - wav.mean(dim=1, keepdim=True) if self.smear else wav


def test_a_codec_that_fails_in_the_middle_does_not_take_the_others_along():
    codec = FragileCodec()
    with CodecService(codec) as service:
        codec.armed = True
        futures = [service.submit(np.full((4, 1), code)) for code in (1, 13, 2)]
        with pytest.raises(CodecError, match="could not decode the clip: RuntimeError: CUDA out of memory"):
            futures[1].result(SECONDS)
        assert [float(future.result(SECONDS)[0]) * 16 for future in (futures[0], futures[2])] == [1, 2]


def test_a_full_service_holds_whoever_brings_more():
    codec = FragileCodec()
    with CodecService(codec, waiting=2) as service:
        codec.wait.clear()
        codec.at_work.clear()
        futures = [service.submit(np.full((4, 1), code)) for code in (1, 2)]
        assert codec.at_work.wait(SECONDS)
        third = threading.Thread(target=lambda: futures.append(service.submit(np.full((4, 1), 3))))
        third.start()
        third.join(0.2)
        assert third.is_alive()
        codec.wait.set()
        third.join(SECONDS)
        assert [future.result(SECONDS).tolist() for future in futures] == [[code / 16] * 8 for code in (1, 2, 3)]


def test_a_decoder_without_a_reach_decodes_whole_clips():
    codec = FragileCodec(smear=True)
    with CodecService(codec) as service:
        assert not service.reach.finite
        codes = np.arange(12)[:, None]
        np.testing.assert_array_equal(service.decode([codes])[0], codec.decode(codes))
        heard = Heard()
        stream = service.open(ChunkSizes(1, 1), heard)
        stream.push(codes)
        stream.end()
        np.testing.assert_array_equal(heard.wav(), codec.decode(codes))
        assert len(heard.chunks) == 1


# -- growing clips -----------------------------------------------------------------------------------------------------
def grow(service, codes, sizes, pieces):
    heard = Heard()
    stream = service.open(sizes, heard)
    for begin in range(0, len(codes), pieces):
        stream.push(codes[begin : begin + pieces])
    stream.end()
    return heard


def test_chunks_are_the_whole(codec):
    """Also where a recurrent layer has no finite reach: its state is carried, so the bound is the same."""
    with CodecService(codec, ahead=1000) as service:
        for frames in (1, 3, 30, 61):
            codes = random_codes(codec, frames, seed=frames)
            whole = codec.decode(codes)
            for size in sorted({1, 2, 7, 25, max(frames - 1, 1), frames, frames + 1}):
                for sizes, pieces in ((ChunkSizes(size, size), 1), (ChunkSizes(5, size), frames)):
                    wav = grow(service, codes, sizes, pieces).wav()
                    assert wav.shape == whole.shape
                    np.testing.assert_allclose(wav, whole, rtol=0, atol=BOUND, err_msg=f"{frames} frames, {sizes}")


def test_many_clips_grow_at_once():
    codec = tiny_codec("dac")
    with CodecService(codec, ahead=1000) as service:
        clips = [random_codes(codec, 40 + 3 * i, seed=i) for i in range(12)]
        heard = [Heard() for _ in clips]
        streams = [service.open(ChunkSizes(5, 10), one) for one in heard]
        for begin in range(0, 80, 2):
            for codes, stream in zip(clips, streams, strict=True):
                stream.push(codes[begin : begin + 2])
        for stream in streams:
            stream.end()
        for codes, one in zip(clips, heard, strict=True):
            np.testing.assert_allclose(one.wav(), codec.decode(codes), rtol=0, atol=BOUND)


@pytest.mark.parametrize(("frames", "loud"), [(0, False), (4, False), (10, False), (11, True)])
def test_the_first_chunk_waits_until_the_clip_is_known_not_to_be_silent(frames, loud):
    codec = tiny_codec("dac")
    codes = random_codes(codec, frames)
    with CodecService(codec, silent_frames=SILENT_FRAMES, ahead=1000) as service:
        heard = Heard()
        stream = service.open(ChunkSizes(1, 1), heard)
        stream.push(codes)
        until = time.monotonic() + (SECONDS if loud else 0.05)
        while not heard.chunks and time.monotonic() < until:
            time.sleep(0.01)
        assert bool(heard.chunks) == loud
        stream.end()
        wav = heard.wav()
        assert (len(wav), bool(wav.any())) == (frames * codec.hop, loud)
        assert service.frames_until_first(ChunkSizes(1, 1)) == SILENT_FRAMES + 1
        assert service.frames_until_first(ChunkSizes(40, 1)) == 40 + service.reach.right + 3


def test_a_reader_that_stops_holds_only_its_own_clip():
    codec = tiny_codec("xcodec")
    with CodecService(codec, ahead=2) as service:
        codes = random_codes(codec, 60)
        stopped, slow = Heard(), Heard()
        first = service.open(ChunkSizes(5, 5), stopped)
        first.push(codes)
        first.end()
        second = service.open(ChunkSizes(5, 5), slow)
        second.push(codes)
        second.end()
        deadline = time.monotonic() + SECONDS
        taken = 0
        while not slow.done.is_set():
            assert time.monotonic() < deadline
            assert len(slow.chunks) <= taken + 2
            if len(slow.chunks) > taken:
                second.taken()
                taken += 1
            time.sleep(0.001)
        np.testing.assert_allclose(slow.wav(), codec.decode(codes), rtol=0, atol=BOUND)
        assert len(stopped.chunks) == 2, "no more is decoded than its reader has room for"
        np.testing.assert_allclose(service.decode([codes])[0], codec.decode(codes), rtol=0, atol=BOUND)


def test_a_reader_that_leaves_is_forgotten():
    codec = tiny_codec("xcodec")
    with CodecService(codec, ahead=1) as service:
        heard = Heard()
        stream = service.open(ChunkSizes(5, 5), heard)
        stream.push(random_codes(codec, 40))
        stream.cancel()
        stream.taken()
        stream.end()
        service.decode([random_codes(codec, 20)])
        assert len(heard.chunks) <= 1
        assert not heard.done.is_set()
        assert not service._streams


def test_wrong_codes_in_one_of_many_growing_clips_are_its_own_outcome():
    codec = tiny_codec("dac")
    with CodecService(codec, ahead=1000) as service:
        clips = [random_codes(codec, 30 + i, seed=i) for i in range(4)]
        heard = [Heard() for _ in clips]
        streams = [service.open(ChunkSizes(5, 10), one) for one in heard]
        for number, (codes, stream) in enumerate(zip(clips, streams, strict=True)):
            stream.push(np.full_like(codes, codec.codebook_size) if number == 2 else codes)
        for stream in streams:
            stream.end()
        for number, (codes, one) in enumerate(zip(clips, heard, strict=True)):
            if number == 2:
                assert one.done.wait(SECONDS)
                assert isinstance(one.error, DataError)
            else:
                np.testing.assert_allclose(one.wav(), codec.decode(codes), rtol=0, atol=BOUND)


def test_a_device_without_memory_for_a_growing_clip_does_not_end_the_service(monkeypatch):
    from espnet2_vllm.codec.service import GrowingClip

    def full(*_):
        raise RuntimeError("CUDA out of memory")

    codec = tiny_codec("xcodec")
    codes = random_codes(codec, 40, seed=0)
    with CodecService(codec) as service:
        monkeypatch.setattr(GrowingClip, "_take_in", full)
        heard = Heard()
        service.open(ChunkSizes(), heard).push(codes)
        assert heard.done.wait(SECONDS)
        assert isinstance(heard.error, CodecError)
        np.testing.assert_allclose(service.submit(codes).result(SECONDS), codec.decode(codes), rtol=0, atol=BOUND)


@pytest.mark.parametrize("name", ["dac", "encodec", "funcodec"])
def test_features_of_many_growing_clips_are_those_of_each_alone(name):
    """Batched through the LSTM with the state of each, whatever arrives of which clip."""
    codec, rng = tiny_codec(name), np.random.default_rng(7)
    clips = [random_codes(codec, 20 + i % 3, seed=i) for i in range(6)]
    growing = [codec.growing_features() for _ in clips]
    found, done = [[] for _ in clips], [0] * len(clips)
    while any(given < len(codes) for given, codes in zip(done, clips, strict=True)):
        pushes = []
        for index in rng.permutation(len(clips)):
            if done[index] < len(clips[index]):
                count = int(rng.integers(0, 6))
                part = clips[index][done[index] : done[index] + count]
                done[index] += len(part)
                pushes.append((index, (growing[index], part, done[index] == len(clips[index]))))
        for (index, _), features in zip(pushes, codec.push_features([push for _, push in pushes]), strict=True):
            found[index].append(features)
    for parts, codes in zip(found, clips, strict=True):
        torch.testing.assert_close(torch.cat(parts), codec.features([codes])[0], rtol=1e-4, atol=1e-5)


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_memory_is_flat_over_2000_clips():
    codec, rng, sizes = FragileCodec(), np.random.default_rng(3), []
    codec.hop = 320
    codec._decode_tensor = lambda codes: codes[:, :, 0].float().repeat_interleave(320, dim=1) / 16
    with CodecService(codec, waiting=1024) as service:
        for _ in range(5):
            for _ in range(5):
                service.decode([rng.integers(0, 16, (int(n), 1)) for n in rng.integers(1, 150, 80)])
            gc.collect()
            sizes.append(resident())
    assert service.usage.clips == 2000
    print("MiB:", [round(size / 2**20, 1) for size in sizes])
    assert sizes[-1] - sizes[1] < 16 * 2**20, sizes  # the samples alone are 192 MiB


# -- captured batches --------------------------------------------------------------------------------------------------
class Replayed:
    """As much of a captured graph as the decoder uses, on the CPU."""

    def __init__(self, codec, inputs, outputs):
        self.codec, self.inputs, self.outputs, self.times = codec, inputs, outputs, 0

    def replay(self):
        self.times += 1
        self.outputs.copy_(self.codec.synthesize(self.inputs))


@pytest.mark.parametrize("name", ["dac", "xcodec"])
def test_captured_batches_are_used_and_change_no_sample(name):
    codec = tiny_codec(name)
    decoder = WindowDecoder(codec, measure_reach(codec), max_frames=600)
    decoder.one_by_one = False  # as on a GPU
    sample = codec.features([random_codes(codec, 1)])[0]
    for length in decoder.lengths:
        for count in (1, 2, 4, 8):
            if count * length <= decoder.max_frames:
                inputs = sample.new_zeros(count, length, sample.shape[1])
                outputs = torch.zeros(count, length * codec.hop)
                decoder._graphs[count, length] = Replayed(codec, inputs, outputs), inputs, outputs
    clips = [random_codes(codec, length, seed=length) for length in (500, 130, 61, 60, 500, 3, 200, 60)]
    with torch.inference_mode():
        for codes, wav in zip(clips, decoder.decode(clips), strict=True):
            np.testing.assert_allclose(wav, codec.decode(codes), rtol=0, atol=BOUND)
    used = {shape: graph.times for shape, (graph, _, _) in decoder._graphs.items() if graph.times}
    assert len({length for _, length in used}) > 1, used
    shortest = decoder.lengths[0]
    assert shortest <= 100, "one more in a batch is less waste than one batch more"
    assert [decoder._together(count, shortest, None) for count in (1, 3, 4, 5, 9, 30)] == [1, 3, 4, 5, 8, 8]
