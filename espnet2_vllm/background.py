"""What serves others from a thread of its own until it is closed."""

from __future__ import annotations

import os
import threading
from typing import Self

from .errors import EngineError


class Background:
    """Base of a service: its thread runs ``_run``, which returns once ``_closing`` is set.

    Whoever changes what the thread looks at holds ``_changed`` and notifies it. The subclass starts ``_thread`` when all is there.
    """

    def __init__(self, name: str) -> None:
        self._changed = threading.Condition()
        self._closing = False
        self._name, self._process = name, os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_here(self) -> bool:
        """False in a process that was forked from the one that made it: threads, and what is on a GPU, do not come along."""
        return os.getpid() == self._process

    def check_process(self) -> None:
        """EngineError where waiting for the thread would last for ever."""
        if not self.is_here:
            raise EngineError(
                f"the {self._name} was started in process {self._process}, and this is process {os.getpid()}, forked from it, "
                "where nothing would ever answer: load the model in the process that uses it (behind the fork, or "
                "with multiprocessing's start method 'spawn')"
            )

    def _run(self) -> None:
        raise NotImplementedError

    def _on_close(self) -> None:
        """Lets go of what will not be served any more; called with ``_changed`` held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread, and waits for its end."""
        with self._changed:
            self._closing = True
            self._on_close()
            self._changed.notify_all()
        self._thread.join()
