"""Importing ESPnet fetches nothing: its English phonemes (g2p_en) would download two tables of nltk at once."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def nothing_fetched() -> Iterator[None]:
    """Within the block nltk downloads nothing. Nothing here needs those tables; who does is told by nltk how to get them."""
    if "g2p_en" in sys.modules or not all(map(importlib.util.find_spec, ("g2p_en", "nltk"))):
        yield
        return
    import nltk

    def left_out(*_: object, **__: object) -> bool:
        return False

    download, nltk.download = nltk.download, left_out
    try:
        yield
    finally:
        nltk.download = download
