"""The samples of a clip are a function of its codes: whatever is decoded beside it, byte for byte."""

import threading

import numpy as np
import pytest
from tiny_codecs import NAMES, random_codes, tiny_codec

from espnet2_vllm.codec.chunks import ChunkSizes
from espnet2_vllm.codec.service import CodecService

CLIPS, GROUPINGS = 12, 200


@pytest.mark.parametrize("name", NAMES)
def test_random_groupings(name):
    """On a CPU. Clips are decoded in groups of any size and order, some beside growing clips and other busy threads."""
    codec, noise = tiny_codec(name), np.random.default_rng(7)
    clips = [random_codes(codec, int(frames), seed) for seed, frames in enumerate(noise.integers(1, 90, CLIPS))]
    with CodecService(codec) as service:
        alone = [service.decode([codes])[0] for codes in clips]
        for number in range(GROUPINGS // len(NAMES) + 1):
            stop, busy = threading.Event(), None
            if number % 5 == 0:
                busy = threading.Thread(target=spin, args=(stop,))
                busy.start()
            growing = service.open(ChunkSizes(), lambda *_: None)
            growing.push(clips[number % CLIPS])
            chosen = noise.permutation(CLIPS)[: int(noise.integers(1, CLIPS + 1))]
            futures = [service.submit(clips[index]) for index in chosen]
            found = [future.result() for future in futures]
            growing.end()
            if busy is not None:
                stop.set()
                busy.join()
            for index, wav in zip(chosen, found, strict=True):
                assert wav.tobytes() == alone[index].tobytes(), f"grouping {number}: clip {index} in {chosen.tolist()}"


def spin(stop):
    while not stop.is_set():
        np.dot(np.ones((64, 64)), np.ones((64, 64)))


@pytest.mark.parametrize("name", NAMES)
def test_whole_clips(name):
    codec = tiny_codec(name)
    clips = [random_codes(codec, frames, frames) for frames in (7, 7, 30, 7, 30)]
    for codes, wav in zip(clips, codec.decode_batch(clips), strict=True):
        assert wav.tobytes() == codec.decode(codes).tobytes()
