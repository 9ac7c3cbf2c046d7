"""Figures of the codec beside the engine: how fast, how soon the first sound, and what the engine's steps pay for it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..codec.chunks import ChunkSizes
from ..codec.service import CodecService
from ..codec.share import TIME, Share
from ..decoding import DecodingConfig, load_decoding
from ..drive import drive
from ..errors import SpeechLMError
from ..layout import Layout
from ..plan import Given, Hypothesis, Result, Utterance, Wanted
from ..streaming import EngineThread, SpeechChunk, Streamer, Task
from .workload import random_prompt

if TYPE_CHECKING:
    from ..backends import Engine
    from ..codec.torch_codec import TorchCodec

_BURST = 64  # clips that finish at once
_SETTLE = 20  # steps until requests that were handed over are all decoding, at least
_LONG = 2048  # rows of the requests that keep the engine busy
_TIMEOUT = 120.0
_BESIDE_S = 3.0  # seconds of decoding with a share of the device, about; fewer clips where 64 would take longer
_SHARED_FRAMES = 100  # of utterances that are streamed with a share of the device


@dataclass(frozen=True)
class SpeechSettings:
    """What is measured.

    Attributes:
        in_flight: streams at once, for the latency of the first chunk.
        prompt, frames: rows of a prompt, and frames of an utterance.
        clip_seconds: of the clips that finish at once.
        bursts: how often they do.
        steps: of the engine, timed with nothing beside it.
        clips: decoded to see whether memory grows.
        shares: of the device, by time, that the codec has beside the engine.
    """

    in_flight: tuple[int, ...] = (1, 64, 256)
    prompt: int = 64
    frames: int = 250
    clip_seconds: float = 10.0
    bursts: int = 4
    steps: int = 200
    clips: int = 2000
    sizes: ChunkSizes = ChunkSizes()
    shares: tuple[Share, ...] = (Share(),)
    seed: int = 0


class TimedEngine:
    """An engine whose steps are timed while it has requests."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.steps: list[tuple[float, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> Any:
        if not self._engine.unfinished:
            return self._engine.step()
        begun = time.perf_counter()
        outcomes = self._engine.step()
        self.steps.append((begun, time.perf_counter()))
        return outcomes


