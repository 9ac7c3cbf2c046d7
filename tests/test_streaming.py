"""Speech while it is generated: every recorded case streamed, and readers that are slow, stop or leave."""

import asyncio
import contextlib
import functools
import json
import random
import threading

import numpy as np
import pytest
from conftest import golden_files, golden_models
from fuzz.draws import header, text_rows
from golden_cases import EXACT, replay
from streamed import BOUND, StreamedModel, collect

from espnet2_vllm.backends import decode
from espnet2_vllm.codec import SILENT_FRAMES
from espnet2_vllm.codec.chunks import ChunkSizes
from espnet2_vllm.codec.service import CodecService
from espnet2_vllm.codes import codec_codes
from espnet2_vllm.decoding import load_decoding
from espnet2_vllm.errors import CodecError, EngineError
from espnet2_vllm.plan import REFUSED, Given, Result, Utterance, Wanted
from espnet2_vllm.streaming import EngineThread, SpeechChunk, Streamer

SECONDS = 120
MODELS = {"bagpiper": "qwen3-s8-cb64", "opuslm": "tiny-llama"}


@functools.cache
def model_of(family):
    (directory,) = (path for path in golden_models(family) if path.name == MODELS[family])
    return StreamedModel(directory, "pytorch")


def cases_of(family):
    """Those whose answers hold audio."""
    found = []
    for path in golden_files(f"{family}/{MODELS[family]}/cases/*.json"):
        about = json.loads(path.read_text(encoding="utf-8"))
        segments = json.dumps(about.get("segments", "audio"))
        if ('"codec_ssl"' in segments or "audio" in segments) and "teacher" not in path.name:
            found.append(pytest.param(family, path, id=f"{family}-{path.stem}"))
    return found


@pytest.mark.parametrize(("family", "path"), [*cases_of("bagpiper"), *cases_of("opuslm")])
def test_every_recorded_case_streamed_is_what_was_recorded_and_sounds_as_the_whole(family, path):
    verdict = replay(model_of(family), path)
    assert verdict.verdict == EXACT, verdict


# -- readers -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def model():
    return model_of("opuslm")


@pytest.fixture
def config(tmp_path, model):
    rows = 60 + model.layout.num_streams
    path = tmp_path / "decode.yaml"
    values = f"search_algo: topk_sampling, sampling_temperature: 1.0, topk: 8, maxlen: {rows}, minlen: 50"
    path.write_text(f"codec_ssl: {{{values}, length_method: absolute}}\n", encoding="utf-8")
    return load_decoding(path, "opuslm")


def utterance(model, key="u"):
    rng, wanted = random.Random(5), header(model.layout, "audio")
    return Utterance(key, (Given(text_rows(model.layout, rng, 6), "text_bpe"), Wanted(wanted, "codec_ssl")))


class CountedEngine:
    """The model's engine, and what was asked of it."""

    def __init__(self, engine):
        self._engine, self.aborted, self.steps, self.fail = engine, [], 0, False

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def abort(self, ids):
        self.aborted += ids
        self._engine.abort(ids)

    def step(self):
        if self.fail:
            raise RuntimeError("the device is gone")
        self.steps += 1
        return self._engine.step()


@contextlib.contextmanager
def streamer_of(model, *, sizes=None, ahead=8):
    engine = CountedEngine(model.engine)
    with CodecService(model.codec, silent_frames=SILENT_FRAMES, ahead=ahead) as service, EngineThread(engine) as thread:
        yield Streamer(thread, service, sizes)
    assert model.engine.unfinished == 0, "something was left in the engine"
    assert not thread._tasks
    assert not thread._open


def whole_of(model, config, seed=1):
    (result,) = decode(model.engine, [utterance(model)], config, seed=seed)
    segment = result.hypotheses[0].segments[-1]
    return segment, model.codec.decode(codec_codes(model.layout, segment.rows)[0])


