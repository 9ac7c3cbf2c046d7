"""Layouts of the recorded models, built from ESPnet's own descriptions of them."""

import functools
import json
import pathlib

import yaml
from conftest import golden_files

from espnet2_vllm.audio.listening import Listening
from espnet2_vllm.layout import Layout

# What the configuration of the released audio encoder says, and that of the recorded model.
QWEN3_OMNI = Listening(rate=16000, hop=160, window=400, limit=480000, half_chunk=50)


@functools.cache
def opuslm_config(model: pathlib.Path) -> dict:
    return yaml.load((model / "config.yaml").read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)


def opuslm_layout(model: pathlib.Path) -> Layout:
    """Of an OpusLM model directory."""
    config = opuslm_config(model)
    return Layout.opuslm(config["token_list"], config["token_bias"], config["codec_token_in_use"])


def bagpiper_layout(vocab: pathlib.Path) -> Layout:
    """From ``functions/vocab_<model>.json``."""
    data = json.loads(vocab.read_text(encoding="utf-8"))
    (text,) = data["vocab_intervals"]["text"]
    streams = data["vocab_intervals"]["discrete_audio"]
    return Layout.bagpiper(text[1] - text[0], [stop - start for start, stop in streams], vocab_size=data["vocab_size"])


def bagpiper_model_layout(model: pathlib.Path) -> Layout:
    """Of a Bagpiper model directory."""
    (vocab,) = golden_files(f"bagpiper/functions/vocab_{model.name}.json")
    return bagpiper_layout(vocab)
