"""The codec beside an engine: whose chunk comes first, what is decoded together, and how much of the device it takes."""

import logging
import threading
import time

import numpy as np
import pytest
import torch
from tiny_codecs import random_codes, tiny_codec

from espnet2_vllm.codec.chunks import ChunkSizes
from espnet2_vllm.codec.service import CodecService
from espnet2_vllm.codec.share import Share, make_stream
from espnet2_vllm.codec.torch_codec import TorchCodec
from espnet2_vllm.errors import ConfigError

BOUND = 1e-4
SECONDS = 60


class LayeredCodec(TorchCodec):
    """Samples are codes, through layers that take their time.

    Args:
        seconds: that each takes after ``begin``.

    Attributes:
        batches: (clips, frames) and the last code of everything that was decoded.
    """

    def __init__(self, layers=1, seconds=0.0):
        super().__init__(sample_rate=50, hop=1, num_codebooks=1, codebook_size=1024, device="cpu")
        self.model = torch.nn.Sequential(*(torch.nn.Conv1d(1, 1, 1, bias=False) for _ in range(layers)))
        for layer in self.model:
            torch.nn.init.ones_(layer.weight)
            layer.register_forward_pre_hook(lambda *_: time.sleep(self.seconds))
        self.seconds, self.batches, self.hold = 0.0, [], threading.Event()
        self.hold.set()
        self.at_work = threading.Event()
        self.later = seconds

    def _encode_tensor(self, wav):
        raise AssertionError("never encoded")

    def _decode_tensor(self, codes):
        self.at_work.set()
        assert self.hold.wait(SECONDS)
        self.batches.append((tuple(codes.shape[:2]), int(codes[0, -1, 0])))
        return self.model(codes.transpose(1, 2).float() / 1024)[:, 0]

    def begin(self):
        """Forgets what the service measured when it was made; layers take their time from now on."""
        self.batches.clear()
        self.at_work.clear()
        self.seconds = self.later


class Heard:
    """A reader of growing clips: (name, when) of each chunk in the order in which they came."""

    def __init__(self):
        self.chunks, self.samples, self.last = [], {}, set()

    def of(self, name):
        def on_chunk(chunk, last):
            assert not isinstance(chunk, Exception), chunk
            self.chunks.append((name, time.monotonic()))
            self.samples.setdefault(name, []).append(chunk)
            if last:
                self.last.add(name)

        return on_chunk

    @property
    def names(self):
        return [name for name, _ in self.chunks]

    def wait(self, count):
        until = time.monotonic() + SECONDS
        while len(self.chunks) < count:
            assert time.monotonic() < until, f"{len(self.chunks)} of {count} chunks"
            time.sleep(0.002)


def full(value, frames):
    return np.full((frames, 1), value)


# -- which chunk is next -----------------------------------------------------------------------------------------------
def test_chunks_that_become_due_meanwhile_are_one_batch():
    codec, heard = LayeredCodec(), Heard()
    with CodecService(codec) as service:
        service.decoder.one_by_one = False  # as on a GPU
        codec.begin()
        codec.hold.clear()
        first = service.open(ChunkSizes(5, 25), heard.of("first"))
        first.push(full(1, 5))
        assert codec.at_work.wait(SECONDS)
        for name in range(100):
            service.open(ChunkSizes(5, 25), heard.of(name)).push(full(2, 5))
        codec.hold.set()
        heard.wait(101)
    assert [shape for shape, _ in codec.batches] == [(1, 5), (100, 5)]


def test_a_first_chunk_comes_before_later_ones_of_others():
    """Those have sound that is not heard yet; so they even wait until others of their kind are due."""
    codec, heard = LayeredCodec(), Heard()
    with CodecService(codec, max_frames=1) as service:  # 256 frames, as the longest window has: 8 chunks
        codec.begin()
        playing = [service.open(ChunkSizes(25, 25), heard.of(("later", n))) for n in range(12)]
        for stream in playing:
            stream.push(full(1, 25))
        heard.wait(12)
        codec.hold.clear()
        codec.at_work.clear()
        blocker = service.open(ChunkSizes(5, 25), heard.of("blocker"))
        blocker.push(full(3, 5))
        assert codec.at_work.wait(SECONDS)
        for stream in playing:
            stream.push(full(1, 25))
        for n in range(4):
            service.open(ChunkSizes(5, 25), heard.of(("first", n))).push(full(2, 5))
        codec.hold.set()
        heard.wait(12 + 1 + 12 + 4)
    kinds = [name[0] for name in heard.names[13:]]
    assert kinds[:4] == ["first"] * 4, kinds


