"""Vocabulary and streams of an ESPnet SpeechLM checkpoint. No id of the vocabulary is written anywhere else.

Words used in the whole package
    frame      one time step of audio: one code per codebook
    row        one model position, S ids wide; in a delayed audio segment row r carries stream s of frame r - s
    stream     one of the S id sequences; stream 0 is the *primary* (what vLLM sees as the token), 1..S-1 are *auxiliary*
    segment    a run of rows of one modality
    phase      what a request is doing: modality, text, audio, bridge, done
    bridge     rows that are forced, not sampled, between segments
    drain      rows after the end of audio that empty the delay
    codes      the [frames, codebooks] matrix after the delay is undone
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from .errors import CheckpointError

FAMILIES = ("bagpiper", "opuslm")
NUM_SPECIALS = 256
PAD = 0

# Fixed slots of ESPnet's new-style SpeechLM (espnet2/speechlm job template).
# ids 0..11, in this order
BAGPIPER_SPECIALS = (
    "pad",
    "bos",
    "eos",
    "eot",
    "system",
    "user",
    "assistant",
    "text",
    "audio",
    "image",
    "video",
    "toolcall",
)

# Fixed slots of the OpusLM generation (espnet2/speechlm/definitions.py); everything else is looked up by name in token_list.
OPUSLM_SPECIALS = {
    "pad": "<pad>",
    "unk": "<unk>",
    "eos": "<sos/eos>",
    "system": "<system_prompt>",
    "user": "<user_input>",
    "assistant": "<assistant_output>",
}
_OPUSLM_MODALITY_SLOTS = (32, 64)
_OPUSLM_TASK_SLOTS = (64, 128)


class Span(NamedTuple):
    """Half-open range of ids [start, stop)."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def holds(self, token: int) -> bool:
        return self.start <= token < self.stop


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise CheckpointError(message)


