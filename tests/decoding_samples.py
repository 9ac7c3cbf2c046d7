"""One file of each decoding dialect, to be changed by the tests."""

import copy

BAGPIPER = {
    "dtype": "float32",
    "enforce_modality": ["text", "audio"],
    "audio": {"temperature": 0.8, "topk": 20, "cfg": 3, "max_step": 2048, "min_step": 50},
    "text": {"temperature": 0.0, "topk": 20, "cfg": 1, "max_step": 1024},
}
CHAT = {
    "nproc": 2,
    "dtype": "bfloat16",
    "codec_ssl": {
        "search_algo": "topk_sampling",
        "sampling_temperature": 0.8,
        "topk": 30,
        "length_method": "absolute",
        "maxlen": 2048,
        "minlen": 3,
        "tokenizer": {"codec_choice": "ESPnet", "nested": {"any": [1, None]}},
    },
    "text_bpe": {
        "search_algo": "greedy_search",
        "sampling_temperature": 0.8,
        "topk": 20,
        "length_method": "absolute",
        "maxlen": 512,
        "minlen": 1,
    },
}
FLAT = {"nproc": 10, "search_algo": "topk_sampling", "sampling_temperature": 0.7, "minlenratio": 0.05, "top_k": 30}
FAMILIES = [("bagpiper", BAGPIPER), ("opuslm", CHAT), ("opuslm", FLAT)]


def changed(base, path, value):
    """A copy of ``base`` with ``value`` at the dotted ``path``."""
    result = copy.deepcopy(base)
    *blocks, last = path.split(".")
    block = result
    for name in blocks:
        block = block[name]
    block[last] = value
    return result


def without(base, path):
    result = copy.deepcopy(base)
    *blocks, last = path.split(".")
    block = result
    for name in blocks:
        block = block[name]
    del block[last]
    return result


def write(tmp_path, text):
    path = tmp_path / "decode.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    return path
