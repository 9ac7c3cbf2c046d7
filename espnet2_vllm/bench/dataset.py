"""Utterances of a data set, read as the decoding command lines read them, for comparisons of engines."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import DataError
from ..plan import RowRequest, RowResult, Utterance

if TYPE_CHECKING:
    from ..backends import Engine
    from ..checkpoint import Checkpoint
    from ..decoding import DecodingConfig


def read_data(checkpoint: Checkpoint, data: str, count: int, *, seed: int = 0) -> list[Utterance]:
    """The first ``count`` utterances of ``data``: PATH/data.json (OpusLM) or task:name:PATH/dataset.json (Bagpiper).

    Raises:
        DataError: if one of them cannot be read.
    """
    read = _read_bagpiper if checkpoint.family == "bagpiper" else _read_opuslm
    utterances = []
    for item in itertools.islice(read(checkpoint, data, count, seed), count):
        if not isinstance(item, Utterance):
            raise DataError(f"{data}: {item[0]}: {item[1]}")
        utterances.append(item)
    if not utterances:
        raise DataError(f"{data} has no utterances")
    return utterances


def _read_opuslm(checkpoint: Checkpoint, data: str, count: int, seed: int) -> Iterable:
    from ..io.data_json import open_data_json, read_utterances
    from ..prompt.opuslm import Facts
    from ..text import TextTokenizer

    tokenizer = TextTokenizer(checkpoint.tokenizer_dir)
    facts = Facts.from_preprocessor(checkpoint.preprocessor)
    return read_utterances(open_data_json(Path(data)), checkpoint.layout, tokenizer, facts, seed=seed)


def _read_bagpiper(checkpoint: Checkpoint, data: str, count: int, seed: int) -> Iterable:
    from ..audio.ahead import encoded
    from ..audio.tower import AudioTower
    from ..codec import load_codec
    from ..io.dataset_json import open_datasets, read_utterances
    from ..io.specifiers import parse_specifiers
    from ..plan import LATER
    from ..prompt.bagpiper import codec_encoder, listening_of
    from ..text import TextTokenizer

    tokenizer, layout = TextTokenizer(checkpoint.tokenizer_dir), checkpoint.layout
    encode = None
    if checkpoint.codec is not None:
        encode = codec_encoder(layout, load_codec(checkpoint.codec, base_dir=checkpoint.codec_base))
    listening = listening_of(checkpoint)
    for dataset in open_datasets(parse_specifiers(data, registered=False)):
        samples = tuple(itertools.islice(dataset.samples, count))
        utterances = read_utterances(
            dataset, layout, tokenizer, samples=samples, encode_audio=encode, listening=listening
        )
        for item in encoded(utterances, lambda: AudioTower(checkpoint)):
            if item is not LATER:
                yield item


def decode_all(
    engine: Engine, utterances: list[Utterance], config: DecodingConfig, *, seed: int
) -> list[tuple[RowRequest, RowResult]]:
    """Decodes ``utterances``; all requests with their results.

    Raises:
        DataError: if one is refused.
    """
    from ..backends import decode

    finished = {}
    for result in decode(engine, utterances, config, seed=seed, in_flight=len(utterances)):
        if not result.hypotheses:
            raise DataError(f"{result.key}: {result.reason}")
        for hypothesis in result.hypotheses:
            for request, outcome in hypothesis.requests:
                finished[request.request_id] = request, outcome
    return list(finished.values())
