"""One net around reading one item: whatever is wrong with it costs that item alone."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import DataError, SpeechLMError, shown

log = logging.getLogger(__name__)


@contextlib.contextmanager
def item(name: str = "") -> Iterator[None]:
    """Within the block everything that goes wrong is a DataError, which begins with ``name``.

    Readers and the libraries below them raise whatever damaged or hostile data make them raise (MemoryError, RecursionError,
    OverflowError, UnicodeError, struct.error, ...); there is no list of it that is complete. Errors of a checkpoint, an engine or
    an option are not of the item, and pass.
    """
    where = f"{name}: " if name else ""
    try:
        yield
    except DataError as error:
        raise DataError(f"{where}{error}") from error
    except SpeechLMError:
        raise
    except Exception as error:
        log.debug("%s: cannot be read", name, exc_info=error)
        raise DataError(
            f"{where}cannot be read: {type(error).__name__}: {shown(error) or 'no more is known'}"
        ) from error


def read_item(key: str, read: Callable[[str], Any]) -> Any | tuple[str, DataError]:
    """``read(key)``, or (key, error) for an item that cannot be read."""
    try:
        with item(key):
            return read(key)
    except DataError as error:
        return key, error