def test_the_clip_with_the_least_left_to_hear_is_next():
    codec, heard = LayeredCodec(), Heard()
    with CodecService(codec, max_frames=1) as service:
        codec.begin()
        sizes = ChunkSizes(100, 100)  # two windows of 100 frames are a batch
        ahead = service.open(sizes, heard.of("ahead"))
        for n in range(2):
            ahead.push(full(1, 100))
            heard.wait(n + 1)
        near = [service.open(sizes, heard.of(f"near {n}")) for n in range(2)]
        for stream in near:
            stream.push(full(1, 100))
        heard.wait(4)
        codec.hold.clear()
        codec.at_work.clear()
        service.open(ChunkSizes(5, 25), heard.of("blocker")).push(full(1, 5))
        assert codec.at_work.wait(SECONDS)
        for stream in (ahead, *near):
            stream.push(full(1, 100))
        codec.hold.set()
        heard.wait(8)
    assert set(heard.names[5:7]) == {"near 0", "near 1"}
    assert heard.names[7] == "ahead"


def test_a_later_chunk_waits_for_others_but_not_for_long():
    codec, heard = LayeredCodec(), Heard()
    with CodecService(codec) as service:
        service.decoder.one_by_one = False  # as on a GPU
        codec.begin()
        one, other = (service.open(ChunkSizes(50, 50), heard.of(name)) for name in "ab")
        for stream in (one, other):
            stream.push(full(1, 50))
        heard.wait(2)
        codec.batches.clear()
        begun = time.monotonic()
        one.push(full(1, 50))
        heard.wait(3)
        assert 0.08 < time.monotonic() - begun < 1, "it waited for the other clip"
        one.push(full(1, 50))
        other.push(full(1, 50))
        heard.wait(5)
    assert [shape for shape, _ in codec.batches] == [(1, 50), (2, 50)]


# -- the share ---------------------------------------------------------------------------------------------------------
def decode_seconds(codec, service, count=4):
    begun = time.monotonic()
    for wav in service.decode([full(512, 32)] * count):
        np.testing.assert_array_equal(wav, 0.5)
    return time.monotonic() - begun


class NotedShare(Share):
    """Keeps the seconds of every rest that is asked for."""

    rests_asked = []

    def rest(self, work):
        self.rests_asked.append(super().rest(work))
        return self.rests_asked[-1]


def test_the_codec_rests_so_that_it_has_its_share_while_the_engine_is_at_work():
    codec, rests = LayeredCodec(layers=5, seconds=0.01), NotedShare.rests_asked
    with CodecService(codec, share=NotedShare(0.2)) as service:
        codec.begin()
        service.beside = lambda: False
        alone = decode_seconds(codec, service)
        assert not rests
        service.beside = lambda: True
        beside = decode_seconds(codec, service)
        assert len(rests) % 5 == 0 and rests and min(rests) >= 0.04 and sum(rests) <= beside
        rests.clear()
        service.share = Share()
        whole = decode_seconds(codec, service)
        assert not rests
    print(f"alone {alone:.3f} s, beside an engine {beside:.3f} s, with the whole device {whole:.3f} s")
    assert alone >= 0.05
    assert beside >= 5 * 0.05
    assert whole < beside / 2
    assert 0.15 <= service.usage.busy_s < alone + beside / 2 + whole, "rests are no work"


def test_a_codec_that_has_much_to_do_does_not_rest():
    codec = LayeredCodec(layers=5, seconds=0.01)
    with CodecService(codec, share=Share(0.01), waiting=4) as service:
        codec.begin()
        assert decode_seconds(codec, service, count=4) < 5, "it would be 5 s with rests"


def first_chunk_seconds(service, heard):
    """Until the first chunk of a clip that begins now is heard."""
    begun = time.monotonic()
    service.open(ChunkSizes(5, 25), heard.of("growing")).push(full(256, 5))
    heard.wait(1)
    return time.monotonic() - begun


def test_the_first_chunk_of_a_growing_clip_is_made_while_finished_clips_rest():
    codec, heard = LayeredCodec(layers=5, seconds=0.01), Heard()
    with CodecService(codec, share=Share(0.02)) as service:
        codec.begin()
        future = service.submit(full(512, 32))
        assert codec.at_work.wait(SECONDS)
        assert first_chunk_seconds(service, heard) < 1, "the clip takes 2.5 s"
        assert not future.done()
        service.share = Share()
        np.testing.assert_array_equal(future.result(SECONDS), 0.5)
    np.testing.assert_array_equal(heard.samples["growing"][0], 0.25)


