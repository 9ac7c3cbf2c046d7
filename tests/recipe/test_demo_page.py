"""ESPnet's demo page of Bagpiper with one import line changed: its handlers answer, whatever gradio would show of it."""

import importlib.util
import logging
import sys
import types
from unittest.mock import MagicMock

import numpy as np
import pytest
import soundfile
from espnet_tree import espnet_tree
from recorder import SPOKEN, WAV, Recorder
from release_folders import SFT, make_hub

PAGE = "egs2/bagpiper/speechlm1/demo/app.py"
LINE = "from espnet2.bin.speechlm_inference import ("


class ShownError(Exception):
    """``gradio.Error``."""


@pytest.fixture
def page(tmp_path, monkeypatch):
    """Opens the page under variables of the environment, with a gradio that shows nothing."""
    source = (espnet_tree() / PAGE).read_text(encoding="utf-8")
    assert source.count(LINE) == 1
    (tmp_path / "app.py").write_text(source.replace(LINE, "from espnet2_vllm import ("), encoding="utf-8")
    gradio = types.ModuleType("gradio")
    gradio.Error, gradio.Warning = ShownError, MagicMock()
    gradio.__getattr__ = lambda name: MagicMock()
    monkeypatch.setitem(sys.modules, "gradio", gradio)
    opened = []

    def open_page(**variables):
        for name in ("BAGPIPER_URL", "BAGPIPER_MODEL_TAG", "ESPNET_BAGPIPER_ATTN", "DEVICE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        spec = importlib.util.spec_from_file_location("app", tmp_path / "app.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        opened.append(module.model)
        return module

    yield open_page
    for model in opened:
        getattr(model, "close", lambda: None)()


def test_the_page_describes_and_renders_with_a_release(page, tmp_path, monkeypatch, caplog):
    pytest.importorskip("vllm")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(make_hub(tmp_path / "hub", weights=False)))
    with caplog.at_level(logging.WARNING):
        app = page(DEVICE="cpu", ESPNET_BAGPIPER_ATTN="sdpa")
    assert "attn_implementation 'sdpa' has no effect" in caplog.text
    assert app.model.backend == "vllm" and app.MODEL_TAG == SFT
    soundfile.write(tmp_path / "a.wav", np.random.default_rng(3).standard_normal(16_000) * 0.1, 16_000)
    thinking, said, again = app.describe(str(tmp_path / "a.wav"), "")
    assert said == again and thinking == "" and isinstance(said, str)
    (rate, samples), thinking, said = app.render("A bell.", 2.0)
    assert rate == 16_000 and len(samples) and isinstance(said, str) and thinking == ""
    with pytest.raises(ShownError, match="Describe the audio"):
        app.render(" ", 3.0)


def test_the_page_speaks_to_a_server(page, tmp_path):
    server = Recorder()
    try:
        app = page(BAGPIPER_URL=server.url)
        (tmp_path / "a.wav").write_bytes(WAV)
        server.answer = (200, {"content": "<think>hm</think> Rain."})
        assert app.describe(str(tmp_path / "a.wav"), "What?") == ("hm", "Rain.", "Rain.")
        assert app.render("A bell.", 2.0) == (None, "hm", "Rain.")
        server.answer = (200, SPOKEN)
        (rate, samples), thinking, said = app.render("A bell.", 2.0)
        assert (rate, len(samples), thinking, said) == (16_000, 1600, "so", "A bell.")
    finally:
        server.close()
