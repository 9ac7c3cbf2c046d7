"""Importing ESPnet fetches nothing and prints nothing: its English phonemes (g2p_en) would download two tables of nltk."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator

from .logs import printing_to_log


@contextlib.contextmanager
def nothing_fetched() -> Iterator[None]:
    """Within the block nltk downloads nothing. Nothing here needs those tables; who does is told by nltk how to get them.

    What ESPnet prints as it is imported (of libraries for training that it does not find) goes to the log.
    """
    with printing_to_log(), _without_downloads():
        yield


@contextlib.contextmanager
def _without_downloads() -> Iterator[None]:
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
