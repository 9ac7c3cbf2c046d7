"""Which keys each dialect of decoding yaml has, and what their values may be.

A rule is a function that returns the checked value or raises ValueError with the problem. Sources:
``build_inference_config`` and ``speechlm_inference_chat.get_parser`` (chat), ``speechlm_inference.get_parser`` (flat),
``ParallelLLM.inference`` (bagpiper).
"""

import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from numbers import Integral, Real  # numpy's numbers too
from typing import Any

DTYPES = ("bfloat16", "float16", "float32", "float64")
SEARCH_ALGOS = {
    "topk_sampling": "topk",
    "topp_sampling": "topp",
    "greedy_search": "greedy",
    "teacher_force": "teacher_force",
}
# Modalities of espnet2.speechlm.definitions, whose blocks a chat file may hold; only the first three are generated.
MODALITIES = ("codec_ssl", "codec", "text_bpe", "ssl", "g2p", "spk", "class", "bool", "video_ssl", "svs_lb", "image")
ENFORCEABLE = ("text", "audio", "image", "video", "toolcall")

MOST_SCALE = 1000.0  # of cfg, temperature and ratios: beyond it a slip of the pen
LEAST_TEMPERATURE = 1e-5  # smaller ones overflow when logits are divided by them
MOST_ROWS = 1_000_000
MOST_COPIES = 1000


def show(value: Any) -> str:
    """``value`` for a message, cut to one short line."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse_text(value: Any, expected: str) -> None:
    """A number in quotes, or in a form that yaml 1.1 takes for text, is text: say how to write it."""
    if not isinstance(value, str):
        return
    try:
        meant = float(value)
    except ValueError:
        return
    if not math.isfinite(meant):
        return
    why = "yaml takes an exponent without '.' and sign for text, " if "e" in value.lower() else ""
    plain = format(Decimal(repr(meant)).normalize(), "f")
    raise ValueError(f"is the text {show(value)}; expected {expected}; {why}write {plain} without quotes")


def whole(low: int, high: int) -> Callable[[Any], int]:
    """A whole number in [low, high]."""
    expected = f"a whole number from {low} to {high}"

    def rule(value: Any) -> int:
        _refuse_text(value, expected)
        if isinstance(value, bool) or not isinstance(value, Integral) or not low <= value <= high:
            raise ValueError(f"is {show(value)}; expected {expected}")
        return int(value)

    return rule


def number(low: float, high: float) -> Callable[[Any], float]:
    """A finite number in [low, high], as float."""
    expected = f"a number from {low:g} to {high:g}"

    def rule(value: Any) -> float:
        _refuse_text(value, expected)
        if isinstance(value, bool) or not isinstance(value, Real) or not low <= value <= high:
            raise ValueError(f"is {show(value)}; expected {expected}")
        return float(value)

    return rule


def temperature(value: Any) -> float:
    """0 (greedy where the dialect knows it) or a temperature that logits can be divided by."""
    result = number(0, MOST_SCALE)(value)
    if 0 < result < LEAST_TEMPERATURE:
        raise ValueError(f"is {show(value)}, too small to divide by; write 0 or at least {LEAST_TEMPERATURE:g}")
    return result


def flag(value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"is {show(value)}; expected true or false (without quotes)")
    return value


def text(value: Any) -> str:
    """Text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"is {show(value)}; expected text")
    return value


def choice(*names: str) -> Callable[[Any], str]:
    """One of ``names``."""

    def rule(value: Any) -> str:
        if not isinstance(value, str) or value not in names:
            raise ValueError(f"is {show(value)}; expected one of {', '.join(names)}")
        return value

    return rule


def mapping(value: Any) -> Mapping[str, Any]:
    """A mapping, whatever is in it."""
    if not isinstance(value, Mapping):
        raise ValueError(f"is {show(value)}; expected a mapping (key: value)")
    return value


def block(value: Any) -> Any:
    """The block of a modality; ``Document.take`` checks it by its own rules."""
    return value