# -- the codec alone ---------------------------------------------------------------------------------------------------
def codec_figures(codec: TorchCodec, service: CodecService, settings: SpeechSettings) -> dict[str, Any]:
    """One clip, 64 together, and the same through the codec one by one as it is; seconds."""
    frames = max(round(settings.clip_seconds * codec.sample_rate / codec.hop), 2)
    rng = np.random.default_rng(settings.seed)
    clips = [_codes(codec, rng, int(rng.integers(frames // 2, frames + frames // 2 + 1))) for _ in range(_BURST)]
    one = _codes(codec, rng, frames)
    service.decode(clips[:2])
    alone = statistics.median(_seconds(lambda: service.decode([one])) for _ in range(5))
    together = min(_seconds(lambda: service.decode(clips)) for _ in range(2))
    some = clips[:4]
    codec.decode(one)
    plain = _seconds(lambda: [codec.decode(clip) for clip in some]) / sum(map(len, some)) * sum(map(len, clips))
    sound = sum(map(len, clips)) * codec.hop / codec.sample_rate
    whole = codec.decode(one)
    return {
        "clip_s": settings.clip_seconds,
        "one_s": alone,
        "together": len(clips),
        "together_s": together,
        "together_sound_s": sound,
        "rtf": together / sound,
        "one_by_one_s": plain,
        "largest_difference": float(np.abs(service.decode([one])[0] - whole).max(initial=0.0)),
        "streamed_difference": float(np.abs(streamed(service, one, settings.sizes) - whole).max(initial=0.0)),
    }


def streamed(service: CodecService, codes: np.ndarray, sizes: ChunkSizes) -> np.ndarray:
    """Samples of a clip that grows frame by frame."""
    chunks: list[np.ndarray] = []
    done: Future[None] = Future()

    def on_chunk(chunk: np.ndarray | SpeechLMError, last: bool) -> None:
        if isinstance(chunk, SpeechLMError):
            done.set_exception(chunk)
            return
        chunks.append(chunk)
        stream.taken()
        if last:
            done.set_result(None)

    stream = service.open(sizes, on_chunk)
    for frame in range(len(codes)):
        stream.push(codes[frame : frame + 1])
    stream.end()
    done.result(_TIMEOUT)
    return np.concatenate(chunks)


def memory_figures(codec: TorchCodec, service: CodecService, settings: SpeechSettings) -> dict[str, Any]:
    """Resident and device memory after a fifth of the clips, and after all; bytes."""
    rng = np.random.default_rng(settings.seed)
    frames = max(round(codec.sample_rate / codec.hop), 2)
    found = []
    for count in (settings.clips // 5, settings.clips - settings.clips // 5):
        for begin in range(0, count, _BURST):
            lengths = rng.integers(1, 3 * frames, min(_BURST, count - begin))
            service.decode([_codes(codec, rng, int(length)) for length in lengths])
        gc.collect()
        found.append((_resident(), _reserved(codec)))
    (early, device_early), (late, device_late) = found
    return {
        "clips": settings.clips,
        "resident_early": early,
        "resident_late": late,
        "device_early": device_early,
        "device_late": device_late,
    }


def _codes(codec: TorchCodec, rng: np.random.Generator, frames: int) -> np.ndarray:
    return rng.integers(0, codec.codebook_size, (frames, codec.num_codebooks))


def _seconds(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _resident() -> int:
    """Bytes, now; where /proc is missing, the highest so far."""
    statm = Path("/proc/self/statm")
    if statm.is_file():
        return int(statm.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _reserved(codec: TorchCodec) -> int | None:
    import torch

    return torch.cuda.memory_reserved(codec.device) if codec.device.type == "cuda" else None


# -- beside the engine -------------------------------------------------------------------------------------------------
class SpeechBench:
    """One codec beside one engine.

    Args:
        scratch: folder for the decoding settings.
    """

    def __init__(
        self, engine: Engine, codec: TorchCodec, service: CodecService, settings: SpeechSettings, scratch: Path
    ) -> None:
        self.engine, self.codec, self.service, self.settings = TimedEngine(engine), codec, service, settings
        self.layout: Layout = engine.layout
        self.scratch = scratch
        self._rng = np.random.default_rng(settings.seed)
        service.beside = lambda: engine.unfinished > 0

    def figures(self) -> Iterator[tuple[str, Any]]:
        """Name and content of each part of the report, as they are measured."""
        settings = self.settings
        found = codec_figures(self.codec, self.service, settings)
        clip_s = found["together_s"] / found["together"]
        yield "codec", found
        if self.service.share.by == TIME:
            yield "memory", memory_figures(self.codec, self.service, settings)
        for share, figures in self.stalls(clip_s):
            yield _named("stall", share), figures
        for count in settings.in_flight if self.service.share.by == TIME else settings.in_flight[-1:]:
            if count > 1:
                self.first_chunks(count, settings.sizes.first + 8)  # lets what is compiled at first use be compiled
            yield f"stream {count}", self.first_chunks(count, settings.frames)
        for share in settings.shares:
            if share.rests:
                count = max(settings.in_flight)
                found = self.first_chunks(count, min(settings.frames, _SHARED_FRAMES), share)
                yield _named(f"stream {count}", share), found

    def _config(self, frames: int) -> DecodingConfig:
        """Audio of exactly so many frames."""
        rows = frames + self.layout.num_streams - 1
        path = self.scratch / f"{self.layout.family}-{frames}.yaml"
        if self.layout.family == "bagpiper":
            audio = f"{{temperature: 0.8, topk: 20, cfg: 1, max_step: {rows}, min_step: {rows}}}"
            path.write_text(f"dtype: float32\nenforce_modality: [audio]\naudio: {audio}\n", encoding="utf-8")
        else:
            # The end that is imposed takes a row, and ESPnet drops the frame before it.
            limits = f"minlen: {rows + 1}, maxlen: {rows + 1}, length_method: absolute"
            audio = f"{{search_algo: topk_sampling, sampling_temperature: 0.8, topk: 20, {limits}}}"
            path.write_text(f"codec_ssl: {audio}\n", encoding="utf-8")
        return load_decoding(path, self.layout.family)

    def _utterance(self, key: str) -> Utterance:
        rows = random_prompt(self.layout, self._rng, self.settings.prompt, "audio")
        name = "" if self.layout.family == "bagpiper" else "text_bpe"
        wanted = "" if self.layout.family == "bagpiper" else "codec_ssl"
        return Utterance(key, (Given(rows[:-1], name), Wanted(rows[-1:], wanted)))

    # -- steps ----------------------------------------------------------------------------------------------------
    def stalls(self, clip_s: float) -> Iterator[tuple[Share, dict[str, Any]]]:
        """Step times with nothing beside the engine, and while finished clips are decoded with each share of the device.

        ``clip_s``: seconds that a clip takes among many.
        """
        settings, steps = self.settings, self.engine.steps
        count = max(settings.in_flight)
        config = self._config(min(self.engine.max_rows, _LONG) - settings.prompt - self.layout.num_streams - 8)
        with EngineThread(self.engine) as thread:
            tasks: dict[int, Task] = {}
            over = threading.Event()

            def begin(place: int) -> None:
                """One more request in the place of one that ended, so that as many are in flight all the time."""
                if not over.is_set():
                    utterance = self._utterance(f"b{place}")
                    driver = drive(self.layout, utterance, config, seed=place, context=self.engine.max_rows)
                    tasks[place] = thread.start(
                        driver,
                        lambda outcome: ended(place, outcome),
                        # An engine in a process of its own would not say when it has made a step that nobody waits for.
                        stream_of=lambda _: (1, 1) if place == 0 else None,
                    )

            def ended(place: int, outcome: Hypothesis | SpeechLMError) -> None:
                if isinstance(outcome, Hypothesis):
                    begin(place)
                else:
                    over.set()

            for place in range(count):
                begin(place)
            self._wait(len(steps) + _SETTLE + count * settings.prompt // 2048)
            for share in settings.shares:
                yield share, {"in_flight": count, **self._stall(share, clip_s)}
            over.set()
            for task in tasks.values():
                thread.stop(task)

    def _stall(self, share: Share, clip_s: float) -> dict[str, Any]:
        """The engine is at work."""
        settings, steps = self.settings, self.engine.steps
        count, bursts, alone = _BURST, settings.bursts, settings.steps
        if share.fraction < 1:
            clip_s /= share.fraction if share.rests else 1  # the latter was measured with its share
            count, bursts = min(max(int(_BESIDE_S / clip_s), 2), _BURST), 1
            alone = max(alone // 2, 1)
        frames = max(round(settings.clip_seconds * self.codec.sample_rate / self.codec.hop), 2)
        clips = [_codes(self.codec, self._rng, frames) for _ in range(count)]
        spans: list[tuple[float, float]] = []
        first = len(steps)
        with self._sharing(share):
            for _ in range(bursts):
                self._wait(len(steps) + alone // bursts)
                begun = time.perf_counter()
                self.service.decode(clips)
                spans.append((begun, time.perf_counter()))
            self._wait(len(steps) + _SETTLE)
        measured = steps[first:]
        busy = [end - start for start, end in measured if any(start < b and a < end for a, b in spans)]
        clean = [end - start for start, end in measured if all(start >= b or a >= end for a, b in spans)]
        seconds = statistics.median(b - a for a, b in spans)
        return {
            "share": str(share),
            "clips": count,
            "burst_s": seconds,
            "sound_per_s": count * frames * self.codec.hop / self.codec.sample_rate / seconds,
            "clean": _spread(clean),
            "busy": _spread(busy),
            "all": _spread([*clean, *busy]),
        }

    @contextlib.contextmanager
    def _sharing(self, share: Share) -> Iterator[None]:
        before, self.service.share = self.service.share, share
        try:
            yield
        finally:
            self.service.share = before

    def _wait(self, steps: int) -> None:
        """Until the engine has done so many steps."""
        until = time.monotonic() + _TIMEOUT
        while len(self.engine.steps) < steps:
            assert time.monotonic() < until, f"{len(self.engine.steps)} of {steps} steps in {_TIMEOUT:.0f} s"
            time.sleep(0.002)

    # -- streams --------------------------------------------------------------------------------------------------
    def first_chunks(self, count: int, frames: int, share: Share | None = None) -> dict[str, Any]:
        """``count`` streams that begin at once: seconds until each one's first samples, and until all are heard."""
        config = self._config(frames)
        before, busy = len(self.engine.steps), self.service.usage.busy_s
        with self._sharing(share or self.service.share), EngineThread(self.engine) as thread:
            streamer = Streamer(thread, self.service, self.settings.sizes)
            begun = time.perf_counter()
            heard = asyncio.run(self._listen(streamer, count, config))
            seconds = time.perf_counter() - begun
        sound = sum(samples for _, samples in heard) / self.codec.sample_rate
        first = np.array([delay for delay, _ in heard])
        steps = [end - start for start, end in self.engine.steps[before:]]
        return {
            "in_flight": count,
            "first_chunk_frames": self.settings.sizes.first,
            "rows_until_first": streamer.rows[0] + int(self.layout.family == "bagpiper"),
            "first_p50_s": float(np.percentile(first, 50)),
            "first_p99_s": float(np.percentile(first, 99)),
            "seconds": seconds,
            "sound_s": sound,
            "rtf": seconds / sound,
            "codec_busy_s": self.service.usage.busy_s - busy,
            "steps": _spread(steps),
        }

    async def _listen(self, streamer: Streamer, count: int, config: DecodingConfig) -> list[tuple[float, int]]:
        utterances = [self._utterance(f"s{i}") for i in range(count)]
        begun = time.perf_counter()

        async def one(number: int) -> tuple[float, int]:
            first, samples = 0.0, 0
            async for item in streamer.stream(utterances[number], config, seed=number):
                if isinstance(item, SpeechChunk):
                    first = first or time.perf_counter() - begun
                    samples += len(item.samples)
                else:
                    assert isinstance(item, Result) and item.hypotheses, item
            return first, samples

        return await asyncio.gather(*map(one, range(count)))


def _named(what: str, share: Share) -> str:
    return f"{what}, share {share}" if share.rests else what


def _spread(seconds: list[float]) -> dict[str, float | int | None]:
    if not seconds:
        return {"steps": 0, "mean": None, "p50": None, "p99": None}
    p50, p99 = np.percentile(seconds, [50, 99])
    return {"steps": len(seconds), "mean": float(np.mean(seconds)), "p50": float(p50), "p99": float(p99)}
