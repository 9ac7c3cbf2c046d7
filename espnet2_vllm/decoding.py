"""Decoding settings: ESPnet's three yaml dialects, read into one validated configuration.

``bagpiper``: blocks ``audio`` and ``text`` (``ParallelLLM.inference``). ``chat``: a block a modality, ``codec_ssl`` and
``text_bpe`` (``espnet2.speechlm.inference_utils.build_inference_config``). ``flat``: options of the older
``espnet2.bin.speechlm_inference``, the same for text and audio. Every value is checked here, once.
"""

import copy
import dataclasses
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from espnet2_vllm import decoding_rules as rules
from espnet2_vllm.errors import ConfigError
from espnet2_vllm.protocol import EVERY
from espnet2_vllm.yaml_document import Document

log = logging.getLogger(__name__)

SEARCHES = ("greedy", "topk", "topp", "teacher_force")
BLOCKS = {  # of each dialect, the key whose settings serve a modality
    "bagpiper": {"text": "text", "audio": "audio"},
    "chat": {"text": "text_bpe", "audio": "codec_ssl"},
    "flat": {"text": "search_algo", "audio": "search_algo"},
}


@dataclass(frozen=True)
class SegmentConfig:
    """How the rows of one modality's segments are chosen.

    search: 'greedy', 'topk', 'topp' or 'teacher_force' (argmax under the reference history).
    temperature: > 0; topk: >= 1. Both 1 for greedy and teacher_force. ``topk`` 1 is greedy whatever the temperature.
    top_p: from 0 (greedy) to 1 for topp, whose ``topk`` is ``protocol.EVERY``; 1 for all others. See ``protocol.Sampling``.
    min_rows: the first row (from 0) at which a segment may end. max_rows: the most rows of a segment, delayed rows
    where the model delays; None where ratios rule. min_ratio, max_ratio: see ``rows_limits``; None where rows rule.
    cfg: guidance scale, <= 1 is none. num_hypo: hypotheses of one segment. tokenizer: the codec's settings as written.
    """

    search: str
    temperature: float
    topk: int
    min_rows: int
    max_rows: int | None
    min_ratio: float | None
    max_ratio: float | None
    cfg: float = 1.0
    num_hypo: int = 1
    tokenizer: Mapping[str, Any] | None = None
    top_p: float = 1.0

    def __post_init__(self):
        assert self.search in SEARCHES, f"search {self.search!r}"
        assert math.isfinite(self.temperature) and self.temperature > 0, f"temperature {self.temperature}"
        assert self.topk >= 1, f"topk {self.topk}"
        assert self.search in ("topk", "topp") or (self.temperature, self.topk) == (1.0, 1), (
            f"{self.search} with temperature {self.temperature}, topk {self.topk}"
        )
        assert 0 <= self.top_p <= 1, f"top_p {self.top_p}"
        assert self.topk == EVERY if self.search == "topp" else self.top_p == 1, (
            f"{self.search} with topk {self.topk}, top_p {self.top_p}"
        )
        assert self.min_rows >= 0, f"min_rows {self.min_rows}"
        assert (self.min_ratio is None) == (self.max_ratio is None), f"ratios {self.min_ratio}, {self.max_ratio}"
        assert (self.max_rows is None) != (self.max_ratio is None), f"rows {self.max_rows}, ratio {self.max_ratio}"
        assert self.max_rows is None or self.max_rows >= 1, f"max_rows {self.max_rows}"
        assert self.max_ratio is None or (self.min_ratio >= 0 and self.max_ratio >= 0), f"ratio {self.max_ratio}"
        assert math.isfinite(self.cfg) and self.cfg >= 0, f"cfg {self.cfg}"
        assert self.num_hypo >= 1, f"num_hypo {self.num_hypo}"

    @property
    def greedy(self) -> bool:
        """Whether every row is an argmax, so that no randomness is used."""
        return self.search == "greedy" or self.topk == 1 or self.top_p == 0

    @property
    def guided(self) -> bool:
        """Whether guidance is on."""
        return self.cfg > 1

    def rows_limits(
        self, prompt_rows: int, *, num_streams: int | None = None, context: int | None = None
    ) -> tuple[int, int]:
        """(min_rows, max_rows) of a segment whose prompt, its modality row included, has ``prompt_rows`` rows.

        With ratios it needs ``num_streams`` (S), and with a ``max_ratio`` of 0 also ``context``, the model's rows.
        Ratios are ESPnet's ``minlenratio`` and ``maxlenratio``: relative to n, the rows cached before its loop starts
        (``ARDelayLM.inference``, branch speechlm3; ESPnet's chat loop raises NotImplementedError for them). That loop
        starts at the last row before the modality row, so n = prompt_rows - 2, and its step 1 predicts the modality row
        that our prompt already holds: row r here is its step r + 2. It allows eos from step
        int(n * min_ratio) - (S - 1) on and takes int(n * max_ratio) + (S - 1) steps, or ``context`` - n with a ratio of
        0. The least maximum given is S, which holds no frame: with fewer rows the delay cannot be undone.

        Raises TypeError if a needed argument is left out. teacher_force follows its reference, not these limits.
        """
        assert prompt_rows >= 1, f"prompt_rows {prompt_rows}"
        if self.max_ratio is None:
            return self.min_rows, self.max_rows
        if num_streams is None:
            raise TypeError("rows_limits: these limits are ratios, which need num_streams")
        cached = max(0, prompt_rows - 2)
        least = int(cached * self.min_ratio) - (num_streams - 1) - 2
        if self.max_ratio > 0:
            steps = int(cached * self.max_ratio) + (num_streams - 1)
        elif context is None:
            raise TypeError("rows_limits: a max_ratio of 0 means to the end of the context, which needs context")
        else:
            steps = context - cached
        return max(0, least), max(num_streams, steps - 1)


