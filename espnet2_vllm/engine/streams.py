"""When rows of a streaming request leave the engine before its end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Stream:
    """What a streaming request has handed out, and when it is due again.

    Attributes:
        first: rows of an audio segment until they are handed out for the first time.
        then: rows from there to the next time; text is handed out so often too.
        before: rows that announce an audio segment and are counted with it (Bagpiper: its modality row).
        sent: rows handed out so far.
    """

    first: int
    then: int
    before: int = 0
    sent: int = 0
    _audio: int = 0

    def due(self, rows: int, *, audio: bool) -> bool:
        """Whether a request of ``rows`` rows hands them out now. Called once a row; ``audio``: the next row is audio as well."""
        if not audio:
            ended, self._audio = self._audio > 0, 0
            return ended or rows - self.sent >= self.then
        self._audio += 1
        beyond = self._audio - self.before - self.first
        return beyond >= 0 and beyond % self.then == 0