def maybe(rule: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """null or what ``rule`` takes."""
    return lambda value: None if value is None else rule(value)


def off(value: Any) -> Any:
    """An option of ESPnet that is accepted only as long as it is off."""
    if value is not None and (not isinstance(value, bool | int | float) or value != 0):
        raise ValueError(f"is {show(value)}, but this option is not supported; leave it out")
    return value


def enforced(value: Any) -> tuple[str, ...]:
    """A list of modality names."""
    if not isinstance(value, list | tuple):
        raise ValueError(
            f"is {show(value)}; expected a list such as [text, audio]; leave the key out to enforce nothing"
        )
    for place, name in enumerate(value, 1):
        if not isinstance(name, str) or name not in ENFORCEABLE:
            raise ValueError(f"has {show(name)} as entry {place}; expected one of {', '.join(ENFORCEABLE)}")
    return tuple(value)


def search_algo(value: Any) -> str:
    """A search algorithm that is supported."""
    if value == "beam_search":
        raise ValueError(
            "is beam_search, which is not supported: ESPnet has it for models of one stream only, and fails for those of "
            f"several; write one of {', '.join(SEARCH_ALGOS)}"
        )
    return choice(*SEARCH_ALGOS)(value)


def paths(value: Any) -> str | list:
    """``--data_path_and_name_and_type``: text, or a list with one text."""
    if isinstance(value, list) and len(value) == 1:
        return [text(value[0])]
    return text(value)


BAGPIPER = {
    "dtype": choice(*DTYPES),
    "num_hypo": whole(1, MOST_COPIES),
    "enforce_modality": enforced,
    "audio": block,
    "text": block,
}
BAGPIPER_SEGMENT = {
    "temperature": temperature,
    "topk": whole(1, MOST_ROWS),
    "cfg": number(0, MOST_SCALE),
    "max_step": whole(1, MOST_ROWS),
    "min_step": whole(0, MOST_ROWS),
    "num_hypo": whole(1, MOST_COPIES),
}
BAGPIPER_NEEDED = {
    "temperature": "ESPnet has no default for it (0 is greedy)",
    "topk": "ESPnet has no default for it and asks for it even at temperature 0 (1 is greedy)",
    "max_step": "ESPnet has no default for it",
}

_GENERAL = {
    "nproc": whole(1, MOST_COPIES),
    "dtype": choice(*DTYPES),
    "nbest": maybe(whole(1, MOST_COPIES)),
    "seed": whole(0, 2**32 - 1),
    "output_dir": text,
    "batch_size": whole(1, MOST_ROWS),
    "ngpu": whole(0, MOST_COPIES),
    "num_workers": whole(0, MOST_COPIES),
    "log_level": text,
    "train_config": text,
    "model_file": text,
    "data_path_and_name_and_type": paths,
}
# ``inference_mode`` and ``device`` are no command line options, but SpeechLM.from_pretrained takes them from the file.
CHAT_CLI = {
    **_GENERAL,
    "inference_last_segment": flag,
    "inference_mode": choice("task", "chat"),
    "device": text,
}
CHAT = {**dict.fromkeys(MODALITIES, block), **CHAT_CLI}
CHAT_SEGMENT = {
    "search_algo": search_algo,
    "sampling_temperature": temperature,
    "topk": whole(1, MOST_ROWS),
    "top_p": number(0, 1),
    "length_method": choice("absolute", "relative"),
    "maxlen": whole(1, MOST_ROWS),
    "minlen": whole(0, MOST_ROWS),
    "maxlenratio": number(0, MOST_SCALE),
    "minlenratio": number(0, MOST_SCALE),
    "tokenizer": mapping,
}
CHAT_NEEDED = {
    "search_algo": f"ESPnet has no default for it (one of {', '.join(SEARCH_ALGOS)})",
    "length_method": "ESPnet has no default for it (absolute or relative)",
}
SEARCH_NEEDED = {
    "topk_sampling": {"sampling_temperature": "topk_sampling needs it", "topk": "topk_sampling needs it"},
    "topp_sampling": {"sampling_temperature": "topp_sampling needs it", "top_p": "topp_sampling needs it"},
}

FLAT_ONLY = {
    "search_algo": search_algo,
    "sampling_temperature": temperature,
    "top_k": whole(1, MOST_ROWS),
    "minlenratio": number(0, MOST_SCALE),
    "maxlenratio": number(0, MOST_SCALE),
    "codec_conf": mapping,
    "image_conf": mapping,
    "top_p": number(0, 1),
    "beam_size": whole(1, MOST_COPIES),
    "inference_nq": maybe(whole(1, MOST_COPIES)),
    "fixed_length": flag,
    "model_tag": text,
    "run_asr": off,
    "run_mt": off,
    "codec_ssl_corrupt_prob": off,
    "inference_tts": off,
    "inference_tts_spk_path": off,
    "inference_tts_speaker_id": off,
}
FLAT = {**FLAT_ONLY, **_GENERAL}
FLAT_CLI = (*_GENERAL, "model_tag", "inference_nq")
FLAT_DEFAULTS = {
    "search_algo": "topk_sampling",
    "sampling_temperature": 1.0,
    "top_k": 30,
    "top_p": 0.8,
    "fixed_length": False,
    "minlenratio": 0.0,
    "maxlenratio": 10.0,
    "dtype": "float32",
    "nproc": 1,
}

OPUSLM_ONLY = (*MODALITIES, "search_algo", "sampling_temperature", "codec_conf", "inference_last_segment")
BAGPIPER_ONLY = ("audio", "text", "enforce_modality")
