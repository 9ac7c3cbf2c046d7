"""Recorded cases decoded by streaming: what is heard is compared with the codec's whole decode on the way."""

import asyncio
import dataclasses
import functools

import numpy as np
from golden_cases import Model

from espnet2_vllm.codec import SILENT_FRAMES
from espnet2_vllm.codec.service import CodecService
from espnet2_vllm.codes import codec_codes
from espnet2_vllm.plan import REFUSED, Result, Utterance
from espnet2_vllm.streaming import EngineThread, SpeechChunk, Streamer

BOUND = 1e-4  # of full scale


class StreamedModel(Model):
    """Decodes by streaming. What was heard is compared with the codec's whole decode on the way.

    Attributes:
        heard: audio segments so far.
    """

    heard = 0

    @functools.cached_property
    def service(self):
        silent = SILENT_FRAMES if self.layout.family == "opuslm" else 0
        return CodecService(self.codec, silent_frames=silent)

    def decode(self, item, config, *, seed, nbest=1):
        if not isinstance(item, Utterance):
            return super().decode(item, config, seed=seed, nbest=nbest)
        block = getattr(config, "audio", None), getattr(config, "text", None)
        again = any(one is not None and one.num_hypo > 1 for one in block)  # further hypotheses are not streamed
        with EngineThread(self.engine) as thread:
            streamer = Streamer(thread, self.service)
            results = [self.listen(streamer, item, config, seed, k) for k in range(nbest)]
        if again:
            whole = super().decode(item, config, seed=seed, nbest=nbest)
            for mine, its in zip(results[0].hypotheses[0].segments, whole.hypotheses[0].segments, strict=True):
                np.testing.assert_array_equal(mine.rows, its.rows)
            return whole
        if results[0].outcome == REFUSED:
            return super().decode(item, config, seed=seed, nbest=nbest)
        return dataclasses.replace(results[0], hypotheses=tuple(result.hypotheses[0] for result in results))

    def listen(self, streamer, utterance, config, seed, hypothesis=0):
        chunks, result = asyncio.run(collect(streamer.stream(utterance, config, seed=seed, hypothesis=hypothesis)))
        places = [chunk.segment for chunk in chunks]
        assert places == sorted(places)
        if result.outcome == REFUSED:
            return result
        (found,) = result.hypotheses
        for place, segment in enumerate(found.segments):
            mine = [chunk for chunk in chunks if chunk.segment == place]
            if segment.generated and segment.modality == "audio" and segment.end not in ("refused", "teacher"):
                assert [chunk.last for chunk in mine] == [False] * (len(mine) - 1) + [True]
                self.check(segment, np.concatenate([chunk.samples for chunk in mine]))
            else:
                assert not mine
        return result

    def check(self, segment, wav):
        codes, _ = codec_codes(self.layout, segment.rows)
        whole = np.zeros(len(codes) * self.codec.hop)
        if len(codes) > self.service.silent_frames:
            whole = self.codec.decode(codes)
        assert wav.shape == whole.shape
        np.testing.assert_allclose(wav, whole, rtol=0, atol=BOUND)
        self.heard += 1


async def collect(stream):
    items = [item async for item in stream]
    assert all(isinstance(item, SpeechChunk) for item in items[:-1])
    assert isinstance(items[-1], Result)
    return items[:-1], items[-1]