@dataclass(frozen=True)
class DecodingConfig:
    """All decoding settings of a run, of either family.

    dialect: 'bagpiper', 'chat' or 'flat'. source: the file, for messages ('<dict>' if there is none). dtype: torch's
    name. text, audio: None where the file has no such block. enforce_modality: the modality of the first segments, in
    order; 'image', 'video' and 'toolcall' keep their place but enforce nothing (the model's own choice is used there,
    ``ParallelLLM.inference``). nbest, seed: None where the file does not say. cli: every option of ESPnet's command
    line that the file sets, checked. A chat file wins over the command line (``speechlm_inference_chat.main``), a flat
    file loses to it (``config_argparse``). fixed_length: segments have ``Wanted.frames`` frames, whatever the limits of
    their modality; teacher_force follows its reference all the same.
    """

    dialect: str
    source: str
    dtype: str
    text: SegmentConfig | None
    audio: SegmentConfig | None
    enforce_modality: tuple[str, ...] = ()
    nbest: int | None = None
    nproc: int = 1
    inference_last_segment: bool = False
    seed: int | None = None
    cli: Mapping[str, Any] = field(default_factory=dict)
    fixed_length: bool = False

    def __post_init__(self):
        assert self.dialect in ("bagpiper", "chat", "flat"), f"dialect {self.dialect!r}"
        assert self.dtype in rules.DTYPES, f"dtype {self.dtype!r}"
        assert self.text is not None or self.audio is not None, f"{self.source}: neither text nor audio"
        assert self.nproc >= 1, f"nproc {self.nproc}"
        assert self.nbest is None or self.nbest >= 1, f"nbest {self.nbest}"

    @property
    def family(self) -> str:
        """'bagpiper' or 'opuslm'."""
        return "bagpiper" if self.dialect == "bagpiper" else "opuslm"

    def segment(self, modality: str) -> SegmentConfig:
        """Settings of a 'text' or 'audio' segment. Raises ConfigError if the file has none."""
        if modality not in ("text", "audio"):
            raise ConfigError(
                f"{self.source}: segments of modality {modality!r} cannot be decoded, only text and audio"
            )
        found = getattr(self, modality)
        if found is None:
            block = BLOCKS[self.dialect][modality]
            raise ConfigError(
                f"{self.source}: {block}: is missing, but a segment of {modality} is to be decoded; add this block"
            )
        return found

    def replace(self, **changes: Any) -> "DecodingConfig":
        """A copy with other field values. Raises TypeError for a name that is no field."""
        return dataclasses.replace(self, **changes)

    def check_streams(self, num_streams: int) -> None:
        """Raise ConfigError if a limit cannot work with ``num_streams`` streams (S).

        OpusLM forces eos at row maxlen - (S - 1) and undoes the delay afterwards, so with maxlen below S ESPnet raises
        or returns nothing with a wrong end (``ARDelayLM.inference``). maxlen = S is an empty result and is allowed.
        """
        if self.family != "opuslm":
            return
        in_use = self.cli.get("inference_nq")
        if in_use is not None and in_use != num_streams:
            raise ConfigError(
                f"{self.source}: inference_nq: is {in_use}, but the checkpoint has {num_streams} streams and all of "
                "them are decoded; leave it out"
            )
        for modality in ("text", "audio"):
            segment = getattr(self, modality)
            if segment is None or segment.search == "teacher_force" or segment.max_rows is None:
                continue
            if segment.max_rows < num_streams:
                raise ConfigError(
                    f"{self.source}: maxlen of {modality}: {segment.max_rows} rows hold no token, because with "
                    f"{num_streams} streams the last {num_streams} rows are the end and the delay; write at least "
                    f"{num_streams + 1}"
                )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ConfigError if a top-k is larger than the vocabulary (torch.topk of ESPnet raises RuntimeError)."""
        for modality in ("text", "audio"):
            segment = getattr(self, modality)
            if segment is not None and segment.search == "topk" and segment.topk > vocab_size:
                raise ConfigError(
                    f"{self.source}: topk {segment.topk} for {modality} is larger than the vocabulary of the "
                    f"checkpoint ({vocab_size} ids); write a smaller one"
                )


def load_decoding(
    source: str | os.PathLike | Mapping, family: str, *, overrides: Mapping | None = None, label: str = "<dict>"
) -> DecodingConfig:
    """Read the decoding yaml ``source`` (or an equal mapping) for a checkpoint of ``family`` ('bagpiper' or 'opuslm').

    ``overrides``: values that win over the file, in the file's own names, nested or dotted (``{"audio.topk": 5}``); None means
    not given. ``label``: what messages call a mapping. Raises ConfigError for a file that cannot be read, a key that is
    unknown, missing or of another family, and a value of the wrong type or out of range; the message names file, line, key,
    what was expected and what to do.
    """
    if family not in ("bagpiper", "opuslm"):
        raise ConfigError(f"unknown model family {family!r}; expected 'bagpiper' or 'opuslm'")
    document = Document.read(source, label)
    document.override(overrides or {})
    if family == "bagpiper":
        return _bagpiper(document)
    return _chat(document) if _is_chat(document) else _flat(document)


def _bagpiper(document: Document) -> DecodingConfig:
    wanted = "a Bagpiper checkpoint (blocks audio and text)"
    _refuse_foreign(document, rules.OPUSLM_ONLY, "an OpusLM decoding yaml", wanted)
    top = document.take((), rules.BAGPIPER)
    blocks = {name: _bagpiper_segment(document, name) for name in ("text", "audio") if name in top}
    if not blocks:
        raise document.error((), "has no block audio or text, so nothing could be decoded; add one")
    enforced = tuple(top.get("enforce_modality", ()))
    for name in enforced:
        if name in ("text", "audio") and name not in blocks:
            raise document.error(("enforce_modality",), f"names {name!r}, but there is no block '{name}'; add it")
    if top.get("num_hypo", 1) != 1:
        log.warning(
            "%s: num_hypo at the top has no effect, ESPnet reads that of a block; write it into the block",
            document.source,
        )
    return DecodingConfig(
        dialect="bagpiper",
        source=document.source,
        dtype=top.get("dtype", "bfloat16"),
        text=blocks.get("text"),
        audio=blocks.get("audio"),
        enforce_modality=enforced,
    )


def _bagpiper_segment(document: Document, name: str) -> SegmentConfig:
    # min_step above max_step is allowed: in ESPnet it gives exactly max_step rows.
    values = document.take((name,), rules.BAGPIPER_SEGMENT, rules.BAGPIPER_NEEDED)
    greedy = values["temperature"] == 0
    return SegmentConfig(
        search="greedy" if greedy else "topk",
        temperature=1.0 if greedy else values["temperature"],
        topk=1 if greedy else values["topk"],
        min_rows=values.get("min_step", 1),
        max_rows=values["max_step"],
        min_ratio=None,
        max_ratio=None,
        cfg=values.get("cfg", 1.0),
        num_hypo=values.get("num_hypo", 1),
    )


def _is_chat(document: Document) -> bool:
    """Whether an OpusLM file is of the chat dialect: blocks decide. Raises ConfigError if it holds no settings."""
    wanted = "an OpusLM checkpoint (blocks codec_ssl and text_bpe)"
    _refuse_foreign(document, rules.BAGPIPER_ONLY, "a Bagpiper inference yaml", wanted)
    names = set(document.data)
    if names & set(rules.MODALITIES):
        return True
    if names & set(rules.FLAT_ONLY):
        return False
    if not names - set(rules.CHAT_CLI):
        raise document.error(
            (),
            "holds no decoding settings; expected blocks codec_ssl and text_bpe, or search_algo and other flat keys",
        )
    return any(isinstance(value, Mapping) for value in document.data.values())


def _chat(document: Document) -> DecodingConfig:
    top = document.take((), rules.CHAT)
    audio = [name for name in ("codec_ssl", "codec") if name in top]
    if len(audio) > 1:
        problem = "stands beside codec_ssl, but only one of them can describe the audio; keep that of the checkpoint"
        raise document.error(("codec",), problem)
    unused = sorted(set(top) & set(rules.MODALITIES) - {"codec_ssl", "codec", "text_bpe"})
    blocks = {name: _chat_segment(document, name) for name in [*audio, *unused, "text_bpe"] if name in top}
    if unused:
        log.warning(
            "%s: blocks of modalities that are not generated are not used: %s", document.source, ", ".join(unused)
        )
    if "text_bpe" not in blocks and not audio:
        raise document.error((), "has no block codec_ssl or text_bpe, so nothing could be decoded; add one")
    return DecodingConfig(
        dialect="chat",
        source=document.source,
        dtype=top.get("dtype", "float32"),
        text=blocks.get("text_bpe"),
        audio=blocks[audio[0]] if audio else None,
        nbest=top.get("nbest"),
        nproc=top.get("nproc", 1),
        inference_last_segment=top.get("inference_last_segment", False),
        seed=top.get("seed"),
        cli={name: top[name] for name in rules.CHAT_CLI if name in top},
    )


def _chat_segment(document: Document, name: str) -> SegmentConfig:
    path = (name,)
    values = document.take(path, rules.CHAT_SEGMENT, rules.CHAT_NEEDED)
    document.need(path, values, rules.SEARCH_NEEDED.get(values["search_algo"], {}))
    relative = values["length_method"] == "relative"
    low, high = ("minlenratio", "maxlenratio") if relative else ("minlen", "maxlen")
    document.need(path, values, dict.fromkeys((low, high), f"length_method {values['length_method']} needs it"))
    _ordered(document, path, values, low, high, unlimited=relative)
    return SegmentConfig(
        **_search(document, path, values, "topk"),
        min_rows=0 if relative else values[low],
        max_rows=None if relative else values[high],
        min_ratio=values[low] if relative else None,
        max_ratio=values[high] if relative else None,
        tokenizer=copy.deepcopy(values.get("tokenizer")),
    )


def _flat(document: Document) -> DecodingConfig:
    top = document.take((), rules.FLAT)
    values = {**rules.FLAT_DEFAULTS, **top}
    _ordered(document, (), values, "minlenratio", "maxlenratio", unlimited=True)
    segment = SegmentConfig(
        **_search(document, (), values, "top_k"),
        min_rows=0,
        max_rows=None,
        min_ratio=values["minlenratio"],
        max_ratio=values["maxlenratio"],
    )
    return DecodingConfig(
        dialect="flat",
        source=document.source,
        dtype=values["dtype"],
        text=segment,
        audio=dataclasses.replace(segment, tokenizer=copy.deepcopy(values.get("codec_conf"))),
        nbest=top.get("nbest"),
        nproc=values["nproc"],
        seed=top.get("seed"),
        cli={name: top[name] for name in rules.FLAT_CLI if name in top},
        fixed_length=values["fixed_length"],
    )


def _search(document: Document, path: tuple[str, ...], values: Mapping[str, Any], topk_key: str) -> dict[str, Any]:
    """search, temperature, topk and top_p of a SegmentConfig from OpusLM's names."""
    search = rules.SEARCH_ALGOS[values["search_algo"]]
    if search not in ("topk", "topp"):
        return {"search": search, "temperature": 1.0, "topk": 1}
    temperature = values["sampling_temperature"]
    if temperature == 0:
        greedy = "greedy_search" + (f" or {topk_key}: 1" if search == "topk" else "")
        problem = f"is 0, by which ESPnet would divide; write search_algo: {greedy}"
        raise document.error((*path, "sampling_temperature"), problem)
    if search == "topp":
        return {"search": search, "temperature": temperature, "topk": EVERY, "top_p": values["top_p"]}
    return {"search": search, "temperature": temperature, "topk": values[topk_key]}


def _ordered(
    document: Document, path: tuple[str, ...], values: Mapping[str, Any], low: str, high: str, *, unlimited: bool
) -> None:
    """Refuse low > high; ``unlimited``: a high of 0 sets no limit."""
    if values[low] > values[high] and not (unlimited and values[high] == 0):
        raise document.error((*path, low), f"is {values[low]}, more than {high}, {values[high]}; write a smaller one")


def _refuse_foreign(document: Document, names: tuple[str, ...], what: str, wanted: str) -> None:
    found = [name for name in names if name in document.data]
    if found:
        raise document.error(
            (found[0],), f"is a key of {what}, but the settings are for {wanted}; give the yaml of that family"
        )
