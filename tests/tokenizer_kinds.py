"""Tokenizer folders of every kind that is read, made of the files in ``golden_tokenizers``, and what transformers 4.57 gave.

``python tests/tokenizer_kinds.py record`` in an environment with transformers 4.57, sentencepiece and protobuf writes the
recording anew; ``... make`` trains the files on a few lines of text.
"""

import json
import pathlib
import shutil
import sys

DATA = pathlib.Path(__file__).resolve().parent / "golden_tokenizers"
RECORDING = DATA / "recorded.json"
END = "<|endoftext|>"

PROBES = [
    "Steps:\n\n1. open it\n\n2. close it",
    "it costs  5 euros, or   12",
    "in 2024 they've 12345 items; we'll see",
    " a blank in front, one behind ",
    "tabs\tand\r\nline breaks\n\n\nand  \n blanks",
    "plain words only",
    "Hello, world! I do n't know . Is it 's ? yes , it is",
    "naïve café, e\u0301 decomposed, Ångström, \ufb01ne",
    "日本語の文章です。中文也一样。한국어",
    "\U0001f600 smile \U0001f468\u200d\U0001f469\u200d\U0001f467 family",
    "a<|endoftext|>b <|im_start|>user\n<|im_end|>",
    "<think>\nwell\n</think> <s> and </s> <unk>",
    "<extra> word<extra>word",
    "x = {'a': [1, 2]}  # code\n    return x",
    "\u00a0no-break\u2003em\u200bzero\ufeff",
    "0 00 000 1,000.50 ½ ² ٣",
    "",
    " ",
    "\n",
]

_SMOLLM2 = {
    "tokenizer_class": "GPT2Tokenizer",
    "add_prefix_space": False,
    "clean_up_tokenization_spaces": False,
    "bos_token": END,
    "eos_token": END,
    "unk_token": END,
    "model_max_length": 8192,
    "vocab_size": 49152,
}
_OLMO2 = {
    "tokenizer_class": "GPT2Tokenizer",
    "add_prefix_space": False,
    "bos_token": END,
    "eos_token": END,
    "unk_token": END,
    "pad_token": "<|pad|>",
}
_QWEN3 = {
    "tokenizer_class": "Qwen2Tokenizer",
    "add_bos_token": False,
    "add_prefix_space": False,
    "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    "bos_token": None,
    "clean_up_tokenization_spaces": False,
    "eos_token": "<|im_end|>",
    "errors": "replace",
    "pad_token": END,
    "split_special_tokens": False,
    "unk_token": None,
}
_LLAMA = {
    "tokenizer_class": "LlamaTokenizer",
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "clean_up_tokenization_spaces": False,
    "legacy": False,
}
_LLAMA3 = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|begin_of_text|>",
    "eos_token": "<|end_of_text|>",
}
_NEW = {
    "content": "<extra>",
    "lstrip": True,
    "rstrip": False,
    "normalized": False,
    "single_word": False,
    "special": False,
}

# name -> (files, tokenizer_config.json or None, model_type of the config.json beside it or None)
KINDS = {
    "smollm2": (["smollm2.json"], _SMOLLM2, "llama"),
    "smollm2-alone": (["smollm2.json"], _SMOLLM2, None),
    "smollm2-blank": (["smollm2.json"], _SMOLLM2 | {"add_prefix_space": True}, "llama"),
    "olmo2": (["olmo2.json"], _OLMO2, "olmo2"),
    "olmo2-alone": (["olmo2.json"], _OLMO2, None),
    "olmo2-unnamed": (["olmo2.json"], None, "olmo2"),
    "olmo2-bos": (["olmo2.json"], _OLMO2 | {"add_bos_token": True}, "olmo2"),
    "olmo2-cleaning": (["olmo2.json"], _OLMO2 | {"clean_up_tokenization_spaces": True}, "olmo2"),
    "qwen3": (["qwen3.json"], _QWEN3, "qwen3"),
    "qwen3-alone": (["qwen3.json"], _QWEN3, None),
    "qwen3-split": (["qwen3.json"], _QWEN3 | {"split_special_tokens": True}, "qwen3"),
    "qwen3-added": (["qwen3.json"], _QWEN3 | {"added_tokens_decoder": {"900": _NEW}}, "qwen3"),
    "gpt2-blank": (["gpt2.json"], _SMOLLM2 | {"add_prefix_space": True}, "gpt2"),
    "gpt2-parts": (["gpt2.vocab.json", "gpt2.merges.txt"], _SMOLLM2, "llama"),
    "gpt2-parts-bos": (["gpt2.vocab.json", "gpt2.merges.txt"], _SMOLLM2 | {"add_bos_token": True}, "llama"),
    "qwen2-parts": (["gpt2.vocab.json", "gpt2.merges.txt"], _QWEN3 | {"eos_token": END}, "qwen3"),
    "llama": (["llama.json", "llama.model"], _LLAMA, "llama"),
    "llama-ends": (["llama.json"], _LLAMA | {"add_bos_token": False, "add_eos_token": True}, "llama"),
    "llama-model": (["llama.model"], _LLAMA, "llama"),
    "llama-legacy": (["llama.model"], _LLAMA | {"legacy": True}, "llama"),
    "llama-unsaid": (["llama.model"], {k: v for k, v in _LLAMA.items() if k != "legacy"}, "llama"),
    "llama-blank": (["llama.json", "llama.model"], _LLAMA | {"add_prefix_space": True}, "llama"),
    "llama-no-blank": (["llama.json", "llama.model"], _LLAMA | {"add_prefix_space": False}, "llama"),
    "llama-unigram": (["unigram.model"], _LLAMA | {"legacy": True}, "llama"),
    "llama3": (["llama3.json"], _LLAMA3, "llama"),
}


