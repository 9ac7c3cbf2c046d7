"""When each word of an utterance has been heard: by the part of a model in training that reads off what is said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from lm_data import grouped, loader
from lm_model import Batch, Net
from lm_rows import Example, Spoken


class _Heard(torch.utils.data.Dataset):
    """Batches of speech to text, of utterances of like length."""

    def __init__(self, groups: Sequence[Sequence[Spoken]], heard: Callable[[Spoken], Example]) -> None:
        self._groups, self._heard = groups, heard

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, place: int) -> Batch:
        return Batch([self._heard(one) for one in self._groups[place]])


@torch.no_grad()
def aligned(
    net: Net, corpus: Sequence[Spoken], heard: Callable[[Spoken], Example], rows: int, workers: int = 0
) -> list[Spoken]:
    """``corpus`` with the ends of those utterances of the speaking voices that are read without a mistake.

    Args:
        heard: an utterance as an example of speech to text.
        rows: of a batch, of speech.
        workers: processes that make the batches; 0: this one.
    """
    known: dict[str, tuple[int, ...]] = {}
    groups = grouped([one for one in corpus if one.is_target], rows, lambda one: len(one.codes))
    for group, batch in zip(groups, loader(_Heard(groups, heard), workers), strict=True):
        best = net.read(batch.to(net.emb.weight.device).rows).argmax(-1).cpu().numpy()
        for place, start, stop, words in batch.said:
            read = best[place, start:stop].tolist()
            found = [
                (word, row)
                for row, word in enumerate(read)
                if word != net.layout.text.size and (row == 0 or read[row - 1] != word)
            ]
            if tuple(word for word, _ in found) == words:
                known[group[place].uid] = tuple(row for _, row in found)
    print(f"{len(known)} of {sum(map(len, groups))} utterances of the speaking voices are aligned", flush=True)
    return [replace(one, ends=known[one.uid]) if one.uid in known else one for one in corpus]
