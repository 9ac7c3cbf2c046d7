"""What a model thinks before it answers: ``<think> ... </think> answer``."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def split_thinking(text: str) -> tuple[str, str]:
    """(thinking, answer) of a generated text, both stripped; ("", ``text`` as it is) where nothing ends a thought.

    ESPnet's ``espnet2.bin.speechlm_inference.split_thinking``.
    """
    before, closed, answer = text.partition(CLOSE)
    return (before.replace(OPEN, "").strip(), answer.strip()) if closed else ("", text)
