"""``vocabularies`` of a ``data.json``: the tokens that its files were made with, compared with the checkpoint's.

ESPnet reads them for training only. Codes that were made with another tokenizer are numbers like any others, so a set that does not
belong to a checkpoint decodes to plausible nonsense; where the files are there, that is found before anything is decoded.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from ..errors import DataError
from ..layout import Layout

log = logging.getLogger(__name__)

_SUFFIX = "_token_list"


class Tokenizer(Protocol):
    """What is needed of ``text.TextTokenizer``."""

    def differences(self, names: list[str]) -> list: ...


def check_vocabularies(paths: Iterable[Path], layout: Layout, tokenizer: Tokenizer) -> None:
    """Compares every list that is there; those that are not are passed over, as ESPnet's decoder never opens them.

    Raises:
        DataError: naming the file and the first token that differs, or the two sizes.
    """
    ssl, codec = layout.streams[0].size, sum(layout.code_spans[stream].size for stream in layout.codec_streams)
    sizes = {"ssl": ssl, "codec": codec, "codec_ssl": ssl + codec}
    for path in paths:
        modality = path.name.removesuffix(_SUFFIX)
        if not path.is_file():
            log.debug("%s: vocabulary not there, not compared", path)
            continue
        tokens = _read(path)
        if modality == "text_bpe":
            _check_text(path, tokens, layout, tokenizer)
        elif modality in sizes and len(tokens) != sizes[modality]:
            raise DataError(
                f"{path}: has {len(tokens)} tokens, but the checkpoint has {sizes[modality]} for {modality}; the set was made with "
                "another tokenizer than the checkpoint's"
            )


def _check_text(path: Path, tokens: list[str], layout: Layout, tokenizer: Tokenizer) -> None:
    if len(tokens) > layout.text.size:
        raise DataError(f"{path}: has {len(tokens)} tokens, but the checkpoint has {layout.text.size} for text_bpe")
    differing = tokenizer.differences(tokens)
    if differing:
        first = differing[0]
        raise DataError(
            f"{path}: {len(differing)} of {len(tokens)} tokens are not the checkpoint's, the first is number {first[0]}: "
            f"{first[1]!r}, there {first[2]!r}; the set was made with another text tokenizer"
        )


def _read(path: Path) -> list[str]:
    """A JSON list, or a token a line."""
    try:
        text = path.read_text(encoding="utf-8")
        tokens = json.loads(text) if text.lstrip().startswith("[\n") or text.startswith('["') else text.split("\n")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as a list of tokens: {error}") from error
    return tokens[:-1] if tokens and tokens[-1] == "" else tokens