def test_a_rest_ends_when_there_is_no_more_need_of_it():
    """Rests of 5 s: until a first chunk is due, the engine has nothing to do, or the service is closed."""
    codec, heard = LayeredCodec(layers=5, seconds=0.01), Heard()
    with CodecService(codec, share=Share(0.002)) as service:
        codec.begin()
        future = service.submit(full(512, 32))
        assert codec.at_work.wait(SECONDS)
        time.sleep(0.1)  # the first rest has begun
        begun = time.monotonic()
        assert first_chunk_seconds(service, heard) < 1
        assert not future.done()
        service.beside = lambda: False
        assert len(future.result(SECONDS)) == 32 and time.monotonic() - begun < 2
        service.beside = lambda: True
        codec.at_work.clear()
        future = service.submit(full(512, 32))
        assert codec.at_work.wait(SECONDS)
        time.sleep(0.1)
        begun = time.monotonic()
    assert future.done() and time.monotonic() - begun < 1


def test_the_features_of_a_first_chunk_do_not_rest_either():
    """Those of a recurrent decoder come from layers too. The share is so small that one rest would be the end of the test."""
    codec, heard = tiny_codec("dac"), Heard()
    with CodecService(codec, share=Share(1e-300)) as service:
        future = service.submit(random_codes(codec, 40, seed=1))
        time.sleep(0.2)  # it rests behind its first layer
        codes = random_codes(codec, 60, seed=2)
        growing = service.open(ChunkSizes(5, 25), heard.of("growing"))
        growing.push(codes)
        heard.wait(1)
        assert not future.done()
    np.testing.assert_allclose(heard.samples["growing"][0], codec.decode(codes)[: 5 * codec.hop], rtol=0, atol=BOUND)
    np.testing.assert_allclose(future.result(), codec.decode(random_codes(codec, 40, seed=1)), rtol=0, atol=BOUND)


@pytest.mark.parametrize("name", ["dac", "xcodec", "funcodec"])
def test_rests_change_no_sample(name):
    codec = tiny_codec(name)
    clips = [random_codes(codec, length, seed=length) for length in (3, 40, 150)]
    with CodecService(codec, share=Share(0.5)) as service:
        for codes, wav in zip(clips, service.decode(clips), strict=True):
            np.testing.assert_allclose(wav, codec.decode(codes), rtol=0, atol=BOUND)
    hooks = sum(len(module._forward_hooks) for module in codec.modules())
    del service
    assert sum(len(module._forward_hooks) for module in codec.modules()) < hooks, (
        "a decoder that is gone leaves no hook"
    )


@pytest.mark.parametrize(("text", "share"), [("0.1", Share(0.1)), ("1", Share()), ("0.25:space", Share(0.25, "space"))])
def test_shares_as_typed(text, share):
    assert Share.parse(text) == share
    assert Share.parse(str(share)) == share


@pytest.mark.parametrize("text", ["", "half", "0", "1.5", "-1", "nan", "0.1:", "0.1:sms"])
def test_shares_that_are_none(text):
    with pytest.raises(ConfigError, match="the codec's share"):
        Share.parse(text)


def test_a_device_that_cannot_be_divided_is_told(monkeypatch, caplog):
    made = []
    properties = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device) or "whole")
    monkeypatch.setattr(torch.cuda.green_contexts, "SUPPORTED", False)
    with caplog.at_level(logging.WARNING):
        assert make_stream(torch.device("cuda", 0), Share(0.1, "space")) == ("whole", None)
    assert "built without green contexts" in caplog.text
    caplog.clear()
    assert make_stream(torch.device("cuda", 0), Share(0.1)) == ("whole", None)
    assert not caplog.records


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, []),
        ({"share": Share(0.1)}, []),
        (
            {"share": Share(0.1, "space")},
            ["codec: share 0.1:space has no effect on a cpu, which is divided by time only"],
        ),
        ({"tf32": True}, ["codec: TF32 has no effect on a cpu; only GPUs have it"]),
    ],
)
def test_what_has_no_effect_on_a_cpu_is_told(settings, told, caplog):
    with caplog.at_level(logging.WARNING), CodecService(LayeredCodec(), **settings):
        # Others in this process, as vLLM, have their say too.
        said = [record.getMessage() for record in caplog.records if record.name.startswith("espnet2_vllm")]
    assert said == told


@pytest.mark.parametrize(("share", "told"), [(Share(), False), (Share(0.1), True)])
def test_what_has_no_effect_on_a_codec_that_decodes_whole_clips_is_told(share, told, caplog):
    class Whole:
        sample_rate, hop, num_codebooks, codebook_size = 50, 1, 1, 8

        def decode_batch(self, clips):
            return [np.zeros(len(codes), np.float32) for codes in clips]

    with caplog.at_level(logging.WARNING), CodecService(Whole(), share=share) as service:
        assert len(service.decode([full(1, 7)])[0]) == 7
    assert ("clips can only be decoded whole" in caplog.text) == told
