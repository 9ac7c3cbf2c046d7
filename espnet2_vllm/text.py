"""Text to tokenizer ids and back, exactly as each family of ESPnet does it.

Ids here are the tokenizer's own, counted from 0; ``Layout.text.start`` is added and taken away by whoever holds rows.
For OpusLM this is the same as going through the names in ``token_list`` of config.yaml, as ESPnet does, as long as
``TextTokenizer.differences`` finds none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from .errors import DataError


class Difference(NamedTuple):
    """A text id whose name in ``token_list`` is not the tokenizer's token of that id."""

    index: int
    listed: str
    token: str | None


class TextTokenizer:
    """The Hugging Face tokenizer of a checkpoint, as its files state it (``tokenizer_file``).

    Args:
        directory: folder with the tokenizer's files. Nothing is downloaded.
        clean_up: take blanks before punctuation out of what Bagpiper generates, as ESPnet did with transformers 4.

    Raises:
        CheckpointError: if the folder is missing or holds no tokenizer that can be read.
    """

    def __init__(self, directory: str | PathLike[str], *, clean_up: bool = False) -> None:
        from .tokenizer_file import open_tokenizer

        self.directory = Path(directory)
        self.opened = open_tokenizer(self.directory)
        self._tokenizer = self.opened.tokenizer
        self._clean_up = clean_up or type(self._tokenizer.model).__name__ != "BPE"

    def __len__(self) -> int:
        """Tokens that the tokenizer has; a checkpoint's text span may be longer."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    # -- Bagpiper -----------------------------------------------------------------------------------------------------
    def encode_bagpiper(self, text: str) -> list[int]:
        """Ids of ``text`` with whatever the tokenizer puts around it (Llama: ``<s>``). ESPnet ``TextIO.preprocess``.

        Raises:
            DataError: for half of a surrogate pair, which JSON can hold and Unicode has no character for.
        """
        return self._tokenizer.encode(_characters(text), add_special_tokens=True).ids

    def decode_bagpiper(self, ids: Iterable[int]) -> str:
        """Text of ``ids``: special tokens and ids without a token vanish. ESPnet ``HuggingFaceTextIO.decode_batch``.

        ESPnet asks for ``clean_up_tokenization_spaces``. transformers 5 does it for all tokenizers but BPE, which those of
        the released models are; transformers 4 did it for all, which is ``clean_up`` here.
        """
        text = self._tokenizer.decode([int(i) for i in ids if i >= 0], skip_special_tokens=True)
        return _without_blanks(text) if self._clean_up else text

    # -- OpusLM -------------------------------------------------------------------------------------------------------
    def encode_opuslm(self, text: str) -> list[int]:
        """Ids of ``text`` with nothing put around it. ESPnet ``HuggingFaceTokenizer.text2tokens``.

        Raises:
            DataError: as ``encode_bagpiper``.
        """
        return self._tokenizer.encode(_characters(text), add_special_tokens=False).ids

    def decode_opuslm(self, ids: Iterable[int]) -> str:
        """Text of ``ids``: special tokens vanish, newlines become blanks, both ends are stripped.

        An id without a token (the modality's own marker, which is negative here, or a filler behind the tokenizer's
        end) counts as the tokenizer's unknown token. ESPnet ``HuggingFaceTokenizer.tokens2text``.
        """
        unknown = [] if self.opened.unknown is None else [self.opened.unknown]
        known: list[int] = []
        for i in map(int, ids):
            known += [i] if self._token(i) is not None else unknown
        text = self._tokenizer.decode(known, skip_special_tokens=True)
        if self.opened.clean_up:
            text = _without_blanks(text)
        return text.replace("\n", " ").strip()

    def differences(self, names: Sequence[str]) -> list[Difference]:
        """Where the text part of ``token_list`` (``names``, in order of ids) is not this tokenizer's vocabulary.

        Names that the tokenizer does not know are fillers as long as their ids have no token either.
        """
        found = []
        for index, name in enumerate(names):
            token = self._token(index)
            same = token == name if token is not None else self._tokenizer.token_to_id(name) is None
            if not same:
                found.append(Difference(index, name, token))
        return found

    def _token(self, index: int) -> str | None:
        return self._tokenizer.id_to_token(index) if 0 <= index < 2**32 else None


# What transformers' clean-up takes the blank out of, in its order.
_CLOSE = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


def _without_blanks(text: str) -> str:
    """``clean_up_tokenization_spaces`` of transformers 4: no blank before punctuation and English contractions."""
    for found in _CLOSE:
        text = text.replace(found, found.strip())
    return text


def _characters(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text has {ascii(text[error.start])} at character {error.start + 1}, half of a surrogate pair, which is no "
            "character; was it cut in the middle of one?"
        ) from error
    return text
