"""Yaml that somebody else wrote: nothing in it is run, and what it says fits into memory and into a message."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import SpeechLMError, shown

if TYPE_CHECKING:
    import yaml

MOST_VALUES = 100_000  # that aliases may stand for, where fewer are written
_MOST_TIMES = 10  # a training yaml of ESPnet names some blocks twice; its token_list alone may have 160,000 lines


def read_yaml(path: str | os.PathLike, error: type[SpeechLMError]) -> Any:
    """The data of a yaml file, UTF-8, by yaml's safe types alone.

    Raises:
        error: if the file is missing, no UTF-8, no yaml, or so full of aliases that it would fill the memory.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as cause:
        raise error(f"cannot read {path}: {cause.strerror or cause}") from cause
    except UnicodeDecodeError as cause:
        raise error(f"cannot read {path}: it is not UTF-8 text (byte {cause.start}); save it as UTF-8") from cause
    return parse_yaml(text, str(path), error)


def parse_yaml(text: str, source: str, error: type[SpeechLMError]) -> Any:
    """The data of a yaml ``text``, which messages call ``source``. Raises ``error``, as ``read_yaml`` does."""
    import yaml

    # The pure Python parser takes a minute over a long token_list.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        check_aliases(node, source, error)
        return loader.construct_document(node)
    except (ValueError, KeyError, AttributeError, RecursionError, yaml.YAMLError) as cause:
        # Beside yaml's own: numbers and dates that are none, `!!bool abc`, a node that holds itself.
        raise error(f"cannot read {source}: {shown(cause)}") from cause
    finally:
        loader.dispose()


def check_aliases(node: yaml.Node, source: str, error: type[SpeechLMError]) -> None:
    """Raises ``error`` where the aliases of a document stand for far more values than are written in it."""
    sizes: dict[int, int] = {}
    whole = _size(node, sizes)
    if whole > MOST_VALUES + _MOST_TIMES * len(sizes):
        raise error(
            f"{source}: its aliases (*) stand for {shown(whole)} values, of which {len(sizes)} are written; write it out"
        )


def _size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Values below ``node`` with its aliases written out."""
    if id(node) not in sizes:
        sizes[id(node)] = 1  # of a node that holds itself, which is refused elsewhere
        inner = node.value if isinstance(node.value, list) else ()
        parts = [part for item in inner for part in (item if isinstance(item, tuple) else (item,))]
        sizes[id(node)] = 1 + sum(_size(part, sizes) for part in parts)
    return sizes[id(node)]
