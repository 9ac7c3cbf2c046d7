"""When each word of an utterance has been heard: by the part of a model in training that reads off what is said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from lm_data import grouped
from lm_model import Batch, Net
from lm_rows import Example, Spoken


@torch.no_grad()
def aligned(
    net: Net, tokenizer: Any, corpus: Sequence[Spoken], heard: Callable[[Spoken], Example], rows: int
) -> list[Spoken]:
    """``corpus`` with the ends of those utterances of the speaking voices that are read without a mistake.

    Args:
        heard: an utterance as an example of speech to text.
        rows: of a batch.
    """
    known: dict[str, tuple[int, ...]] = {}
    examples, owners = [], {}
    for one in corpus:
        if one.is_target:
            examples.append(heard(one))
            owners[id(examples[-1])] = one
    for group in grouped(examples, rows):
        batch = Batch(group, net.emb.weight.device)
        logits = net.read(batch.rows)
        for place, start, stop, words in batch.said:
            best = logits[place, start:stop].argmax(-1).tolist()
            found = [
                (word, row)
                for row, word in enumerate(best)
                if word != net.layout.text.size and (row == 0 or best[row - 1] != word)
            ]
            if tuple(word for word, _ in found) == words:
                known[owners[id(group[place])].uid] = tuple(row for _, row in found)
    print(f"{len(known)} of {len(examples)} utterances of the speaking voices are aligned", flush=True)
    return [replace(one, ends=known[one.uid]) if one.uid in known else one for one in corpus]