def build(kind: str, folder: pathlib.Path) -> pathlib.Path:
    """The folder of a kind."""
    files, settings, model_type = KINDS[kind]
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        stem, _, rest = file.partition(".")
        name = {"json": "tokenizer.json", "model": "tokenizer.model"}.get(rest, rest)
        shutil.copyfile(DATA / file, folder / name)
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


# -- with transformers 4.57 -------------------------------------------------------------------------------------------
def record(folder: pathlib.Path) -> dict:
    """Ids and texts as ESPnet's two routines ask transformers for them (``TextIO``; ``HuggingFaceTokenizer``)."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoded, decoded = [], []
    for text in PROBES:
        plain = tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text))
        encoded.append([tokenizer.encode(text, add_special_tokens=True), plain])
    samples = (
        [pair[1] for pair in encoded]
        + [pair[0] for pair in encoded[:2]]
        + [[*encoded[0][1][:9], *range(40), 3, 7], list(range(200, 330))]
    )
    for ids in samples:
        kept, cleaned = (
            tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=clean)
            for clean in (False, True)
        )
        opuslm = tokenizer.batch_decode([ids], skip_special_tokens=True)[0].replace("\n", " ").strip()
        decoded.append([ids, kept, cleaned, opuslm])
    return {"size": len(tokenizer), "encoded": encoded, "decoded": decoded}


def record_all() -> None:
    import tempfile

    import transformers

    records, kinds = [], {}
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            one = record(build(kind, pathlib.Path(folder) / "folder"))
        if one not in records:  # several kinds come to the same
            records.append(one)
        kinds[kind] = records.index(one)
    found = {"transformers": transformers.__version__, "probes": PROBES, "kinds": kinds, "records": records}
    RECORDING.write_text(json.dumps(found, separators=(",", ":")))


def make() -> None:
    """Trains the files; their pre-tokenizers, normalisers and special tokens are those of the models that they are called after."""
    import io

    import sentencepiece
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    texts = [text for text in PROBES if "<" not in text] * 20
    rest = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"

    def byte_level(**options):
        return pre_tokenizers.ByteLevel(add_prefix_space=False, **options)

    def split(digits):
        pattern = Regex(words + rest % digits)
        return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), byte_level(use_regex=False)])

    chat = ["<|im_start|>", "<|im_end|>"]
    digits = pre_tokenizers.Digits(individual_digits=True)
    befores = {
        "smollm2": (pre_tokenizers.Sequence([digits, byte_level()]), [END, *chat]),
        "olmo2": (split("{1,3}"), [END, "<|pad|>"]),
        "qwen3": (split(""), [END, *chat]),
        "gpt2": (byte_level(), [END]),
        "llama3": (split("{1,3}"), ["<|begin_of_text|>", "<|end_of_text|>"]),
    }
    DATA.mkdir(exist_ok=True)
    for name, (before, special) in befores.items():
        tokenizer = Tokenizer(models.BPE())
        if name == "qwen3":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer, tokenizer.decoder = before, decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=330, initial_alphabet=alphabet, special_tokens=special, show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        if name == "qwen3":
            tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in ("<think>", "</think>")])
        if name == "llama3":
            first = special[0]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{first} $A",
                pair=f"{first} $A {first}:1 $B:1",
                special_tokens=[(first, tokenizer.token_to_id(first))],
            )
        tokenizer.save(str(DATA / f"{name}.json"), pretty=False)
        if name == "gpt2":
            tokenizer.model.save(str(DATA), "gpt2")
            for part in ("vocab.json", "merges.txt"):
                (DATA / f"gpt2-{part}").rename(DATA / f"gpt2.{part}")
    for name, kind, size in (("llama", "bpe", 420), ("unigram", "unigram", 380)):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=model, model_type=kind, vocab_size=size, byte_fallback=True,
            normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True, character_coverage=0.985,
            hard_vocab_limit=False,
        )  # fmt: skip
        (DATA / f"{name}.model").write_bytes(model.getvalue())
    import tempfile

    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        made = AutoTokenizer.from_pretrained(build("llama-model", pathlib.Path(folder) / "folder"))
        made.backend_tokenizer.save(str(DATA / "llama.json"), pretty=False)


if __name__ == "__main__":
    {"make": make, "record": record_all}[sys.argv[1]]()
