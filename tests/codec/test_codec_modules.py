"""A codec's modules made ready: the same samples, with less to compute."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from tiny_codecs import random_codes, tiny_codec

from espnet2_vllm.codec import modules

CHECK = pathlib.Path(__file__).resolve().parent / "snake_check.py"


def names_of(codec):
    return {type(module).__name__ for module in codec.modules()}


@pytest.mark.parametrize("name", ["dac", "encodec", "funcodec"])
def test_no_codec_computes_weight_norm_in_every_call(name):
    codec = tiny_codec(name)
    assert not [
        module for module in codec.modules() if hasattr(module, "weight_g") or hasattr(module, "parametrizations")
    ]


@pytest.mark.parametrize("wrap", [torch.nn.utils.weight_norm, torch.nn.utils.parametrizations.weight_norm])
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weight_norm_is_folded_exactly(wrap, gradients):
    torch.manual_seed(5)
    layer = wrap(torch.nn.Conv1d(3, 4, 5)).requires_grad_(gradients)
    x = torch.randn(2, 3, 20)
    with torch.no_grad():
        expected = layer(x)
        torch.testing.assert_close(modules.for_inference(layer, torch.device("cpu"))(x), expected, rtol=0, atol=0)
    assert "weight" in dict(layer.named_parameters())


@pytest.mark.parametrize("name", ["dac", "xcodec"])
def test_snakes_of_both_kinds_are_found(name, monkeypatch):
    codec = tiny_codec(name)
    codes = random_codes(codec, 20, seed=1)
    whole = codec.decode(codes)
    monkeypatch.setattr(modules.FusedSnake, "forward", lambda self, x: modules.snake(x, self.alpha))
    replaced = [(parent, name, child) for parent in codec.modules() for name, child in parent.named_children()]
    replaced = [entry for entry in replaced if type(entry[2]).__name__ == "Snake1d"]
    assert modules.fuse_snakes(codec._model) == len({id(child) for _, _, child in replaced}) > 0
    try:
        assert "Snake1d" not in names_of(codec)
        np.testing.assert_allclose(codec.decode(codes), whole, rtol=0, atol=1e-6)
    finally:
        for parent, name, child in replaced:
            setattr(parent, name, child)


@pytest.mark.parametrize(("mode", "said"), [("", "equal"), ("compile", "compiled")])
def test_the_kernel_is_its_twin_and_compiles_for_hopper(mode, said):
    done = subprocess.run([sys.executable, str(CHECK), mode], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and said in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