@pytest.mark.parametrize("size", [1, 2, 7, 25, -1, 0, 1000])
def test_chunk_sizes(model, config, size):
    """Also as many frames as there are, one less, and more."""
    segment, whole = whole_of(model, config)
    size = size if size > 0 else len(segment.rows) + size
    with streamer_of(model, sizes=ChunkSizes(size, size)) as streamer:
        chunks, result = asyncio.run(collect(streamer.stream(utterance(model), config, seed=1)))
    np.testing.assert_array_equal(result.hypotheses[0].segments[-1].rows, segment.rows)
    lengths = [len(chunk.samples) // model.codec.hop for chunk in chunks]
    assert sum(lengths) == len(segment.rows)
    assert all(length == size for length in lengths[:-1])
    np.testing.assert_allclose(np.concatenate([chunk.samples for chunk in chunks]), whole, rtol=0, atol=BOUND)


def test_the_first_chunk_comes_long_before_the_end(model, config):
    with streamer_of(model) as streamer:

        async def first():
            stream = streamer.stream(utterance(model), config, seed=1)
            return await anext(stream), streamer.engine.engine.steps

        chunk, steps = asyncio.run(first())
        assert len(chunk.samples) == 5 * model.codec.hop
        assert not chunk.last
        assert steps >= streamer.rows[0]


def test_many_readers_at_once_some_of_the_same_key(model, config):
    _, whole = whole_of(model, config)
    with streamer_of(model) as streamer:

        async def all_of_them():
            streams = [streamer.stream(utterance(model), config, seed=1) for _ in range(3)]
            return await asyncio.gather(*map(collect, streams))

        for chunks, result in asyncio.run(all_of_them()):
            assert result.outcome != REFUSED
            np.testing.assert_allclose(np.concatenate([c.samples for c in chunks]), whole, rtol=0, atol=BOUND)


def test_a_slow_reader_gets_everything_and_nobody_waits_for_it(model, config):
    _, whole = whole_of(model, config)
    with streamer_of(model, sizes=ChunkSizes(3, 3), ahead=2) as streamer:

        async def slow():
            chunks = []
            async for item in streamer.stream(utterance(model), config, seed=1):
                if isinstance(item, SpeechChunk):
                    chunks.append(item.samples)
                    await asyncio.sleep(0.02)
            return chunks

        async def both():
            slowly = asyncio.create_task(slow())
            await asyncio.sleep(0)
            quick, _ = await collect(streamer.stream(utterance(model), config, seed=1))
            return await slowly, [chunk.samples for chunk in quick]

        for chunks in asyncio.run(both()):
            np.testing.assert_allclose(np.concatenate(chunks), whole, rtol=0, atol=BOUND)


def test_a_reader_that_stops_costs_no_more_than_a_few_chunks(model, config):
    with streamer_of(model, sizes=ChunkSizes(3, 3), ahead=2) as streamer:

        async def stopped():
            stream = streamer.stream(utterance(model), config, seed=1)
            await anext(stream)
            # The engine finishes all the same; the codec waits for the reader.
            for _ in range(int(SECONDS / 0.02)):
                if not streamer.engine._tasks:
                    break
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.1)
            decoded = streamer.service.usage.chunks
            rest = [item async for item in stream]
            return decoded, rest

        decoded, rest = asyncio.run(stopped())
        assert decoded <= 3
        assert isinstance(rest[-1], Result)
        assert len(rest) > 10


def test_a_reader_that_leaves_takes_its_request_along(model, config):
    with streamer_of(model) as streamer:

        async def leaving():
            stream = streamer.stream(utterance(model), config, seed=1)
            await anext(stream)
            await stream.aclose()
            chunks, _ = await collect(streamer.stream(utterance(model, "next"), config, seed=2))
            return chunks

        assert asyncio.run(leaving())
        assert [name.split(":")[1] for name in streamer.engine.engine.aborted] == ["u/0/1"]


def test_what_cannot_be_decoded_is_a_refusal(model, config):
    empty = Utterance("empty", (Wanted(header(model.layout, "audio"), "codec_ssl"),))
    with streamer_of(model) as streamer:
        chunks, result = asyncio.run(collect(streamer.stream(empty, config, seed=1)))
    assert (chunks, result.outcome) == ([], REFUSED)
    assert "nothing stands before segment 0" in result.reason


def test_a_codec_that_fails_ends_its_own_stream_only(model, config, monkeypatch):
    with streamer_of(model) as streamer:

        def failing(features):
            raise RuntimeError("no memory")

        with monkeypatch.context() as patch:
            patch.setattr(model.codec, "synthesize", failing)
            with pytest.raises(CodecError, match="RuntimeError: no memory"):
                asyncio.run(collect(streamer.stream(utterance(model), config, seed=1)))
        chunks, _ = asyncio.run(collect(streamer.stream(utterance(model), config, seed=1)))
        assert chunks


def test_an_engine_that_fails_or_is_closed_tells_everybody(model, config):
    with streamer_of(model) as streamer:
        streamer.engine.engine.fail = True
        _, result = asyncio.run(collect(streamer.stream(utterance(model), config, seed=1)))
        assert (result.outcome, result.reason) == (REFUSED, "the engine failed: RuntimeError: the device is gone")
        with pytest.raises(EngineError, match="the device is gone"):
            asyncio.run(collect(streamer.stream(utterance(model), config, seed=1)))
        model.engine.abort([f"{n}:u/0/1" for n in range(3)])
    with streamer_of(model) as streamer:
        heard = threading.Event()

        async def closing():
            stream = streamer.stream(utterance(model), config, seed=1)
            await anext(stream)
            await asyncio.to_thread(streamer.engine.close)
            heard.set()
            return [item async for item in stream]

        assert asyncio.run(closing())[-1].reason == "the engine's thread was closed"
        assert heard.is_set()
