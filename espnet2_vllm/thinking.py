"""What a model thinks before it answers: ``<think> ... </think> answer``."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def split_thinking(text: str) -> tuple[str, str]:
    """(thinking, answer) of a generated text, both stripped.

    Without the marks everything is answer. Thinking that does not end, because the text was cut, leaves the answer empty.
    """
    before, closed, answer = text.partition(CLOSE)
    if closed:
        return before.strip().removeprefix(OPEN).strip(), answer.strip()
    head, opened, thinking = text.partition(OPEN)
    if opened and not head.strip():
        return thinking.strip(), ""
    return "", text.strip()
