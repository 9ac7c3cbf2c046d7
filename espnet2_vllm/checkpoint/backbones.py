"""What a backbone's config.json may say: keys and values that transformers and vLLM read alike.

Of each entry a small random model gave the same ids by transformers' plain forward pass, by the ``pytorch`` backend and by vLLM
(``tests/backends/test_backbone_settings.py``). Anything else is refused by name: one of the two may read it and the other not.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError


class Values(NamedTuple):
    """Values of a key. accepts: whether one is among them. shown: all of them, for people."""

    accepts: Callable[[Any], bool]
    shown: str


def _only(*values: Any) -> Values:
    def accepts(given: Any) -> bool:  # in Python True is 1
        return any(given == value and isinstance(given, bool) == isinstance(value, bool) for value in values)

    return Values(accepts, " or ".join(map(json.dumps, values)))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


_ANY = Values(lambda _: True, "anything")
_COUNT = Values(lambda value: _is_number(value) and isinstance(value, int), "a positive whole number")
_COUNT_OR_NULL = Values(lambda value: value is None or _COUNT.accepts(value), "a positive whole number or null")
_NUMBER = Values(_is_number, "a positive number")
_WINDOW = Values(lambda value: value is None or _is_number(value), "a positive number or null")
_MAPPING = Values(lambda value: value is None or isinstance(value, Mapping), "a mapping or null")  # _rope looks into it


def _are_full(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(kind == "full_attention" for kind in value))


_GEOMETRY: dict[str, Values] = {
    "model_type": _ANY,  # looked at before
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), _COUNT),
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), _COUNT),
    "head_dim": _COUNT,
    "num_key_value_heads": _COUNT_OR_NULL,
    "rms_norm_eps": _NUMBER,
    "hidden_act": _only("silu"),
    "rope_theta": _NUMBER,
    "rope_scaling": _MAPPING,
    "rope_parameters": _MAPPING,
}
# Of training, of other tasks, of text alone, of the file itself.
_WITHOUT_EFFECT = (
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "is_llama_config",
    "label2id",
    "max_window_layers",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "use_cache",
)
# What another architecture has; without effect as it stands here.
_NEUTRAL = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "bias", "qkv_bias", "use_sliding_window"), _only(False)),
    **dict.fromkeys(("rope_interleaved", "is_encoder_decoder"), _only(False)),
    **dict.fromkeys(("sliding_window", "clip_qkv", "quantization_config", "dual_chunk_attention_config"), _only(None)),
    "partial_rotary_factor": _only(1.0, None),
    "is_causal": _only(True),
    "chunk_size_feed_forward": _only(0),
    "layer_types": Values(_are_full, '"full_attention" for every layer, or null'),
}
_COMMON = {**_GEOMETRY, **dict.fromkeys(_WITHOUT_EFFECT, _ANY), **_NEUTRAL}

BACKBONES: Mapping[str, Mapping[str, Values]] = {
    "qwen3": {**_COMMON, "sliding_window": _WINDOW},  # read with use_sliding_window only
    "llama": {
        **_COMMON,
        "head_dim": _COUNT_OR_NULL,
        **dict.fromkeys(("attention_bias", "mlp_bias"), _only(False, True)),
    },
    "olmo2": {**_COMMON, "attention_bias": _only(False, True)},
}

_EITHER = {"rope_theta": _NUMBER, "partial_rotary_factor": _only(1.0, None)}
ROPES: Mapping[str, Mapping[str, Values]] = {
    "default": _EITHER,
    "llama3": {
        **_EITHER,
        **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), _NUMBER),
    },
    "yarn": {
        **_EITHER,
        **dict.fromkeys(("factor", "original_max_position_embeddings"), _NUMBER),
        **dict.fromkeys(("beta_fast", "beta_slow"), _WINDOW),
        **dict.fromkeys(("attention_factor", "attn_factor", "mscale", "mscale_all_dim"), _only(None)),
        "truncate": _only(True, None),
    },
}
_NEEDED = {"llama3": (*ROPES["llama3"],)[2:], "yarn": ("factor", "original_max_position_embeddings")}


def check_backbone(directory: Path, what: str) -> None:
    """Raises CheckpointError, with every key, if config.json in ``directory`` holds what is not in the tables.

    Its ``model_type`` must be one of ``BACKBONES``. ``what``: what names the directory, for the message.
    """
    path = directory / "config.json"
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path} ({what}): {error}") from error
    model_type = given["model_type"]
    problems = [*_compare(given, BACKBONES[model_type], ""), *_rope(given)]
    if problems:
        raise CheckpointError(
            f"{path} ({what}): a {model_type} backbone with these settings is not supported, since vLLM and transformers are not "
            f"known to read them alike: {'; '.join(problems)}. Change them only if the model was trained without"
        )


def _compare(given: Mapping[str, Any], table: Mapping[str, Values], prefix: str) -> Iterator[str]:
    for key, value in given.items():
        if key not in table:
            yield f"{prefix}{key} is {_short(value)}: the key is not known here, leave it out"
        elif not table[key].accepts(value):
            yield f"{prefix}{key} is {_short(value)}: expected {table[key].shown}"


def _rope(given: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the rotary positions, which two keys may describe: that of transformers 4 and that of 5."""
    found = {}
    for key in ("rope_scaling", "rope_parameters"):
        rope = given.get(key)
        if not isinstance(rope, Mapping) or not rope:
            continue
        rope = {name: value for name, value in rope.items() if name != "type"} | {
            "rope_type": rope.get("rope_type", rope.get("type", "default"))
        }
        kind = rope.pop("rope_type")
        if kind not in ROPES:
            yield f"{key}.rope_type is {_short(kind)}: expected one of {', '.join(ROPES)}"
            continue
        yield from _compare(rope, ROPES[kind], f"{key}.")
        missing = [name for name in _NEEDED.get(kind, ()) if rope.get(name) is None]
        if missing:
            yield f"{key} lacks {', '.join(missing)}, which {kind} needs"
        elif kind == "yarn":
            yield from _yarn(rope, given.get("max_position_embeddings"), key)
        found[key] = kind, {name: value for name, value in rope.items() if value is not None and name != "rope_theta"}
    if len({repr(rope) for rope in found.values()}) > 1:
        yield "rope_scaling and rope_parameters differ: leave out the one that is wrong"


