"""The fuzzer's models: recorded ones, and tiny ones with random weights that have other numbers of streams."""

import dataclasses
import pathlib

from bench_models import tiny_bagpiper, tiny_opuslm
from conftest import golden_models

from espnet2_vllm.bench.weights import write_weights
from espnet2_vllm.checkpoint import Checkpoint, ensure_converted

from .groups import RECORDED

TINY = {
    "bagpiper-s2": lambda: tiny_bagpiper(2),
    "bagpiper-s5": lambda: tiny_bagpiper(5),
    "opuslm-s2": lambda: tiny_opuslm(1),
    "opuslm-s9": lambda: tiny_opuslm(8),
}
HEAD = 32  # the smallest that vLLM's attention takes everywhere
PEAK = 3.0  # at the height of the noise, so that segments end and drawn ids vary


def family_of(name: str) -> str:
    return RECORDED.get(name) or name.partition("-")[0]


def open_model(name: str, folder: pathlib.Path) -> Checkpoint:
    """The checkpoint; one with random weights is written below ``folder``, the same each time."""
    if name in RECORDED:
        (directory,) = (path for path in golden_models(RECORDED[name]) if path.name == name)
        return ensure_converted(directory)
    geometry = TINY[name]()
    geometry = dataclasses.replace(geometry, backbone={**geometry.backbone, "head_dim": HEAD})
    return write_weights(geometry, folder / name, seed=1, peak=PEAK)
