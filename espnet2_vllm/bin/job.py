"""One decoding job: utterances in, results on disk, an outcome for every key."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..audio_format import AudioFormat
from ..drive import draw_seed
from ..engine.quantized import MEANINGS
from ..errors import CheckpointError, EngineError, SpeechLMError
from ..io.journal import CHECKPOINT_PATH, Record, digest, earlier_settings
from ..io.results import OUTSIDE, Draft, ResultWriter, Speech, outcome
from ..plan import FAILED, OK, OUTCOMES, Utterance
from .options import RANDOM_SEED, gpus_wanted

if TYPE_CHECKING:
    from ..audio.tower import AudioTower
    from ..backends import Engine
    from ..codec import Codec, CodecDescription
    from ..decoding import DecodingConfig
    from ..layout import Layout

log = logging.getLogger(__name__)

Item = Utterance | tuple[str, SpeechLMError]
_WRITERS = 4  # results that are written at once
_BACKLOG = 256  # results that may wait for their waveforms before the engine waits for them
_LOG_SECONDS = 30.0  # between two lines of progress where there is no terminal
_NAMED_FAILURES = 20  # keys without a result that the last lines name


@dataclass
class Tally:
    """What became of the utterances of a job."""

    outcomes: Counter[str] = field(default_factory=Counter)
    taken_over: int = 0
    rows: int = 0
    audio_seconds: float = 0.0
    failed: dict[str, str] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, record: Record, *, taken_over: bool = False) -> None:
        self.outcomes[record.outcome] += 1
        if record.outcome in FAILED:
            self.failed[record.key] = record.reason
        if taken_over:
            self.taken_over += 1
        else:
            self.rows += record.rows
            self.audio_seconds += record.audio_seconds

    @property
    def total(self) -> int:
        return sum(self.outcomes.values())

    def summary(self, seconds: float) -> str:
        """Counts by outcome, rows a second, and seconds of decoding for one second of generated audio."""
        counts = ", ".join(f"{self.outcomes[name]} {name}" for name in OUTCOMES if self.outcomes[name])
        parts = [f"{self.total} utterances: {counts or 'none'}"]
        if self.taken_over:
            parts.append(f"{self.taken_over} of them taken over from an earlier run")
        parts.append(f"{self.rows} rows in {seconds:.1f} s ({self.rows / max(seconds, 1e-9):.1f} rows/s)")
        if self.audio_seconds:
            parts.append(f"{self.audio_seconds:.1f} s of audio, real time factor {seconds / self.audio_seconds:.3f}")
        return "; ".join(parts)


def run_job(
    engine: Engine,
    config: DecodingConfig,
    writers: Sequence[ResultWriter],
    items: Iterable[tuple[ResultWriter, Item]],
    *,
    speech: Speech | None,
    seed: int,
    nbest: int = 1,
    in_flight: int = 1024,
    total: int = 0,
    make_tower: Callable[[], AudioTower] | None = None,
) -> Tally:
    """Decodes ``items`` and writes everything that ``writers`` have to write.

    What a journal holds already is not decoded again. Waveforms are made and written in a thread of their own, so that the engine
    does not wait for the codec.

    Args:
        items: utterances, or (key, error) for those that could not be read, each with the writer of its results.
        in_flight: utterances handed to ``engine`` at once, at most.
        total: number of items, for the progress display.
        make_tower: what encodes continuous rows; called when the first sound comes.

    Raises:
        SpeechLMError, OSError: what ends the job as a whole. The journals then hold all that was finished.
    """
    from ..audio.ahead import encoded
    from ..backends import decode

    for writer in writers:
        writer.begin()
    tally = Tally()
    keys: dict[ResultWriter, list[str]] = {writer: [] for writer in writers}
    begun: dict[str, tuple[ResultWriter, float]] = {}

    def fresh() -> Iterator[Item]:
        for writer, item in items:
            key = item.key if isinstance(item, Utterance) else item[0]
            keys[writer].append(key)
            if isinstance(item, Utterance) and writer.journal.finished(key, digest(item)):
                tally.add(writer.journal.records[key], taken_over=True)
                continue
            begun[key] = writer, time.monotonic()
            yield item

    if speech is not None:
        speech.beside = lambda: engine.unfinished > 0
    with _saying_how_to_go_on(), Progress(total, tally) as progress, Store(speech, tally) as store:
        utterances = fresh() if make_tower is None else encoded(fresh(), make_tower)
        results = decode(
            engine, utterances, config, seed=seed, nbest=nbest, in_flight=in_flight, on_progress=progress.update
        )
        for result in results:
            writer, since = begun.pop(result.key)
            store.put(writer, writer.draft(result, time.monotonic() - since))
    for writer in writers:
        writer.finish(keys[writer])
        tally.notes.update(writer.notes)
    return tally


@contextlib.contextmanager
def _saying_how_to_go_on() -> Iterator[None]:
    try:
        yield
    except (EngineError, OSError):
        log.warning("the run ends early: what was finished is in the journal, the same command goes on from there")
        raise


class Store:
    """Turns drafts into files in the background: the codec decodes, and several threads write. Leaving the block waits for all."""

    def __init__(self, speech: Speech | None, tally: Tally) -> None:
        self._speech, self._tally = speech, tally
        self._futures: deque[Future] = deque()
        self._pool = ThreadPoolExecutor(_WRITERS, thread_name_prefix="results")

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self._pool.shutdown(wait=True)
        if kind is None:
            self._collect(0)

    def put(self, writer: ResultWriter, draft: Draft) -> None:
        """Takes a draft over; raises what went wrong with an earlier one. Waits while the codec has too much to do."""
        wavs = [self._speech.submit(clip.codes) for clip in draft.clips]
        self._futures.append(self._pool.submit(self._commit, writer, draft, wavs))
        self._collect(_BACKLOG)

    def _collect(self, allowed: int) -> None:
        while self._futures and (len(self._futures) > allowed or self._futures[0].done()):
            self._tally.add(self._futures.popleft().result())

    def _commit(self, writer: ResultWriter, draft: Draft, wavs: Sequence[Future]) -> Record:
        try:
            record = writer.commit(draft, [outcome(wav) for wav in wavs])
        except OSError as error:
            error.filename = error.filename or str(writer.directory)  # a full disk does not say where
            raise
        if record.outcome != OK:
            level = logging.ERROR if record.outcome in FAILED else logging.WARNING
            log.log(level, "%s: %s: %s", record.key, record.outcome, record.reason)
        if record.outside:
            log.warning("%s: %d %s", record.key, record.outside, OUTSIDE)
        return record


class Progress:
    """A bar on a terminal, a line every half minute in a log."""

    def __init__(self, total: int, tally: Tally) -> None:
        self._total, self._tally = total, tally
        self._begun = self._logged = time.monotonic()
        self._bar: Any = None
        self._redirect: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from tqdm import tqdm
            from tqdm.contrib.logging import logging_redirect_tqdm

            self._bar = tqdm(total=self._total or None, unit="utt", dynamic_ncols=True)
            self._redirect = logging_redirect_tqdm()
            self._redirect.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._redirect.__exit__(*error)
            self._bar.close()

    def update(self, results: int, rows: int) -> None:
        """``results`` and generated ``rows`` so far, without what was taken over."""
        done = results + self._tally.taken_over
        speed = rows / max(time.monotonic() - self._begun, 1e-9)
        if self._bar is not None:
            self._bar.set_postfix_str(f"{rows} rows, {speed:.0f} rows/s", refresh=False)
            self._bar.update(done - self._bar.n)
        elif time.monotonic() - self._logged >= _LOG_SECONDS:
            self._logged = time.monotonic()
            log.info("%d of %d utterances, %d rows, %.1f rows/s", done, self._total, rows, speed)


def report(tally: Tally, seconds: float, where: str) -> int:
    """Logs what came out; returns the exit code: 0 if every utterance has a result, else 1."""
    for note, count in sorted(tally.notes.items()):
        if count:
            log.warning("%d %s", count, note)
    for key, reason in list(tally.failed.items())[:_NAMED_FAILURES]:
        log.error("no result for %s: %s", key, reason)
    if len(tally.failed) > _NAMED_FAILURES:
        log.error("no result for %d more; the journal names them", len(tally.failed) - _NAMED_FAILURES)
    log.info("%s; results in %s", tally.summary(seconds), where)
    return 1 if tally.failed else 0


def load_fitting_codec(description: CodecDescription, base_dir: Path, layout: Layout, device: str) -> Codec:
    """The codec that ``description`` names, if it has the codebooks of ``layout``.

    Raises:
        CheckpointError: if it cannot be loaded or does not fit.
    """
    from ..codec import check_codec_fits, load_codec

    sizes = {layout.code_spans[stream].size for stream in layout.codec_streams}
    if len(sizes) != 1:
        raise CheckpointError(f"the codebooks of the checkpoint differ in size: {sorted(sizes)}")
    codec = load_codec(description, device=device, base_dir=base_dir)
    check_codec_fits(codec, len(layout.codec_streams), sizes.pop())
    return codec


def prepare_speech(speech: Speech | None, args: argparse.Namespace, options: Mapping[str, Any]) -> dict[str, Any]:
    """Starts the codec in the format that was asked for; the engine's options, with the codec's memory out of vLLM's share.

    Raises:
        ConfigError: for a format that does not exist, or if no memory would be left.
    """
    form = AudioFormat(args.audio_format, args.audio_bits)
    if speech is None:
        return dict(options)
    speech.form, speech.share, speech.tf32 = form, args.codec_share, args.codec_tf32
    taken = speech.prepare()
    elsewhere = taken and (speech.codec.device.index or 0) >= gpus_wanted(args)
    if not taken or elsewhere or args.backend != "vllm":
        return dict(options)
    import torch

    from ..codec.budget import make_room

    return make_room(options, taken, torch.cuda.get_device_properties(speech.codec.device).total_memory)


def drawn_seed(seed: int | str, resume: bool, directories: Iterable[Path]) -> int:
    """The seed of a run that was given ``seed``, a number or ``random``.

    A run that may go on where an earlier one stopped takes the seed that this one wrote into the first of ``directories`` that
    has a journal; otherwise one is drawn and logged.
    """
    if seed != RANDOM_SEED:
        return int(seed)
    earlier = next(filter(None, map(earlier_settings, directories)), {}).get("seed") if resume else None
    if not isinstance(earlier, int):
        return draw_seed()
    log.info("going on with seed %d, with which the earlier run began", earlier)
    return earlier


def _without_defaults(decoding: dict[str, Any]) -> None:
    """Takes out what changes nothing, so that a run takes over what was written before there was such a setting."""
    if not decoding["fixed_length"]:
        del decoding["fixed_length"]
    for block in (decoding["text"], decoding["audio"]):
        if block is not None and block["top_p"] == 1:
            del block["top_p"]


# Of prompts, decoding and result files: to be raised with every change after which the same input gives other results.
RULES = 1
RESULT_OPTIONS = ("max_rows", "max_model_len", "load_format", "quantization", "quantization_config", "kv_cache_dtype")
RESULT_OPTIONS += ("hf_overrides", *MEANINGS)


def journal_settings(
    config: DecodingConfig,
    *,
    checkpoint: Mapping[str, Any],
    checkpoint_path: Path | None = None,
    backend: str,
    seed: int,
    nbest: int,
    options: Mapping[str, Any],
    with_scores: bool = False,
    form: AudioFormat | None = None,
) -> dict[str, Any]:
    """Everything that results depend on besides the utterances themselves; of the engine's ``options`` those that do.

    Args:
        checkpoint: ``checkpoint.identity``. Where it lies is noted for reports only.
    """
    decoding = asdict(config)
    for name in ("source", "cli", "nproc", "seed", "nbest"):  # where they come from, or how files are laid out
        del decoding[name]
    _without_defaults(decoding)
    return {
        "version": __version__,
        "rules": RULES,
        "backend": backend,
        "checkpoint": dict(checkpoint),
        **({} if checkpoint_path is None else {CHECKPOINT_PATH: str(checkpoint_path)}),
        "decoding": decoding,
        "seed": seed,
        "nbest": nbest,
        "engine": {name: str(options[name]) for name in RESULT_OPTIONS if name in options},
        # Only where there are some, so that a run without scores takes over what an earlier version wrote.
        **({"scores": True} if with_scores else {}),
        **({} if form in (None, AudioFormat()) else {"audio": [form.name, form.bits]}),
    }
