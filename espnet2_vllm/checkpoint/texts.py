"""Does the tokenizer of a converted directory give the ids that the files of the checkpoint state?"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from ..errors import CheckpointError
from ..text import TextTokenizer
from ..tokenizer_file import FileTokenizer
from ..tokenizer_parts import own_ids

# Where tokenizers of one vocabulary have been seen to differ.
PROBES = (
    "Steps:\n\n1. open it\n\n2. close it",
    "it costs  5 euros, or   12; in 2024 they've 12345 items, 1,000.50",
    " a blank in front, one behind ",
    "tabs\tand\r\nline breaks\n\n\nand  \n blanks",
    "Hello, world! I do n't know . Is it 's ? YES , it is",
    "naïve café, e\u0301 decomposed, Ångström, \ufb01ne, ½ ² ٣",
    "日本語の文章です。中文也一样。한국어",
    "\U0001f600 smile \U0001f468\u200d\U0001f469\u200d\U0001f467 family",
    "a<|endoftext|>b <|im_start|>user\n<|im_end|> <think>\nwell\n</think>",
    "<s> and </s> <unk> [INST] <pad>",
    "x = {'a': [1, 2]}  # code\n    return x",
    "\u00a0no-break\u2003em\u200bzero\ufeff",
    "",
    " ",
    "\n",
)


def check_texts(source: Path, converted: Path) -> tuple[str, ...]:
    """Encodes and decodes ``PROBES`` with the tokenizers of both folders, and with the file itself.

    Returns:
        lines for the report of a conversion: what the folder's settings change of its file, and where the transformers library that
        is installed would give other ids.

    Raises:
        CheckpointError: naming a text whose ids differ.
    """
    theirs, ours = TextTokenizer(source), TextTokenizer(converted)
    for text in PROBES:
        for wanted, found in (
            (theirs.encode_bagpiper(text), ours.encode_bagpiper(text)),
            (theirs.encode_opuslm(text), ours.encode_opuslm(text)),
        ):
            _same(text, wanted, found, f"{converted} against {source}")
            if (back := ours.decode_opuslm(found)) != (there := theirs.decode_opuslm(found)):
                raise CheckpointError(f"{converted}: ids of {text!r} become {back!r}, in {source} {there!r}")
    _check_file(theirs.opened, ours)
    notes = list(ours.opened.notes)
    if ours.opened.changes:
        notes.append(f"tokenizer_config.json changes {', '.join(ours.opened.changes)} of {ours.opened.file.name}")
    return (*notes, *_library(source, ours))


def _check_file(opened: FileTokenizer, ours: TextTokenizer) -> None:
    """Against the file itself, where no setting of its folder comes in between."""
    if opened.file.suffix == ".model":
        # Known and meant: control tokens in a text are found by one of the two only, and a second blank in front is dropped.
        texts = [text for text in PROBES if "<" not in text and text[:1] != " "]
        for text, ids in zip(texts, own_ids(opened.file, texts, blank=opened.blank), strict=True):
            _same(text, ids, ours.encode_opuslm(text), f"SentencePiece's own of {opened.file}")
    elif opened.file.name == "tokenizer.json" and not opened.changes:
        tokenizer = Tokenizer.from_file(str(opened.file))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        for text in PROBES:
            _same(
                text, tokenizer.encode(text, add_special_tokens=False).ids, ours.encode_opuslm(text), str(opened.file)
            )


def _same(text: str, wanted: list[int], found: list[int], what: str) -> None:
    if wanted != found:
        raise CheckpointError(
            f"the tokenizer gives other ids than it should ({what}): {text!r} is {found[:12]}, expected {wanted[:12]}; are all of "
            "its files there, and of one version?"
        )


def _library(source: Path, ours: TextTokenizer) -> tuple[str, ...]:
    """What whoever compares with ESPnet on the same transformers must know; the library may not be able to read the folder."""
    import transformers

    try:
        theirs = transformers.AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
        differ = [text for text in PROBES if list(theirs.encode(text)) != ours.encode_bagpiper(text)]
    except Exception as error:  # noqa: BLE001 - it is not needed; what it raises is said
        return (
            f"transformers {transformers.__version__} cannot read this tokenizer ({type(error).__name__}: {str(error)[:120]})",
        )
    if not differ:
        return ()
    return (
        f"transformers {transformers.__version__} gives other ids than the tokenizer's file for {len(differ)} of {len(PROBES)} "
        f"probes, such as {differ[0]!r}; here the file counts, with which the model was trained (doc/differences.md)",
    )
