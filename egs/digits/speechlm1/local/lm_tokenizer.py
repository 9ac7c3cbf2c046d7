"""The text tokenizer of the small models: a byte-level BPE, as the large ones have, learnt from the recipe's own texts."""

from __future__ import annotations

import json
import random
from pathlib import Path

from texts import DIGITS, KINDS, answer, draw
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

END = "<|endoftext|>"  # id 0: ESPnet reads a 0 in a prompt as padding, so it must be no text
_TEXTS = 4000  # of each kind


def _corpus(seed: int) -> list[str]:
    rng = random.Random(seed)
    texts = [draw(kind, rng, test=False) for kind in KINDS for _ in range(_TEXTS)]
    return texts + [answer(text) for text in texts if text.split()[0] in ("count", "repeat", "spell")]


def make_tokenizer(directory: Path, size: int, seed: int = 9, words: tuple[str, ...] = ()) -> None:
    """Writes what ``AutoTokenizer`` reads. ``words``: said only by the recipe itself, such as a system prompt.

    Upper case is read as lower case and a figure as its word. Any other text can be written as bytes.
    """
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    figures = [normalizers.Replace(str(figure), f" {word} ") for figure, word in enumerate(DIGITS)]
    blanks = [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *figures, *blanks])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([*_corpus(seed), *words * _TEXTS], trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    named = {"bos_token": END, "eos_token": END, "pad_token": END, "unk_token": END}
    config = named | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": True,  # as in the file; transformers 4 wants to be told
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", named)):
        (directory / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
