"""Chunks of a growing clip: the windows they are decoded in, whatever the sizes and however frames arrive."""

import pytest

from espnet2_vllm.codec.chunks import Chunker, ChunkSizes, window_lengths
from espnet2_vllm.codec.reach import Reach
from espnet2_vllm.codec.windows import plan_windows
from espnet2_vllm.errors import ConfigError

REACHES = [Reach(0, 0), Reach(10, 10), Reach(2, 5), Reach(40, 3)]


def enough(window, frames, reach):
    """What is kept has the codec's reach around it, or the end of the clip."""
    assert 0 <= window.start <= window.first < window.last <= window.stop <= frames
    assert window.start == 0 or window.first - window.start >= reach.left
    assert window.stop == frames or window.stop - window.last >= reach.right


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("frames", [1, 2, 7, 24, 25, 26, 60, 200])
def test_chunks_cover_a_clip_once_with_enough_around_them(reach, frames):
    sizes = [1, 2, 7, 25, max(frames - 1, 1), frames, frames + 1]
    for first, then, step in [(1, 1, 1), (5, 25, 1), (5, 25, 50), (7, 2, 3), *((n, n, 4) for n in sizes)]:
        chunks = ChunkSizes(first, then)
        chunker, known, given = Chunker(chunks, reach), 0, 0
        while known < frames:
            known = min(known + step, frames)
            while window := chunker.next(known, ended=known == frames):
                enough(window, known if known == frames else frames, reach)
                assert window.stop <= known
                assert window.start >= 0
                assert window.first == given
                assert window.stop - window.start <= max(chunker.length, first + reach.left + reach.right)
                if known < frames:
                    assert window.last - window.first == (then if given else first)
                assert chunker.oldest <= max(0, window.last - reach.left)
                given = window.last
        assert given == frames, (chunks, step)
        assert chunker.next(frames, ended=True) is None


def test_a_chunk_comes_as_soon_as_its_frames_and_their_reach_are_known():
    reach = Reach(4, 3)
    chunker = Chunker(ChunkSizes(5, 25), reach)
    assert chunker.next(7, ended=False) is None
    assert chunker.next(8, ended=False).last == 5
    assert chunker.next(32, ended=False) is None
    assert chunker.next(33, ended=False).last == 30


def test_windows_inside_clips_have_one_length():
    assert window_lengths(ChunkSizes(5, 25), Reach(10, 10)) == [15, 40, 45]
    assert window_lengths(ChunkSizes(5, 25), Reach(2, 2)) == [7, 29]


@pytest.mark.parametrize("reach", REACHES)
def test_windows_of_whole_clips(reach):
    shortest = reach.left + reach.right + 8
    for lengths in ([shortest], [shortest, 2 * shortest, 4 * shortest]):
        for frames in range(10 * shortest):
            windows = plan_windows(frames, lengths, reach)
            kept = [frame for window in windows for frame in range(window.first, window.last)]
            assert kept == list(range(frames))
            for window in windows:
                enough(window, frames, reach)
                assert window.stop - window.start in lengths or (window.stop - window.start == frames < shortest)


def test_windows_of_several_lengths_decode_little_twice():
    reach, lengths = Reach(10, 10), [52, 104, 208, 416]

    def decoded(frames, lengths):
        return sum(window.stop - window.start for window in plan_windows(frames, lengths, reach))

    assert decoded(500, lengths) == 520
    assert decoded(500, [208]) == 624
    for frames in range(52, 2000, 13):
        assert decoded(frames, lengths) <= min(decoded(frames, [length]) for length in lengths if length <= frames)


@pytest.mark.parametrize("values", [{"first": 0}, {"then": 0}])
def test_sizes_below_one_frame_are_refused(values):
    with pytest.raises(ConfigError, match=f"{next(iter(values))} must be at least 1"):
        ChunkSizes(**values)
