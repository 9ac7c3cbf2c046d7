"""Tokenizers that lie in parts, without a ``tokenizer.json``: built as transformers 4.57 converted them on loading.

Sources of the formats: GPT-2's ``vocab.json`` and ``merges.txt``; SentencePiece's ``sentencepiece_model.proto``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from .errors import CheckpointError

# Of Qwen2: contractions, words with the character before them, single digits, punctuation, line breaks, blanks.
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BLANK = "\u2581"  # what SentencePiece writes for a blank
_UNIGRAM, _BPE = 1, 2
_CONTROL, _USER_DEFINED = 3, 4


def build(directory: Path, files: str | None, name: str, settings: Mapping[str, Any]) -> tuple[Tokenizer, Path]:
    """The tokenizer, and its main file.

    Args:
        files: ``bpe``, ``qwen2`` or ``sentencepiece``: what the class ``name`` is built of; None if of a tokenizer.json only.

    Raises:
        CheckpointError: if the files are not there.
    """
    needed = {"bpe": ("vocab.json", "merges.txt"), "qwen2": ("vocab.json", "merges.txt")}
    needed |= {"sentencepiece": ("tokenizer.model",), None: ("tokenizer.json",)}
    absent = [file for file in needed[files] if not (directory / file).is_file()]
    if absent:
        told = (
            f", as add_prefix_space {settings['add_prefix_space']} asks for" if "add_prefix_space" in settings else ""
        )
        raise CheckpointError(
            f"{directory}: no tokenizer can be loaded from here: {name} needs {' and '.join(needed[files])}{told}; missing: "
            f"{', '.join(absent)}"
        )
    main = directory / needed[files][0]
    if files == "sentencepiece":
        return _sentencepiece(main, settings), main
    return _byte_level(directory, settings, qwen2=files == "qwen2"), main


def _byte_level(directory: Path, settings: Mapping[str, Any], *, qwen2: bool) -> Tokenizer:
    vocabulary = json.loads((directory / "vocab.json").read_text(encoding="utf-8"))
    lines = (directory / "merges.txt").read_text(encoding="utf-8").split("\n")
    merges = [tuple(line.split()) for line in lines[1 if lines[0].startswith("#version") else 0 :] if line.strip()]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False)
    )
    blank = bool(settings.get("add_prefix_space", False))
    if qwen2:
        tokenizer.normalizer = normalizers.NFC()
        parts = [
            pre_tokenizers.Split(Regex(_QWEN2), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=blank, use_regex=False),
        ]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=blank)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if not qwen2 and settings.get("add_bos_token", False):
        bos = settings.get("bos_token", "<|endoftext|>")
        bos = bos["content"] if isinstance(bos, Mapping) else bos
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[f"{bos}:0", "$A:0"], pair=[f"{bos}:0", "$A:0", "$B:1"], special_tokens=[(bos, vocabulary[bos])]
        )
    return tokenizer


# -- SentencePiece ----------------------------------------------------------------------------------------------------
def _sentencepiece(path: Path, settings: Mapping[str, Any]) -> Tokenizer:
    """As ``LlamaTokenizerFast`` is made of its model: bytes for what has no piece, texts taken as they are."""
    proto = _read_model(path)
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    kind = proto.trainer_spec.model_type
    if kind == _UNIGRAM:
        model = models.Unigram(pieces, unk_id=0, byte_fallback=True)
    elif kind == _BPE:
        vocabulary = {piece: index for index, (piece, _) in enumerate(pieces)}
        model = models.BPE(
            vocabulary,
            _merges(vocabulary, dict(pieces)),
            unk_token=proto.trainer_spec.unk_piece,
            fuse_unk=True,
            byte_fallback=True,
        )
    else:
        raise CheckpointError(f"{path}: is neither a unigram nor a BPE model of SentencePiece")
    tokenizer = Tokenizer(model)
    added = [p for p in proto.pieces if p.type in (_CONTROL, _USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(p.piece, normalized=False, special=p.type == _CONTROL) for p in added])
    blank = settings.get("add_prefix_space")
    blank = True if blank is None else bool(blank)
    legacy = settings.get("legacy")
    if legacy is None or legacy:
        front = [normalizers.Prepend(_BLANK)] if blank else []
        tokenizer.normalizer = normalizers.Sequence([*front, normalizers.Replace(" ", _BLANK)])
    else:
        scheme = "first" if blank else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_BLANK, prepend_scheme=scheme, split=False)
    back = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, *([decoders.Strip(" ", left=1)] if blank else [])])
    return tokenizer


def _read_model(path: Path) -> Any:
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise CheckpointError(
            f"{path}: without a tokenizer.json beside it the Python packages sentencepiece and protobuf are needed to read it "
            f"({error}); pip install sentencepiece protobuf"
        ) from error
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(path.read_bytes())
    if not proto.pieces:
        raise CheckpointError(f"{path}: holds no pieces; is it a model of SentencePiece?")
    return proto


def _merges(vocabulary: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every way in which two pieces make a third, best first: SentencePiece itself keeps the scores only."""
    found = []
    for piece, score in scores.items():
        halves = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        pairs = [pair for pair in halves if pair[0] in vocabulary and pair[1] in vocabulary]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        found += [(score, *pair) for pair in pairs]
    found.sort(key=lambda one: (one[0], len(one[1]), len(one[2])), reverse=True)
    return [(left, right) for _, left, right in found]


def own_ids(path: Path, texts: Sequence[str], *, blank: bool) -> list[list[int]]:
    """Ids that the ``sentencepiece`` library gives for ``texts``, with or without a blank in front."""
    import sentencepiece

    proto = _read_model(path)
    proto.normalizer_spec.add_dummy_prefix = blank
    return sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString()).encode(list(texts))