@dataclass(frozen=True)
class Layout:
    """Everything that ids mean.

    Attributes:
        family: ``bagpiper`` or ``opuslm``.
        num_streams: S.
        vocab_size: rows of the embedding and of ``lm_head``.
        text: ids of the text tokenizer, in its own order.
        streams: per stream the ids that carry its codes. Bagpiper: the first id of each is that stream's pad.
            OpusLM: pad is id 0 for all streams; stream 0 holds SSL units, streams 1.. one codebook each.
        specials: special ids by name (``eos``, ``assistant``, ``modality/codec_ssl``, ``task/codec_ssl_tts``, ...).
        primary_stream_embedded: whether the stream embedding of stream 0 is added before ``lm_head`` (OpusLM) or not (Bagpiper).
        pad_embedded: whether a pad in an auxiliary stream adds row 0 of the embedding (OpusLM, where a trained row 0 is zero)
            or nothing at all (Bagpiper).

    Raises:
        CheckpointError: if the spans overlap, leave the vocabulary or do not fit the family.
    """

    family: str
    num_streams: int
    vocab_size: int
    text: Span
    streams: tuple[Span, ...]
    specials: Mapping[str, int] = field(hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", Span(*self.text))
        object.__setattr__(self, "streams", tuple(Span(*s) for s in self.streams))
        object.__setattr__(self, "specials", MappingProxyType(dict(self.specials)))
        _expect(self.family in FAMILIES, f"family {self.family!r} is unknown; expected one of {', '.join(FAMILIES)}")
        _expect(
            len(self.streams) == self.num_streams >= 1,
            f"layout has {len(self.streams)} stream spans for {self.num_streams} streams",
        )
        spans = sorted([Span(0, NUM_SPECIALS), self.text, *self.streams])
        for a, b in zip(spans, spans[1:], strict=False):
            _expect(a.start < a.stop <= b.start, f"vocabulary spans {tuple(a)} and {tuple(b)} overlap or are empty")
        _expect(
            spans[-1].stop <= self.vocab_size,
            f"span {tuple(spans[-1])} reaches beyond the vocabulary of {self.vocab_size} ids",
        )
        for name, token in self.specials.items():
            _expect(0 <= token < NUM_SPECIALS, f"special {name} has id {token}, expected one below {NUM_SPECIALS}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout.from_dict, (self.to_dict(),)

    # -- construction -------------------------------------------------------------------------------------------------
    @classmethod
    def bagpiper(cls, text_size: int, stream_sizes: Sequence[int], *, offset: int = 0, vocab_size: int = 0) -> Layout:
        """Specials, then text, then discrete audio.

        Args:
            text_size: size of the text vocabulary (``vocab_size`` of the backbone's own config).
            stream_sizes: ids per stream, each stream's pad included (codebook size + 1).
            offset: ids of other discrete IOs that stand between text and audio (they are sorted by name).
            vocab_size: all ids; 0 takes the end of the audio block.
        """
        text = Span(NUM_SPECIALS, NUM_SPECIALS + text_size)
        streams, start = [], text.stop + offset
        for size in stream_sizes:
            streams.append(Span(start, start + size))
            start += size
        specials = {name: i for i, name in enumerate(BAGPIPER_SPECIALS)}
        return cls("bagpiper", len(streams), vocab_size or start, text, tuple(streams), specials)

    @classmethod
    def opuslm(cls, token_list: Sequence[str], token_bias: Mapping[str, Sequence[int]], num_streams: int) -> Layout:
        """From ``token_list`` and ``token_bias`` of an OpusLM ``config.yaml``.

        ``token_list`` may be shorter than the vocabulary as long as it holds the 256 special tokens.
        """
        for key in ("text_bpe", "ssl", "codec"):
            _expect(key in token_bias, f"token_bias has no {key!r}; it has {', '.join(sorted(token_bias))}")
        _expect(len(token_list) >= NUM_SPECIALS, f"token_list has {len(token_list)} entries, expected at least 256")
        ssl, codec = Span(*token_bias["ssl"]), Span(*token_bias["codec"])
        books = num_streams - 1
        _expect(
            books >= 1 and codec.size % books == 0,
            f"{codec.size} codec ids cannot be shared evenly by {books} codebooks (codec_token_in_use {num_streams})",
        )
        size = codec.size // books
        streams = (ssl, *(Span(codec.start + b * size, codec.start + (b + 1) * size) for b in range(books)))
        vocab_size = max(int(end) for _, end in token_bias.values())
        return cls(
            "opuslm", num_streams, vocab_size, Span(*token_bias["text_bpe"]), streams, _opuslm_specials(token_list)
        )

    # -- what ids mean ------------------------------------------------------------------------------------------------
    @property
    def pad(self) -> int:
        return PAD

    @property
    def primary_stream_embedded(self) -> bool:
        return self.family == "opuslm"

    @property
    def pad_embedded(self) -> bool:
        return self.family == "opuslm"

    @property
    def stop_token(self) -> int:
        """What the engine shows vLLM as the last token of a finished request.

        Neither family can emit it in stream 0: it is in no mask and no rule forces it. The true id travels beside it.
        """
        return self.specials["pad"] if self.family == "bagpiper" else self.specials["unk"]

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Ids of stream 0 that end a segment."""
        if self.family == "bagpiper":
            return (self.specials["eos"], self.specials["eot"])
        return (self.specials["eos"],)

    @property
    def modality_span(self) -> Span:
        """Bagpiper: what may follow ``<|assistant|>`` (text, audio, image, video, toolcall)."""
        _expect(self.family == "bagpiper", "only the bagpiper family chooses a modality by a token")
        return Span(self.specials["text"], self.specials["toolcall"] + 1)

    @property
    def stream_pads(self) -> tuple[int, ...]:
        """The id that means "no code" inside an audio segment, per stream."""
        return tuple(s.start for s in self.streams) if self.family == "bagpiper" else (PAD,) * self.num_streams

    @property
    def code_spans(self) -> tuple[Span, ...]:
        """Per stream the ids of codes 0.., without the pad."""
        skip = 1 if self.family == "bagpiper" else 0
        return tuple(Span(s.start + skip, s.stop) for s in self.streams)

    @property
    def codec_streams(self) -> range:
        """Streams that the codec decodes: all (Bagpiper) or all but the SSL units of stream 0 (OpusLM)."""
        return range(0 if self.family == "bagpiper" else 1, self.num_streams)

    def primary_spans(self, modality: str) -> tuple[Span, ...]:
        """Ids of stream 0 that content of ``text`` or ``audio`` may take; the end tokens are opened by the protocol.

        OpusLM also allows the modality's own start token as content (ESPnet ``ARDelayLM`` mask).
        """
        content = self.text if modality == "text" else self.streams[0]
        if self.family == "bagpiper":
            return (content,)
        marker = self.modality_token(modality)
        return (Span(marker, marker + 1), content)

    def modality_token(self, modality: str) -> int:
        """The id that announces a segment of ``text`` or ``audio``."""
        if self.family == "bagpiper":
            return self.specials[modality]
        return self.specials["modality/text_bpe" if modality == "text" else "modality/codec_ssl"]

    def auxiliary_candidates(self) -> list[list[int]]:
        """Per auxiliary stream the ids that an audio row may take, its pad first. S-1 lists."""
        return [
            [self.stream_pads[s], *range(self.code_spans[s].start, self.code_spans[s].stop)]
            for s in range(1, self.num_streams)
        ]

    def modality_of(self, token: int) -> str | None:
        """``text``/``audio`` (or another Bagpiper modality's name) if ``token`` announces a segment, else None."""
        if self.family == "bagpiper":
            return BAGPIPER_SPECIALS[token] if self.modality_span.holds(token) else None
        for name, value in self.specials.items():
            if value == token and name.startswith("modality/"):
                return name.removeprefix("modality/")
        return None

    # -- storage ------------------------------------------------------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        return {
            "family": self.family,
            "num_streams": self.num_streams,
            "vocab_size": self.vocab_size,
            "text": list(self.text),
            "streams": [list(s) for s in self.streams],
            "specials": dict(self.specials),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Layout:
        fields = ("family", "num_streams", "vocab_size", "text", "streams", "specials")
        missing = [name for name in fields if name not in data]
        _expect(not missing, f"layout description lacks {', '.join(missing)}")
        return cls(**{name: data[name] for name in fields})


def _opuslm_specials(token_list: Sequence[str]) -> dict[str, int]:
    ids = {name: i for i, name in enumerate(token_list[:NUM_SPECIALS])}
    missing = [token for token in OPUSLM_SPECIALS.values() if token not in ids]
    _expect(not missing, f"token_list lacks the special tokens {', '.join(missing)} among its first {NUM_SPECIALS}")
    specials = {name: ids[token] for name, token in OPUSLM_SPECIALS.items()}
    specials.update(_named_slots(token_list, _OPUSLM_MODALITY_SLOTS, "_start/end>", "modality/"))
    specials.update(_named_slots(token_list, _OPUSLM_TASK_SLOTS, "_task>", "task/"))
    for name in ("modality/codec_ssl", "modality/text_bpe", "modality/spk"):
        _expect(name in specials, f"token_list has no <{name.removeprefix('modality/')}_start/end>")
    return specials


def _named_slots(
    token_list: Sequence[str], slots: tuple[int, int], suffix: str, prefix: str
) -> Iterator[tuple[str, int]]:
    for i in range(*slots):
        if token_list[i].startswith("<") and token_list[i].endswith(suffix):
            yield prefix + token_list[i][1 : -len(suffix)], i


def bagpiper_offsets(
    sizes: Mapping[str, int], *, vocab_order: str = "yaml", source: str = "train.yaml"
) -> dict[str, int]:
    """First id of each discrete IO, text included.

    ESPnet gives ids in the order of the yaml's keys (``SpeechLMJobTemplate._build_vocabulary``).

    Args:
        sizes: ids per discrete IO in the order of the yaml's keys.
        vocab_order: ``yaml``; or ``name`` for text first, then the others sorted by name, whatever the order of the keys.

    Raises:
        CheckpointError: if there is no text, or ``vocab_order`` is neither.
    """
    _expect("text" in sizes, f"{source}: multimodal_io has no 'text' among its discrete IOs {', '.join(sizes)}")
    _expect(vocab_order in ("name", "yaml"), f"vocab_order is {vocab_order!r}, expected 'name' or 'yaml'")
    names = list(sizes) if vocab_order == "yaml" else ["text", *sorted(name for name in sizes if name != "text")]
    start, result = NUM_SPECIALS, {}
    for name in names:
        result[name] = start
        start += sizes[name]
    return result
