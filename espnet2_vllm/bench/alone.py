"""A function in a process of its own, which leaves nothing of the device behind.

Of a vLLM engine that was closed in this process some device memory can stay: the KV cache of a Qwen3 does under vLLM 0.26.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from ..errors import EngineError, SpeechLMError

_GRACE = 60.0  # seconds that the process gets to end by itself


def alone[T](function: Callable[..., T], *args: Any) -> T:
    """What ``function(*args)`` returns or raises; arguments and result travel pickled.

    Raises:
        EngineError: if the process ended without either.
    """
    context = get_context("spawn")
    mine, its = context.Pipe(duplex=False)
    level = logging.getLogger().getEffectiveLevel()
    process = context.Process(target=_work, args=(its, level, function, args))
    process.start()
    its.close()
    try:
        returned, value = mine.recv()
        process.join(_GRACE)
    except EOFError:
        process.join()
        raise EngineError(
            f"the process that measured ended with exit code {process.exitcode}; its last lines in the log say why"
        ) from None
    finally:
        process.kill()
        process.join()
        mine.close()
    if not returned:
        raise value
    return value


def _work(connection: Connection, level: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    from ..logs import set_up_logging

    set_up_logging(logging.getLevelName(level))
    try:
        outcome = True, function(*args)
    except Exception as error:  # noqa: BLE001 - raised at the other end, without its traceback
        if not isinstance(error, SpeechLMError):
            logging.getLogger(__name__).error("%s failed", function.__name__, exc_info=True)
        outcome = False, error
    connection.send(outcome)
    connection.close()
