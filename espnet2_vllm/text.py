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

from .errors import CheckpointError, DataError


class Difference(NamedTuple):
    """A text id whose name in ``token_list`` is not the tokenizer's token of that id."""

    index: int
    listed: str
    token: str | None


class TextTokenizer:
    """The Hugging Face tokenizer of a checkpoint.

    Args:
        directory: folder with the tokenizer's files. Nothing is downloaded.
        clean_up: take blanks before punctuation out of what Bagpiper generates, as ESPnet did with transformers 4.

    Raises:
        CheckpointError: if the folder is missing or holds no tokenizer that transformers can load.
    """

    def __init__(self, directory: str | PathLike[str], *, clean_up: bool = False) -> None:
        from transformers import AutoTokenizer

        self.directory, self._clean_up = Path(directory), clean_up
        if not self.directory.is_dir():
            raise CheckpointError(f"{self.directory}: no such tokenizer folder")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(self.directory, local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            raise CheckpointError(
                f"{self.directory}: no tokenizer can be loaded from here: {error}. Expected tokenizer.json or the files of "
                "a slow tokenizer, and tokenizer_config.json"
            ) from error
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        self._is_bpe = type(getattr(backend, "model", None)).__name__ == "BPE"
        unknown = self._tokenizer.unk_token_id
        self._unknown = [] if unknown is None else [int(unknown)]

    def __len__(self) -> int:
        """Tokens that the tokenizer has; a checkpoint's text span may be longer."""
        return len(self._tokenizer)

    # -- Bagpiper -----------------------------------------------------------------------------------------------------
    def encode_bagpiper(self, text: str) -> list[int]:
        """Ids of ``text`` with whatever the tokenizer puts around it (Llama: ``<s>``). ESPnet ``TextIO.preprocess``.

        Raises:
            DataError: for half of a surrogate pair, which JSON can hold and Unicode has no character for.
        """
        return [int(i) for i in self._tokenizer.encode(_characters(text))]

    def decode_bagpiper(self, ids: Iterable[int]) -> str:
        """Text of ``ids``: special tokens and ids without a token vanish. ESPnet ``HuggingFaceTextIO.decode_batch``.

        ESPnet asks for ``clean_up_tokenization_spaces``. transformers 5 does it for all tokenizers but BPE, which those of
        the released models are; transformers 4 did it for all, which is ``clean_up`` here.
        """
        text = self._tokenizer.decode(
            [int(i) for i in ids if i >= 0], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return self._tokenizer.clean_up_tokenization(text) if self._clean_up or not self._is_bpe else text

    # -- OpusLM -------------------------------------------------------------------------------------------------------
    def encode_opuslm(self, text: str) -> list[int]:
        """Ids of ``text`` with nothing put around it. ESPnet ``HuggingFaceTokenizer.text2tokens``.

        Raises:
            DataError: as ``encode_bagpiper``.
        """
        return [int(i) for i in self._tokenizer.encode(_characters(text), add_special_tokens=False)]

    def decode_opuslm(self, ids: Iterable[int]) -> str:
        """Text of ``ids``: special tokens vanish, newlines become blanks, both ends are stripped.

        An id without a token (the modality's own marker, which is negative here, or a filler behind the tokenizer's
        end) counts as the tokenizer's unknown token. ESPnet ``HuggingFaceTokenizer.tokens2text``.
        """
        known: list[int] = []
        for i in map(int, ids):
            known += [i] if self._token(i) is not None else self._unknown
        text = self._tokenizer.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if self._tokenizer.clean_up_tokenization_spaces:
            text = self._tokenizer.clean_up_tokenization(text)
        return text.replace("\n", " ").strip()

    def differences(self, names: Sequence[str]) -> list[Difference]:
        """Where the text part of ``token_list`` (``names``, in order of ids) is not this tokenizer's vocabulary.

        Names that the tokenizer does not know are fillers as long as their ids have no token either.
        """
        found = []
        for index, name in enumerate(names):
            token = self._token(index)
            same = token == name if token is not None else self._id(name) is None
            if not same:
                found.append(Difference(index, name, token))
        return found

    def _token(self, index: int) -> str | None:
        return self._tokenizer.convert_ids_to_tokens(index) if index >= 0 else None

    def _id(self, name: str) -> int | None:
        index = self._tokenizer.convert_tokens_to_ids(name)
        return None if index is None or index in self._unknown else int(index)


def _characters(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text has {ascii(text[error.start])} at character {error.start + 1}, half of a surrogate pair, which is no "
            "character; was it cut in the middle of one?"
        ) from error
    return text