def _yarn(rope: Mapping[str, Any], positions: Any, key: str) -> Iterator[str]:
    """transformers 4 stretches by the ratio of the two lengths, transformers 5 and vLLM by the factor."""
    factor, original = rope["factor"], rope["original_max_position_embeddings"]
    if all(map(_is_number, (factor, original, positions))) and factor * original != positions:
        yield (
            f"{key}.factor {factor} times original_max_position_embeddings {original} is not max_position_embeddings {positions}: "
            "expected it to be, since transformers 4 takes the ratio of the two lengths and vLLM the factor"
        )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def kept_keys(config: Any) -> set[str]:
    """Keys of a transformers configuration that a converted directory keeps: those of its class, and none that names code."""
    return ({*type(config)().to_dict()} | {"head_dim"}) - {"_name_or_path", "auto_map"}


def rope_settings(config: Any) -> dict[str, Any]:
    """``rope_theta``, ``rope_scaling`` and ``rope_parameters`` of a transformers configuration, for transformers 4, 5 and vLLM."""
    rope = {name: value for name, value in (config.rope_parameters or {}).items() if value is not None}
    rope = {name: value for name, value in rope.items() if name not in ("type", "partial_rotary_factor")}
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    plain = scaling.get("rope_type", "default") == "default"
    return {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if plain else scaling,  # transformers 4 does not know rope_parameters; 5 reads it first
        "rope_parameters": rope,
    }
