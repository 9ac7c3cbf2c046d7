"""The Python interface: a checkpoint that listens, answers and speaks.

    from espnet2_vllm import SpeechLM
    print(SpeechLM.from_pretrained("exp/bagpiper").describe("speech.wav"))

Messages are what ``dialogue`` jsonl lines hold: ``[role, modality, content]`` with the roles ``system``, ``user`` and
``assistant``, the modalities ``text`` and ``audio``, and as content a text, the name of a recording (a path, ``ark:offset`` or
``command |``) or (samples, rate). Nothing heavy is imported before a checkpoint is opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .answer import Answer, answers_of, only_answer, wav_bytes
from .assistant import Assistant, Choice, Message
from .audio.reading import reading_of
from .decoding_choice import ESPNET_SAMPLING, Decoding, label_of, settings_of
from .drive import checked_seed
from .errors import CheckpointError, ConfigError, DataError, EngineError, SpeechLMError
from .generation import Generation, begun_in_thread, cancel
from .io.items import item
from .plan import REFUSED, Result, Utterance
from .pretrained import one_of, open_pretrained
from .prompt.conversation import checked_messages, is_conversation, load_codes, opuslm_conversation
from .releases import DEFAULT_TAG, OPUSLM, Release

if TYPE_CHECKING:
    from .audio.tokenising import SpeechTokeniser
    from .audio.tower import AudioTower
    from .audio.units import UnitsDescription
    from .backends import Engine
    from .checkpoint import Checkpoint
    from .codec.chunks import ChunkSizes
    from .decoding import DecodingConfig
    from .io.results import Speech
    from .streaming import EngineThread, SpeechChunk
    from .text import TextTokenizer

log = logging.getLogger(__name__)


class SpeechLM(Assistant):
    """A checkpoint on an engine. Any number of threads and coroutines may use it at once; their requests are batched.

    Made by ``from_pretrained``. Leaving the block, or ``close``, frees the device.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        backend: str = "vllm",
        dtype: str | None = None,
        device: str | None = None,
        decoding: Choice = None,
        long_audio: str = "whole",
        clean_up_text: bool = False,
        units: UnitsDescription | None = None,
        codec_share: float | str = 1.0,
        codec_tf32: bool = False,
        release: Release | None = None,
        attn_implementation: str | None = None,
        commands: str = "refuse",
        max_audio_samples: int | None = None,
        **options: Any,
    ) -> None:
        from .backends import check_engine, check_options
        from .bin.options import choose_device
        from .codec.share import Share
        from .logs import quiet_engine
        from .plan import LONG_AUDIO
        from .prompt.bagpiper import listening_of

        if units is not None and not hasattr(units, "kmeans"):
            raise ConfigError(f"units: expected an audio.units.UnitsDescription, got {units!r}")
        if long_audio not in LONG_AUDIO:
            raise ConfigError(f"long_audio {long_audio!r} is unknown; expected one of {', '.join(LONG_AUDIO)}")
        self.checkpoint, self.backend, self.options = checkpoint, backend, options
        self.release = release or (OPUSLM if checkpoint.family == "opuslm" else Release())
        self.device = choose_device(device, gpu=True)
        self.dtype = dtype or self.release.dtype or ("float32" if self.device == "cpu" else "bfloat16")
        check_engine(backend, self.dtype)
        quiet_engine()
        check_options(backend, options)
        if attn_implementation is not None:
            log.warning(
                "attn_implementation %r has no effect: the engine chooses its own attention", attn_implementation
            )
        self.decoding, self.units, self.clean_up_text = decoding, units, clean_up_text
        self.codec_share, self.codec_tf32 = Share.parse(str(codec_share)), codec_tf32
        self.notes: Counter[str] = Counter()
        self.listening = listening_of(checkpoint, long_audio)
        notes = self.notes if self.listening is None else self.listening.notes
        self.reading = reading_of(commands, channel="first", max_audio_samples=max_audio_samples, notes=notes)
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._thread: EngineThread | None = None
        self.config(None)  # a mistake in the settings should not wait for the engine

    @classmethod
    def from_pretrained(
        cls,
        tag_or_dir: str | Path = DEFAULT_TAG,
        device: str | None = None,
        dtype: str | None = None,
        train_config: str | Path | None = None,
        checkpoint: str | Path | None = None,
        allow_base: bool = False,
        attn_implementation: str | None = None,
        *,
        model_file: str | Path | None = None,
        vocab_order: str = "yaml",
        **options: Any,
    ) -> SpeechLM:
        """Opens a checkpoint. The first seven arguments are those of ESPnet's ``LocalBagpiper.from_pretrained``.

        Args:
            tag_or_dir: a tag of the Hugging Face hub, which is downloaded once; an ESPnet release or experiment folder or its
                training yaml, which is converted once; or a converted directory.
            device: of codec and encoder; the ``vllm`` backend takes the GPUs that it sees.
            dtype: that of the release's ``inference_text.yaml`` or ``inference.yaml``, else bfloat16 on a GPU and float32 on a CPU.
            train_config, checkpoint: the training yaml and the model, where the folder holds several or none. A release folder
                has one ``*.yaml`` beside ``inference*.yaml`` and one ``*.pt``. ``model_file`` is another name of ``checkpoint``.
            allow_base: open ``espnet/bagpiper``, which was never tuned to answer.
            attn_implementation: taken and logged, without effect: the engine chooses its own attention.
            vocab_order: see ``espnet2-vllm convert``.
            options: ``backend`` (``vllm`` or ``pytorch``), ``decoding`` (defaults of every call), ``long_audio`` (``whole``,
                ``cut`` or ``refuse``: recordings beyond 30 s), ``clean_up_text`` (as on the command line), ``units`` (OpusLM: the
                ``audio.units.UnitsDescription`` of the SSL model that recordings are tokenised with), ``codec_share`` and
                ``codec_tf32`` (as on the command lines), ``commands`` (``refuse``, or ``allow``: a recording may be named as
                ``command |``), ``max_audio_samples`` (of a recording that are read, at most), and options of the engine such as
                ``max_num_seqs``.

        Raises:
            CheckpointError: if there is no such checkpoint, or it cannot be used.
            ConfigError: for an option or setting that cannot be used.
        """
        opened, release = open_pretrained(
            tag_or_dir,
            train_config=train_config,
            checkpoint=one_of(checkpoint, model_file),
            vocab_order=vocab_order,
            allow_base=allow_base,
        )
        own = {"device": device, "dtype": dtype, "release": release, "attn_implementation": attn_implementation}
        return cls(opened, **own, **options)

    def __repr__(self) -> str:
        return f"SpeechLM({str(self.checkpoint.path)!r}, backend={self.backend!r}, device={self.device!r}, dtype={self.dtype!r})"

    # -- what it does -------------------------------------------------------------------------------------------------
    def generate(
        self,
        messages: Sequence[Any],
        decoding: Choice = None,
        *,
        answer: Sequence[str] = ("text",),
        seed: int | None = None,
    ) -> Answer | list[Answer]:
        """Answers a conversation, or many of them together.

        Args:
            messages: one conversation, or a list of them.
            decoding: settings for this call, over the model's own.
            answer: OpusLM: the modalities of the assistant's turns to generate. Of Bagpiper, ``enforce_modality`` says it.
            seed: of the sampling; None draws one and logs it. A conversation's samples depend on its place in the list.

        Returns:
            An ``Answer``, or as many as there are conversations, in their order.

        Raises:
            DataError, ...: if the one conversation is refused. Of many, the refused ones have that outcome.
        """
        self._check_answer(answer, ("text",))
        answers, single = self._generate(messages, self.config(decoding), answer, seed)
        return only_answer(answers) if single else answers

    def _generate(
        self, messages: Sequence[Any], config: DecodingConfig, answer: Sequence[str], seed: int | None
    ) -> tuple[list[Answer], bool]:
        futures, single = self._begin(messages, config, answer, seed)
        try:
            results = [future.result() for future in futures]
        except BaseException:  # interrupted: nobody waits for the others any more
            cancel(futures)
            raise
        return self._answers(results), single

    async def generate_async(
        self,
        messages: Sequence[Any],
        decoding: Choice = None,
        *,
        answer: Sequence[str] = ("text",),
        seed: int | None = None,
    ) -> Answer | list[Answer]:
        """``generate`` for coroutines: many calls at once are batched by the engine."""
        self._check_answer(answer, ("text",))
        config = self.config(decoding)
        futures, single = await begun_in_thread(lambda: self._begin(messages, config, answer, seed))
        results = await asyncio.gather(*map(asyncio.wrap_future, futures))
        answers = await asyncio.to_thread(self._answers, results)
        return only_answer(answers) if single else answers

    async def stream(
        self,
        messages: Sequence[Any],
        decoding: Choice = None,
        *,
        answer: Sequence[str] = ("audio",),
        seed: int | None = None,
        sizes: ChunkSizes | None = None,
    ) -> AsyncIterator[SpeechChunk | Result]:
        """Sound while it is generated: the chunks of one conversation's answer, then its result (``streaming.Streamer.stream``).

        Leaving the loop drops the request. ``sizes``: frames of the first chunk (5) and of those behind it (25).
        """
        from .streaming import Streamer

        config, seed = self.config(decoding), checked_seed(seed)
        self._check_answer(answer, ("audio",))
        (utterance,) = await asyncio.to_thread(self.utterances, [messages], answer, seed)
        if isinstance(utterance, SpeechLMError):
            raise utterance

        def make() -> Streamer:
            engine = self.engine
            with self._lock:  # of calls that come together one makes the codec
                return Streamer(engine, self.speech.service, sizes)

        streamer = await asyncio.to_thread(make)
        async with contextlib.aclosing(streamer.stream(utterance, config, seed=seed)) as stream:
            async for item in stream:
                yield item

    def _chat(
        self, messages: list[Message], audio_out: bool, decoding: Choice, seed: int | None
    ) -> tuple[str, bytes | None]:
        """See ``Assistant``; as ESPnet's ``LocalBagpiper._chat``. Of OpusLM, the answer's turns are these modalities."""
        modalities = self.release.render_modalities if audio_out else ("text",)
        if self.checkpoint.family == "opuslm":
            turns, config = modalities, self.config(decoding)
        else:
            turns = ("text",)
            own = replace(ESPNET_SAMPLING, source=self.release.audio if audio_out else self.release.text)
            config = self.config(Decoding.over(decoding, enforce_modality=modalities), under=own)
        answer = only_answer(self._generate(messages, config, turns, seed)[0])
        sounds = [content for _, modality, content in answer.messages if modality == "audio"]
        if len(sounds) > 1:
            log.warning("of %d segments of sound the first is returned", len(sounds))
        text = "\n".join(content for _, modality, content in answer.messages if modality == "text" and content)
        return text, wav_bytes(*sounds[0]) if sounds and sounds[0] is not None else None

    def _check_answer(self, answer: Sequence[str], default: tuple[str, ...]) -> None:
        if self.checkpoint.family == "bagpiper" and answer not in (default, [*default]):
            raise ConfigError(
                f"answer {answer!r}: is for OpusLM checkpoints; of Bagpiper, enforce_modality names segments"
            )

    def close(self) -> None:
        """Ends what is in flight, and frees engine, codec and encoder; a later call makes them anew."""
        with self._lock:
            if (
                self._thread is not None and not self._thread.is_here
            ):  # forked: they are the other process's, who goes on with them
                self._thread = self._engine = None
                self.__dict__.pop("speech", None)
            if self._thread is not None:
                self._thread.close()
                self._engine.close()
            self._thread = self._engine = None
            if "speech" in self.__dict__:
                self.speech.close()
            for part in ("speech", "tower", "tokeniser"):
                self.__dict__.pop(part, None)

    def __enter__(self) -> SpeechLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- its parts, each made when it is first needed -----------------------------------------------------------------
    @cached_property
    def tokenizer(self) -> TextTokenizer:
        from .text import TextTokenizer

        return TextTokenizer(self.checkpoint.tokenizer_dir, clean_up=self.clean_up_text)

    @cached_property
    def speech(self) -> Speech:
        """The codec. CheckpointError if the checkpoint names none."""
        from .bin.job import load_fitting_codec
        from .codec import SILENT_FRAMES
        from .io.results import Speech

        if self.checkpoint.codec is None:
            raise CheckpointError(f"{self.checkpoint.path}: the checkpoint names no codec, so there is no sound")
        codec = load_fitting_codec(
            self.checkpoint.codec, self.checkpoint.codec_base, self.checkpoint.layout, self.device
        )
        silent_frames = SILENT_FRAMES if self.checkpoint.family == "opuslm" else 0
        speech = Speech(codec, silent_frames=silent_frames, share=self.codec_share, tf32=self.codec_tf32)
        speech.beside = lambda: (engine := self._engine) is not None and engine.unfinished > 0
        return speech

    @cached_property
    def tower(self) -> AudioTower:
        from .audio.tower import AudioTower

        return AudioTower(self.checkpoint, dtype=self.dtype, device=self.device)

    @property
    def engine(self) -> EngineThread:
        """The engine's thread, through which everything goes."""
        from .backends import make_engine
        from .streaming import EngineThread

        with self._lock:
            if self._thread is None:
                options = {"device": self.device, **self.options} if self.backend == "pytorch" else self.options
                self._engine = make_engine(self.backend, self.checkpoint, self.dtype, **options)
                self._thread = EngineThread(self._engine)
            return self._thread

    def config(self, decoding: Choice, under: Choice = None) -> DecodingConfig:
        """The model's settings with those of a call over them. ConfigError, naming the key, for what is wrong."""
        from .decoding import load_decoding

        family, choices = self.checkpoint.family, (under, self.decoding, decoding)
        config = load_decoding(settings_of(family, *choices), family, label=label_of(*choices))
        config.check_vocabulary(self.checkpoint.layout.vocab_size)
        return config

    # -- from messages to utterances ----------------------------------------------------------------------------------
    def utterances(
        self, conversations: Sequence[Any], answer: Sequence[str] = ("text",), seed: int = 0
    ) -> list[Utterance | SpeechLMError]:
        """One for each conversation, by its place as key, its sound encoded; or why there is none."""
        found: list[Utterance | SpeechLMError] = []
        for place, messages in enumerate(conversations):
            try:
                with item():
                    found.append(self._utterance(str(place), checked_messages(messages), answer, seed))
            except DataError as error:
                found.append(error)
        from .audio.ahead import encode_each, sounds

        if any(map(sounds, found)):
            with self._lock:
                encoded = encode_each(found, self.tower)
            found = [item[1] if isinstance(item, tuple) else item for item in encoded]
        return found

    def _utterance(self, key: str, messages: list[list[Any]], answer: Sequence[str], seed: int) -> Utterance:
        layout = self.checkpoint.layout
        if self.checkpoint.family == "opuslm":
            from .prompt.opuslm import Facts

            facts = Facts.from_preprocessor(self.checkpoint.preprocessor)
            return opuslm_conversation(
                layout, self.tokenizer, facts, messages, key=key, answer=answer, load_audio=self._codes, seed=seed
            )
        from .prompt.bagpiper import bagpiper_utterance, codec_encoder

        def encode(clips: Sequence[Any]) -> Sequence[np.ndarray]:
            with self._lock:
                return codec_encoder(layout, self.speech.codec, self.notes)(clips)

        return bagpiper_utterance(
            layout,
            self.tokenizer,
            messages,
            key=key,
            encode_audio=None if self.checkpoint.codec is None else encode,
            listening=self.listening,
            upto_assistant=False,
            reading=self.reading,
        )

    @cached_property
    def tokeniser(self) -> SpeechTokeniser:
        """What makes OpusLM's codes of recordings."""
        from .audio.tokenising import SpeechTokeniser
        from .audio.units import SpeechUnits

        layout = self.checkpoint.layout
        units = SpeechUnits(self.units, clusters=layout.streams[0].size, device=self.device)
        return SpeechTokeniser(layout, self.speech.codec, units, self.notes)

    def _codes(self, content: Any) -> np.ndarray:
        """Codes of an audio message of OpusLM: given as such, or made of a recording where ``units`` are known."""
        from .prompt.bagpiper import read_recording

        spoken = isinstance(content, tuple) or (isinstance(content, str) and not content.rpartition(":")[2].isdecimal())
        if self.units is None or not spoken:
            return load_codes(content)
        clip = read_recording(content, None, self.reading) if isinstance(content, str) else content
        with self._lock:
            (codes,) = self.tokeniser([clip])
        if isinstance(codes, DataError):
            raise codes
        return codes

    # -- through the engine -------------------------------------------------------------------------------------------
    def _begin(
        self,
        messages: Sequence[Any],
        config: DecodingConfig,
        answer: Sequence[str],
        seed: int | None,
    ) -> tuple[list[Future[Result]], bool]:
        if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
            raise DataError(
                f"messages: expected a list of [role, modality, content], or many such lists, got {messages!r}"
            )
        single = is_conversation(messages)
        seed = checked_seed(seed)
        futures: list[Future[Result]] = []
        items = self.utterances([messages] if single else messages, answer, seed)
        if single and isinstance(items[0], SpeechLMError):
            raise items[0]
        try:
            for place, item in enumerate(items):
                if isinstance(item, SpeechLMError):
                    futures.append(Future())
                    futures[-1].set_result(Result(str(place), (), REFUSED, str(item)))
                else:
                    futures.append(Generation(self.engine, item, config, seed).future)
        except BaseException:  # interrupted: nobody will wait for those that are on their way
            cancel(futures)
            raise
        return futures, single

    def _answers(self, results: Sequence[Result]) -> list[Answer]:
        layout = self.checkpoint.layout
        return answers_of(layout, results, getattr(self.tokenizer, f"decode_{layout.family}"), self._sounds)

    def _sounds(self, codes: Sequence[np.ndarray]) -> tuple[Sequence[np.ndarray | SpeechLMError], int]:
        with self._lock:
            if self._thread is None:  # closed meanwhile: a codec that is made now would stay
                return [EngineError("the model was closed before the sound was decoded")] * len(codes), 0
            return self.speech.decode(codes), self.speech.sample_rate
