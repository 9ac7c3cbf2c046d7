"""One of the engines of a ``DataParallelEngine``: ``python -m espnet2_vllm.backends.engine_process FD NAME``.

FD is this end of a pipe. The process ends when it is told to, or when the other end is gone.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from ..checkpoint import open_checkpoint
from ..engine.core import rules_from
from ..errors import SpeechLMError
from ..logs import LOG_FORMAT
from ..orphans import end_with
from ..plan import RowRequest
from .base import Engine, Outcome
from .parallel import Results, Start, receive, send
from .vllm import VllmEngine


def main(argv: Sequence[str]) -> int:
    descriptor, name = argv
    # Ctrl-C reaches all processes of a terminal; what it means for this one is decided at the other end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(os.getppid())
    with Connection(int(descriptor)) as connection:
        try:
            start = Start(*receive(connection))
            return _run(connection, start, name)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return 1  # nobody is there to work for


def _run(connection: Connection, start: Start, name: str) -> int:
    logging.basicConfig(stream=sys.stderr, format=f"{name}: {LOG_FORMAT}", level=start.log_level)
    try:
        engine = VllmEngine(open_checkpoint(start.directory), **start.options)
    except SpeechLMError as error:
        send(connection, error)
        return 1
    try:
        send(connection, engine.max_rows)
        _Service(engine, connection).run()
    except SpeechLMError as error:
        send(connection, error)
        return 1
    finally:
        engine.close()
    return 0


class _Service:
    """Does what the other end orders, and tells it what came out. Requests go by number there and by id here."""

    def __init__(self, engine: Engine, connection: Connection) -> None:
        self._engine, self._connection = engine, connection
        self._numbers: dict[str, int] = {}
        self._refused: list[tuple[int, Outcome]] = []

    def run(self) -> None:
        while True:
            while self._connection.poll(0 if self._engine.unfinished or self._refused else None):
                what, *order = receive(self._connection)
                if what == "close":
                    return
                {"submit": self._submit, "abort": self._abort}[what](*order)
            self._step()

    def _submit(self, number: int, request: RowRequest, rules: dict[str, Any]) -> None:
        try:
            self._engine.submit(replace(request, rules=rules_from(self._engine.layout, rules)))
        except SpeechLMError as error:
            self._refused.append((number, error))
        else:
            self._numbers[request.request_id] = number

    def _abort(self, number: int) -> None:
        names = [name for name, known in self._numbers.items() if known == number]  # none if it has just ended
        self._engine.abort(names)
        for name in names:
            del self._numbers[name]

    def _step(self) -> None:
        finished, self._refused = self._refused, []
        outcomes = self._engine.step()
        rows = [(self._numbers[name], fresh) for name, fresh in self._engine.take_rows()]
        finished += [(self._numbers.pop(name), outcome) for name, outcome in outcomes]
        if finished or rows:
            send(self._connection, Results(finished, rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
